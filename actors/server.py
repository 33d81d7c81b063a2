"""What `outrider serve` does: a cluster, a deployed application, and an orderly end.

    port and memory -> connect_ray -> serve.start -> the application answers -> drain -> delete
What goes wrong on the way is one error that names its cause; what was started by then is ended. The
application itself, which `serve run` deploys too, is made in serve.py.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from outrider.actors import console
from outrider.actors.cluster.imports import HOME
from outrider.actors.cluster.kinds import free_host_bytes
from outrider.actors.cluster.placement import (
    Cluster,
    PlacementError,
    bundles,
    connect_ray,
    is_private,
    missing,
)
from outrider.actors.cluster.processes import killed, lost_process, sigterm_blocked
from outrider.actors.cluster.spec import Spec
from outrider.actors.draining import POLL_S
from outrider.actors.errors import EngineDeadError
from outrider.actors.ranks.group import USER_ERRORS
from outrider.actors.serve import (
    application,
    effective_mode,
    most_replicas,
    rank_memory,
    serving_spec,
)
from outrider.model.config import ConfigError

log = logging.getLogger(__name__)
APPLICATION, ROUTE = "outrider", "/"
WATCH_S = 0.5
"""Between two looks at Ray's processes."""
TELL_S = 10.0
"""Between two words on a start that goes on."""
DRAIN_CALL_S = 10.0
"""Longest wait for the replicas' answer to one look at what is open."""
CUT_S = 3.0
"""The same where the cluster has lost a part."""


def run_server(
    config: str | Path | None, overrides: Mapping[str, object], instance: str | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends open requests. stdout stays empty.

    instance: from `prefer_haproxy`.
    """
    spec = serving_spec(config, overrides)
    model_dir, model = spec.open_model()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    mode = effective_mode(spec.run_config(model, model_dir, 0), model)
    console.say(f"{model_dir.name}: {mode['line']}")
    console.say(f"{model_dir.name}: {spec.describe_defaults(model)}")
    with contextlib.redirect_stdout(sys.stderr), console.progress(), serving(spec, instance) as url:
        # Not before: ray.init sets a handler of its own.
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        console.say(f"ready: {url} (metrics, health and statistics: docs/serving.md)")
        with contextlib.suppress(KeyboardInterrupt):
            while (lost := lost_process()) is None:
                time.sleep(WATCH_S)
            raise EngineDeadError(lost)
        console.say(f"ending; requests may go on for {spec.serve.drain_timeout_s:g} s")


@contextlib.contextmanager
def serving(spec: Spec, instance: str | None = None) -> Iterator[str]:
    """A server from start to end: yields its URL once it answers. ConfigError, EngineDeadError."""
    model_dir, model = spec.open_model()
    app = application(spec, instance if is_private(spec) else None)
    engines = most_replicas(spec)
    if is_private(spec):
        check_port(spec)
    elif spec.serve.tls:
        raise spec.error("serve.tls", "needs a cluster of its own (ray.address: null)")
    if is_private(spec):
        spec.resolve_pages(model, model_dir, rank_memory(spec, free_host_bytes() // engines))
    # Ray lets workers import from the current folder of whoever connects; Serve's own do so before
    # any code of ours runs.
    with contextlib.chdir(HOME), sigterm_blocked():
        cluster = connect_ray(spec, engines=engines)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        why = missing(bundles(spec), nodes)
        if why is not None:
            raise PlacementError(f"a replica cannot be placed: {why}")
        replicas = _deploy(app, spec)
        # A first call needs more of Ray than the next: than one that has lost its GCS can do.
        replicas.broadcast("check_health").results(timeout_s=DRAIN_CALL_S, return_exceptions=True)
        try:
            scheme = "https" if spec.serve.tls else "http"
            yield f"{scheme}://{spec.serve.host}:{spec.serve.port}/v1"
        finally:
            if lost_process():
                cut_soon(replicas)
            else:
                drain(replicas, spec.serve.drain_timeout_s)
    finally:
        _end(cluster)


def check_port(spec: Spec) -> None:
    """ConfigError when nothing can listen at serve.host and serve.port."""
    host, port = spec.serve.host, spec.serve.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as problem:
        taken = problem.errno == errno.EADDRINUSE
        why = "is taken" if taken else f"cannot be listened at: {problem.strerror}"
        raise ConfigError(
            f"{host}:{port} {why}; change serve.host, serve.port (--host, --port)"
        ) from None


def _deploy(app: Application, spec: Spec) -> DeploymentHandle:
    """Start Serve and the application; returns when it answers."""
    try:
        log.info("starting Ray Serve")
        serve.start(http_options={"host": spec.serve.host, "port": spec.serve.port})
        count, ranks = spec.serve.num_replicas, spec.parallel.tensor_parallel
        log.info("starting %d x %d ranks, which load the weights", count, ranks)
        with _telling("the ranks are starting"):
            return serve.run(app, name=APPLICATION, route_prefix=ROUTE)
    except RayServeException as problem:  # of what Serve refuses, such as a route that is taken
        cause = getattr(problem, "cause", problem)
        raise PlacementError(f"Ray Serve refuses: {cause} (serve status, serve delete)") from None
    except RuntimeError as problem:
        raise start_error(_why_replicas_failed() or str(problem)) from None


@contextlib.contextmanager
def _telling(text: str) -> Iterator[None]:
    """Log a text every TELL_S, for as long as the body takes."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(TELL_S):
            log.info(text)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _why_replicas_failed() -> str:
    """The last error of the replicas' start as Serve keeps it; empty where it has none."""
    with contextlib.suppress(RayError, RayServeException):
        overview = serve.status().applications.get(APPLICATION)
        deployments = overview.deployments.values() if overview else ()
        return "\n".join(one.message for one in deployments if one.message)
    return ""


def start_error(text: str) -> Exception:
    """What ended the start of a replica, from Serve's account: a traceback, its error at the end.

    ConfigError where it was one in the replica, else EngineDeadError with the whole account.
    """
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    kind, _, message = last.partition(": ")
    if kind.rpartition(".")[2] in USER_ERRORS:
        return ConfigError(message)
    return EngineDeadError(f"the server did not start: {last}", text)


def _end(cluster: Cluster) -> None:
    """Delete the application, if it came to one, and undo what started it."""
    if lost_process():  # Serve would wait for what does not answer any more
        with killed(first=True):
            cluster.close()
        return
    # Ray prints that a call which ends Serve's controller was not answered by it.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            if ray.is_initialized():
                with contextlib.suppress(RayServeException):  # Serve was not started
                    delete_application()
                    if cluster.private:
                        serve.shutdown()
        finally:
            with killed() if cluster.private else contextlib.nullcontext():
                cluster.close()


def delete_application() -> None:
    """Take the application off Serve, which waits for its replicas for 60 s."""
    try:
        serve.delete(APPLICATION)
    except TimeoutError:
        log.warning("a replica hangs; Serve kills it after serve.drain_timeout_s")


def drain(replicas: DeploymentHandle, timeout_s: float) -> None:
    """Make every replica refuse new requests; returns when those under way have ended.

    Deleting the application takes its route away at once, and clients would get 404 while streams
    are still open: so this comes first. After timeout_s open requests end with an error.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        while _open_requests(replicas) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    finally:  # also when a second Ctrl-C strikes
        _open_requests(replicas, cut=True)


def cut_soon(replicas: DeploymentHandle) -> None:
    """End what is open with an error, where Ray may not carry the call any more: within CUT_S."""
    cutting = threading.Thread(target=_open_requests, args=(replicas,), kwargs={"cut": True})
    cutting.daemon = True
    cutting.start()
    cutting.join(CUT_S)


def _open_requests(replicas: DeploymentHandle, *, cut: bool = False) -> int:
    """Sum over the replicas that answer; one that is dead or stuck has nothing to wait for."""
    try:
        counts = replicas.broadcast("drain", cut=cut).results(
            timeout_s=DRAIN_CALL_S, return_exceptions=True
        )
    except (RayError, RayServeException, TimeoutError) as problem:
        log.warning("the replicas could not be asked to drain: %s", problem)
        return 0
    return sum(count for count in counts if isinstance(count, int))
