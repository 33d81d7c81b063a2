"""What the driver and the ranks say to each other besides plans and progress (model/step.py).

    both ends -- Hello --> both ends
    leader -- Loading --> driver      driver -- Orders --> leader
All of these travel as msgpack over a `Wire` (ranks/wire.py).
"""

from __future__ import annotations

import msgspec

from outrider.model.step import Join, Leave


class Hello(msgspec.Struct, frozen=True):
    """First message each way: both ends of a wire belong to this epoch."""

    epoch: int
    rank: int
    """-1 is the driver."""


class Loading(msgspec.Struct, frozen=True):
    """How far the leader's weights are, before its first StepEvent."""

    done_bytes: int
    total_bytes: int
    ended: bool = False
    """True on the last one: weights loaded, warmed up."""


class Orders(msgspec.Struct, frozen=True):
    """The driver's word to the leader: commands in order; `stop` ends every rank's run()."""

    commands: list[Join | Leave] = []
    stop: bool = False
