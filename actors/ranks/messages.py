"""What the driver and the ranks say to each other besides plans and progress (model/step.py).

    both ends -- Hello --> both ends
    leader -- Loading --> driver      driver -- Commands --> leader
All of these travel as msgpack over a `Connection` (ranks/connection.py).
"""

from __future__ import annotations

import msgspec

from outrider.model.step import Command

DRIVER = -1
"""The driver's number where the ranks have theirs."""


class Hello(msgspec.Struct, frozen=True):
    """The first message each way: who is at the other end of a connection."""

    rank: int
    """DRIVER or a rank's number."""


class Loading(msgspec.Struct, frozen=True):
    """How far the leader's weights are, before its first StepEvent."""

    done_bytes: int
    total_bytes: int
    ended: bool = False
    """True on the last one: weights loaded, warmed up."""


class Commands(msgspec.Struct, frozen=True):
    """From the driver to the leader: commands in order; `stop` ends every rank's run()."""

    commands: list[Command] = []
    stop: bool = False
