"""A rank as a Ray actor: one line a method over ranks/rank.py.

    prepare -> open (rank 0) -> connect -> load -> run (one long call) -> shutdown
Ray starts the process and carries these calls; everything else goes over connections. Ray pickles
the class with what its methods find at the top of this module, and unpickles it before __init__ has
settled from where this process imports: so a method imports what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from outrider.actors.ranks.rank import Location, Rank, RankSetup, Rendezvous


@ray.remote
class RankActor:
    """A Rank in a Ray worker process.

    It has no concurrency group, so that run() holds the worker's main thread; while that thread is
    free, Ray wakes it a hundred times a second (1 % of a core). prepare() does what __init__ could,
    because the driver gets the error of a method as it was raised.
    """

    _rank: Rank

    def __init__(self) -> None:
        from outrider.actors.cluster.imports import isolate_worker

        isolate_worker()

    def prepare(self, setup: RankSetup) -> Location:
        from dataclasses import replace

        from outrider.actors.cluster.placement import near_cpus
        from outrider.actors.ranks.processes import ProcessId
        from outrider.actors.ranks.rank import Location, Rank

        if setup.device == "npu" and setup.spec.parallel.rank_cpus == "auto":
            ids = ray.get_runtime_context().get_accelerator_ids()
            setup = replace(setup, cpus=near_cpus(setup.device, ids) or setup.cpus)
        self._rank = Rank(setup)
        node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()
        me, leftovers = ProcessId.of_this(), self._rank.leftovers
        return Location(node=node, host=host, process=me, leftovers=leftovers)

    def open(self, host: str, peers: Sequence[bool], driver_here: bool) -> Rendezvous:
        return self._rank.open(host, peers, driver_here)

    def connect(self, rendezvous: Rendezvous) -> int:
        from outrider.actors.cluster.placement import device_index

        ids = ray.get_runtime_context().get_accelerator_ids()
        device = self._rank.setup.device
        return self._rank.connect(rendezvous, device_index(device, ids, os.environ))

    def load(self, num_pages: int) -> dict[str, Any]:
        return self._rank.load(num_pages)

    def run(self) -> None:
        self._rank.run()

    def shutdown(self) -> None:
        self._rank.shutdown()
