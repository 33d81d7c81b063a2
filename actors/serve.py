"""Ray Serve: a replica hosts a Driver in its event loop, with its ranks in one placement group.

    outrider serve (server.py), serve run outrider.actors.serve:app --> the application
    HTTP -> Serve's proxy -> Replica (Endpoints -> Driver) -> ranks
Bundle 0 of a replica's placement group is the replica, the others are its ranks. Admission is the
driver's: Serve's own limits are wide. A replica whose engine died fails its health check, and Serve
puts a new one in its place.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from outrider.actors.cluster.imports import isolate_worker
from outrider.actors.cluster.loopback import replica_on_loopback
from outrider.actors.cluster.placement import DRIVER_CPUS, bundles, engines_that_fit
from outrider.actors.cluster.processes import ignore_sigterm
from outrider.actors.cluster.reader import load_spec, parse_set
from outrider.actors.cluster.shares import HostShare, claim_share
from outrider.actors.cluster.spec import DEFAULT_FILE, Spec
from outrider.actors.draining import MARGIN_S, POLL_S, drain, on_shutdown
from outrider.actors.driver.assembly import DriverSetup, assemble, limits_of
from outrider.actors.http.endpoints import Endpoints
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.text import Tokenizer

log = logging.getLogger("ray.serve")
DEPLOYMENT = "Outrider"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Serve's own loop runs the driver: two loops hand every event from thread to thread, which costs
the CPU more than the event itself. No request holds it: work that grows with a body is done in
another process or in threads (http/reading.py, http/prompts.py)."""
START_TRIES = 2
"""A start that failed is tried once more: another engine may have been on its way out."""


@serve.ingress()
class Replica:
    """One engine behind HTTP."""

    async def __init__(
        self, spec: Spec, keys: tuple[bytes, ...] = (), instance: str | None = None
    ) -> None:
        """spec: from `serving_spec`. keys: SHA-256 digests of the API keys; none: everyone may.
        instance: from `prefer_haproxy`."""
        isolate_worker()
        replica_on_loopback()
        ignore_sigterm()
        _log_beside_serve()
        model_dir, model = spec.open_model()
        share = claim_replica_share(spec)
        pages = spec.resolve_pages(model, model_dir, rank_memory(spec, share.memory_bytes))
        run = spec.run_config(model, model_dir, pages)
        placement = ray.util.get_current_placement_group()
        assert placement is not None, "a replica is placed with its ranks (application())"
        setup = DriverSetup(
            spec=spec,
            run=run,
            limits=limits_of(spec, model, run),
            placement=placement,
            name=f"outrider:{serve.get_replica_context().replica_id.unique_id}",
        )
        self._mode = effective_mode(run, model)
        self._driver, notes = assemble(setup, share)
        await self._driver.start()
        for note in notes + self._driver.ranks.warnings():
            log.warning(note)
        log.info("%s", self._mode["line"])
        log.info("%s", spec.describe_defaults(model))
        text = self._driver.text
        assert text is None or isinstance(text, Tokenizer)
        self._endpoints = Endpoints(
            self._driver,
            text,
            serve=spec.serve,
            model=spec.serve.model_id or model_dir.name,
            about=self._about,
            keys=keys,
            instance=instance,
        )
        self._endpoints.start()
        on_shutdown(lambda: drain(self._endpoints, spec.serve.drain_timeout_s))
        gc.freeze()  # what is loaded stays: looking for garbage in it would hold the loop for 0.3 s

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._endpoints.app

    async def check_health(self) -> None:
        """Serve's question, every HEALTH_PERIOD_S; the driver's watchdog sees ranks that hang."""
        if self._driver.error is not None:
            raise self._driver.error

    async def drain(self, *, cut: bool = False) -> int:
        """Refuse new requests -> how many are still open. cut: end those with an error."""
        return self._endpoints.drain(cut=cut)

    async def __del__(self) -> None:
        """Serve calls this when it ends a replica, after the requests that it has sent here."""
        if hasattr(self, "_endpoints"):  # the start may have failed
            self._endpoints.close()
            await self._driver.close()

    def _about(self) -> dict[str, Any]:
        return {
            **self._mode,
            "driver": {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))},
            "ranks": self._driver.ranks.stats(),
        }


def _log_beside_serve() -> None:
    """What this package logs in a replica goes to the file that Serve's own lines go to."""
    ours = logging.getLogger("outrider")
    ours.handlers, ours.propagate = log.handlers, False
    ours.setLevel(log.getEffectiveLevel())


def most_replicas(spec: Spec) -> int:
    """How many engines a server of this spec may run at a time."""
    return spec.serve.max_replicas or spec.serve.num_replicas


def claim_replica_share(spec: Spec) -> HostShare:
    """What this replica takes of its node, which it may share with others; until it ends."""
    context = ray.get_runtime_context()
    (node,) = (one for one in ray.nodes() if one["NodeID"] == context.get_node_id())
    group = f"{context.gcs_address}:{serve.get_replica_context().app_name}"
    return claim_share(spec, group, engines_that_fit(spec, most_replicas(spec), node["Resources"]))


def rank_memory(spec: Spec, engine_bytes: int) -> int | None:
    """Host memory of each rank of an engine; None on a device with a memory of its own."""
    return engine_bytes // spec.parallel.tensor_parallel if spec.device == "cpu" else None


def effective_mode(run: RunConfig, model: ModelConfig) -> dict[str, Any]:
    """What speculation really does with this configuration; `line` says it in words."""
    slots, depth, size = run.max_slots, run.draft_tokens, run.tensor_parallel
    kind = "single-slot" if slots == 1 else "multi-slot"
    why = None
    if not depth:
        why = (
            "speculation.draft_tokens = 0" if model.num_mtp_layers else "the model has no MTP layer"
        )
        words = f"speculation is off ({why})"
    else:
        most = f"0 to {depth}, as measured," if run.auto_depth else str(depth)
        home = "whole on every rank" if run.draft_body == "local" else f"sharded over {size} ranks"
        words = (
            f"{kind} speculation is active: {most} drafts an iteration for each slot, "
            f"LM head over {size} ranks, draft body {home}"
        )
    return {
        "line": f"{slots} {'slot' if slots == 1 else 'slots'}; {words}",
        "mode": kind,
        "slots": slots,
        "draft_tokens": depth,
        "draft_tokens_auto": run.auto_depth,
        "speculation_off_because": why,
        "head_group": list(range(size)),
        "draft_body": run.draft_body if depth else None,
        "draft_head": run.draft_head if depth else None,
    }


def serving_spec(config: str | Path | None, overrides: Mapping[str, object]) -> Spec:
    """cluster.yaml as a server reads it: `serve.slots` counts, and the model's path is whole."""
    spec = load_spec(config, overrides)
    if spec.serve.slots is not None:
        spec = load_spec(config, {**overrides, "limits.max_slots": spec.serve.slots})
    if Path(spec.model).is_dir():
        spec = dataclasses.replace(spec, model=str(Path(spec.model).resolve()))
    return spec


def api_keys(spec: Spec) -> tuple[bytes, ...]:
    """SHA-256 of each key in serve.api_key_file. ConfigError where the file breaks its rules."""
    if spec.serve.api_key_file is None:
        return ()
    try:
        lines = Path(spec.serve.api_key_file).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise spec.error("serve.api_key_file", f"cannot be read: {problem}") from None
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        if len(key.split()) > 1:
            rule = "a line is one key without white space, or a comment that begins with #"
            raise spec.error("serve.api_key_file", f"line {number}: {rule}")
    if not keys:
        raise spec.error("serve.api_key_file", "must hold a key a line: it holds none")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys.values())


def application(spec: Spec, instance: str | None = None) -> Application:
    """The Serve application of a spec from `serving_spec`. instance: from `prefer_haproxy`."""
    settings, limits = spec.serve, spec.limits
    options: dict[str, Any] = {"num_replicas": settings.num_replicas}
    if settings.max_replicas:
        options = {
            "autoscaling_config": {
                "min_replicas": settings.num_replicas,
                "max_replicas": settings.max_replicas,
                "target_ongoing_requests": limits.max_slots,
            }
        }
    deployment: Any = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": DRIVER_CPUS, "runtime_env": {"env_vars": ONE_LOOP}},
        placement_group_bundles=bundles(spec),
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=2 * (limits.max_slots + limits.max_queue),
        graceful_shutdown_timeout_s=settings.drain_timeout_s + MARGIN_S,
        graceful_shutdown_wait_loop_s=POLL_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        max_constructor_retry_count=START_TRIES,
        **options,
    )
    return deployment(Replica).bind(spec, api_keys(spec), instance)


def build(args: dict[str, Any]) -> Application:
    """For `serve run outrider.actors.serve:build config=FILE speculation.draft_tokens=5`."""
    overrides = dict(args)
    config = overrides.pop("config", None) or (
        DEFAULT_FILE if Path(DEFAULT_FILE).is_file() else None
    )
    for key, value in overrides.items():
        if isinstance(value, str):
            overrides[key] = parse_set(f"{key}={value}")[1]
    return application(serving_spec(config, overrides))


def __getattr__(name: str) -> Application:
    """`outrider.actors.serve:app` is the application of ./cluster.yaml, made on first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build({})
