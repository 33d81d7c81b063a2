"""The Python API: one Engine is one model on its ranks, from first check to last process.

    from_config: cluster.yaml -> Spec -> checkpoint headers -> Ray -> DriverActor -> ranks
    generate, as_completed, stream, stats: over an EngineClient to the driver
    close: undoes from_config, in reverse
Everything a user can get wrong in file or checkpoint is checked before Ray starts. A cluster that
this process is connected to (a job, an actor) is used and left running.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from outrider.actors.cluster.placement import Cluster, bundle_options, bundles, connect_ray, place
from outrider.actors.cluster.reader import load_spec
from outrider.actors.cluster.spec import Spec
from outrider.actors.driver.actor import DriverActor
from outrider.actors.driver.assembly import DriverSetup, limits_of
from outrider.actors.driver.client import EngineClient
from outrider.actors.driver.messages import Chunk, Completion, GenerationRequest, RequestStats
from outrider.actors.errors import EngineClosedError, EngineDeadError, RequestError
from outrider.actors.loading import ProgressBar
from outrider.model.config import ModelConfig, RunConfig
from outrider.model.step import Grammar, Sampling

log = logging.getLogger(__name__)
__all__ = ["Chunk", "Completion", "Engine", "Grammar", "RequestStats", "Sampling"]

CLOSE_TIMEOUT_S = 30.0
POLL_S = 0.2
"""Between two looks at the loading progress."""

Prompt = str | list[int]
OnProgress = Callable[[int, int], None]
"""(bytes loaded, bytes to load), over all ranks."""


class Engine:
    """Made by `from_config`; close it, or use it as a context manager."""

    def __init__(
        self, spec: Spec, run: RunConfig, cluster: Cluster, placement: PlacementGroup, driver: Any
    ) -> None:
        self.spec = spec
        self.run = run
        self._cluster = cluster
        self._placement = placement
        self._driver: Any = driver
        self._call: Any = None
        """The driver's long call under way: start, then run."""
        self._client: EngineClient | None = None

    @classmethod
    def from_config(
        cls,
        config: str | Path | None = None,
        overrides: Mapping[str, object] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **more: object,
    ) -> Engine:
        """Start an engine. config: a cluster.yaml, None for defaults.

        overrides and keywords win over the file: `draft_tokens=5` or
        `{"speculation.draft_tokens": 5}`. on_progress is told of the loading; None shows a bar on
        a terminal. Raises ConfigError for what the user can change, EngineDeadError else.
        """
        spec = load_spec(config, {**(overrides or {}), **more})
        model_dir, model = spec.open_model()
        log.info("%s: %s", model_dir.name, spec.describe_defaults(model))
        run = spec.run_config(model, model_dir, spec.resolve_pages(model, model_dir))
        cluster = connect_ray(spec)
        try:
            return cls._start(spec, model, run, cluster, on_progress)
        except BaseException:
            cluster.close()
            raise

    @classmethod
    def _start(
        cls,
        spec: Spec,
        model: ModelConfig,
        run: RunConfig,
        cluster: Cluster,
        on_progress: OnProgress | None,
    ) -> Engine:
        name = f"outrider:{secrets.token_hex(4)}"
        placement = place(spec, name)
        options = bundle_options(placement, 0, bundles(spec)[0], name=f"{name}:driver", env={})
        driver: Any = cast(Any, DriverActor).options(**options).remote()
        engine = cls(spec, run, cluster, placement, driver)
        setup = DriverSetup(
            spec=spec, run=run, limits=limits_of(spec, model, run), placement=placement, name=name
        )
        try:
            with _progress(on_progress) as report:
                for note in engine._open(setup, report):
                    warnings.warn(note, stacklevel=3)
        except BaseException:
            engine.close()
            raise
        return engine

    def _open(self, setup: DriverSetup, report: OnProgress | None) -> list[str]:
        """Connect to the driver and start it; returns warnings for the user."""
        node = ray.get_runtime_context().get_node_id()
        self._client = client = EngineClient(_get(self._driver.open.remote(node)))
        self._call = self._driver.start.remote(setup)
        while report and not ray.wait([self._call], timeout=POLL_S)[0]:
            report(*client.loaded)
        notes = _get(self._call)
        self._call = self._driver.run.remote()
        client.watch(self._call.future())
        return notes

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        show_special: bool = False,
    ) -> list[Completion]:
        """Answer any number of prompts (text or token ids) together; returns in their order.

        Of several, a terminal shows how many are answered.

        sampling: one for all, or one each; None: the model's defaults, 16 tokens. stop: texts that
        end an answer, before them, or with include_stop after them. show_special: special tokens
        have text.
        RequestError when one can never be answered (then none is), EngineDeadError when the ranks
        die.
        """
        texts = _as_prompts(prompts)
        answers: dict[int, Completion] = {}
        with _progress_of_answers(len(texts)) as report:
            for index, answer in self.as_completed(
                texts, sampling, stop=stop, include_stop=include_stop, show_special=show_special
            ):
                answers[index] = answer
                report(len(answers), len(texts))
        return [answers[index] for index in range(len(texts))]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        show_special: bool = False,
    ) -> Iterator[tuple[int, Completion]]:
        """As `generate`, but each answer as soon as it is there, with the index of its prompt.

        Dropping the iterator ends the prompts that are not answered.
        """
        texts = _as_prompts(prompts)
        settings = _as_samplings(sampling, len(texts))
        requests = [
            GenerationRequest(
                prompt=prompt,
                sampling=one,
                key=secrets.token_hex(8),
                stop=tuple(stop),
                include_stop=include_stop,
                show_special=show_special,
            )
            for prompt, one in zip(texts, settings, strict=True)
        ]
        with self._aborting(requests):
            yield from self._open_client().generate(requests)

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        key: str = "",
    ) -> Iterator[Chunk]:
        """Answer one prompt piece by piece. Dropping the iterator aborts the request.

        key: the name under which `abort` finds it.
        """
        (only,) = _as_prompts(prompt)
        request = GenerationRequest(
            prompt=only,
            sampling=sampling or Sampling(),
            key=key or secrets.token_hex(8),
            stop=tuple(stop),
        )
        with self._aborting([request]):
            yield from self._open_client().stream(request)

    def abort(self, key: str) -> None:
        """End a stream from another thread: it raises RequestAbortedError. Unknown: no-op."""
        self._open_client().abort([key])

    def stats(self) -> dict[str, Any]:
        """Sums over all requests since the start, queue and cache, and a dict per rank."""
        return self._open_client().stats()

    def close(self) -> None:
        """End ranks, driver and a private cluster; open requests fail. Twice does no harm."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if ray.is_initialized():
            if self._client is not None and self._call is not None:
                self._client.stop()
                with contextlib.suppress(RayError):
                    ray.get(self._call, timeout=CLOSE_TIMEOUT_S)
            with contextlib.suppress(RayError):
                ray.kill(driver)
            remove_placement_group(self._placement)
        if self._client is not None:
            self._client.close()
        self._cluster.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_client(self) -> EngineClient:
        if self._driver is None or self._client is None:
            raise EngineClosedError("the engine is closed")
        return self._client

    @contextlib.contextmanager
    def _aborting(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """Requests end with their caller: Ctrl-C, an error, a dropped iterator."""
        try:
            yield
        except BaseException as error:
            if self._client is not None and not isinstance(error, (RequestError, EngineDeadError)):
                self._client.abort([request.key for request in requests])
            raise


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    kinds = set(map(type, prompts))
    if kinds <= {int}:  # [] too: an empty prompt, which the driver refuses
        return [list(cast(Sequence[int], prompts))]
    nested = {kind for kind in kinds if issubclass(kind, (str, Sequence))}
    if not nested:
        return [_as_ids(prompts)]
    if nested != kinds:
        alone = next(item for item in prompts if type(item) not in nested)
        raise RequestError(f"prompts mix token ids ({alone}, ...) with whole prompts")
    return [text if isinstance(text, str) else _as_ids(cast(Any, text)) for text in prompts]


def _as_ids(items: Sequence[object]) -> list[int]:
    """Any integers, numpy's too."""
    if set(map(type, items)) <= {int}:
        return list(cast(Sequence[int], items))
    ids = []
    for index, item in enumerate(items):
        try:
            ids.append(operator.index(cast(SupportsIndex, item)))
        except TypeError:
            raise RequestError(
                f"prompt token {item!r} at index {index}: token ids are integers"
            ) from None
    return ids


def _as_samplings(
    sampling: Sampling | Sequence[Sampling] | None, num_prompts: int
) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * num_prompts
    if len(sampling) != num_prompts:
        raise RequestError(f"{len(sampling)} samplings for {num_prompts} prompts: give one each")
    return list(sampling)


def _get(ref: Any) -> Any:
    """The result, or the error as it was raised, without Ray's wrapping."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise error.cause from None
    except GetTimeoutError:
        raise
    except RayActorError as error:
        raise EngineDeadError("the driver process died", str(error)) from None


@contextlib.contextmanager
def _progress(on_progress: OnProgress | None) -> Iterator[OnProgress | None]:
    """Who is told of the loading: the caller, a bar on a terminal, or nobody."""
    if on_progress is not None or not sys.stderr.isatty():
        yield on_progress
        return
    with contextlib.closing(ProgressBar()) as bar:
        yield bar.update


@contextlib.contextmanager
def _progress_of_answers(num_prompts: int) -> Iterator[OnProgress]:
    """Who is told of the answers: of several, a bar on a terminal; else nobody."""
    if num_prompts < 2 or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with contextlib.closing(ProgressBar("answering", " prompts")) as bar:
        yield bar.update
