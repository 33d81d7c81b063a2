"""What a private cluster and its replicas listen at: ports of their own, on the loopback address.

    start_private -> ray_on_loopback          a replica -> replica_on_loopback
Ray gives some of its servers fixed ports, so that two clusters of a host would share them, and lets
most of them listen on all addresses: its own setting for this is one of Windows and macOS.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
from collections.abc import Iterator

import ray
from ray._private import parameter, ray_constants

LOOPBACK = "127.0.0.1"
PORTS = (
    "AUTOSCALER_METRIC_PORT",
    "DASHBOARD_METRIC_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""Variables of ports that would be the same in every cluster of a host."""
REPLICA_PORTS, FIRST_PORT, PORT_RANGES = 100, 20_000, 120
"""How many ports a cluster's replicas have, where the first range begins, how many there are."""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens at."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
    """A cluster that is started in the body is of this machine alone: its address is 127.0.0.1."""
    listening, params = ray_constants.ENABLE_RAY_CLUSTER, parameter.RayParams
    added = {name: value for name, value in _variables().items() if name not in os.environ}
    os.environ.update(added)
    ray_constants.ENABLE_RAY_CLUSTER = False
    parameter.RayParams = functools.partial(params, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameter.RayParams = params
        ray_constants.ENABLE_RAY_CLUSTER = listening
        for name in added:  # the cluster's processes have them; the next cluster gets its own
            del os.environ[name]


def _variables() -> dict[str, str]:
    """For the environment of a cluster. Ports of its own, also for its replicas: HAProxy goes on
    asking the port of a replica that has ended until it is told of the next, and with ranges of
    their own, that port is no other server's by then."""
    first = FIRST_PORT + REPLICA_PORTS * secrets.randbelow(PORT_RANGES)
    return {
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        **dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + REPLICA_PORTS),
    }


def replica_on_loopback() -> None:
    """In a private cluster, Serve's gRPC server of this replica, which nobody asks, listens on
    loopback too. To be called before the replica has started."""
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() != LOOPBACK:
        return

    listen = replica.add_port_to_grpc_server

    def on_loopback(server: object, address: str) -> int:
        return listen(server, address.replace("[::]", LOOPBACK))

    replica.add_port_to_grpc_server = on_loopback
