"""Spec: the frozen configuration of one engine, as cluster.yaml gives it.

    cluster.yaml -> reader.py -> Spec        Spec + ModelConfig -> pages -> RunConfig
A RunConfig is the part that the model room knows. `Spec.origins` remembers where each value was
written, so that an error raised later still names the place to change.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from outrider.actors.cluster.kinds import NPU_PAGE_TOKENS, free_host_bytes
from outrider.model.config import (
    GENERATION_FILE,
    Ablation,
    ConfigError,
    ModelConfig,
    RunConfig,
    load_config,
)
from outrider.model.folder import resolve_model
from outrider.model.step import MAX_DRAFT_TOKENS
from outrider.parallel import affinity

DEFAULT_FILE = "cluster.yaml"
MAX_AUTO_MODEL_LEN, MAX_AUTO_DEPTH = 4096, 5
SNAPSHOTS_PER_SLOT, MIN_AUTO_SNAPSHOTS = 4, 32
"""What `auto` means at most for limits.max_model_len and speculation.draft_tokens."""

Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """How many ranks, what joins them, and where they run."""

    tensor_parallel: Count = 2
    """Ranks of the target model: one process and one device each."""
    expert_parallel: bool = False
    """Models with experts: whether ranks share the experts, instead of each expert's columns."""
    collective: Literal["auto", "shm", "gloo", "nccl", "hccl"] = "auto"
    """What carries tensors between ranks; auto picks by device."""
    rank_cpus: tuple[str, ...] | Literal["auto"] | None = "auto"
    """One range a rank ("240-279"); auto: an even split of the CPUs that no other engine on this
    host has, where they suffice (on npu those near the card, where npu-smi names them); null: no
    pinning."""
    driver_cpus: str | None = None
    """Range of the driver; null: it is not pinned."""


@dataclass(frozen=True, kw_only=True)
class SpeculationSpec:
    """How far the draft rides ahead, and where its body lives."""

    draft_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | Literal["auto"] = 3
    """K, tokens drafted an iteration; 0 is plain decoding; auto: up to 5, as many as measured times
    and acceptance make worth while."""
    drafter: Literal["mtp", "lookup", "both"] = "mtp"
    """Where drafts come from: the checkpoint's MTP layer; lookup: what followed the last tokens
    where they stood before in the request, which needs no MTP layer; both: lookup where a match is
    long, else the MTP layer."""
    draft_head: Literal["model", "fp8"] = "model"
    """Weights that score drafts: the checkpoint's, or a copy rounded to float8: half the bytes to
    read for each draft, the same output, a few drafts other than before."""
    draft_body: Literal["local", "sharded"] = "local"
    """local: whole on every rank; sharded: over the target's ranks, as its LM head always is."""
    pin_rows: bool = False
    """Plain decoding runs K+1 rows too, so that bfloat16 tokens agree with and without drafts."""


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Paged KV memory of one rank."""

    page_tokens: Count | Literal["auto"] = "auto"
    """Tokens a page holds; auto: 16, on npu 128."""
    num_pages: Count | Literal["auto"] = "auto"
    """auto: max_slots requests of full length, or what the memory holds if that is less."""
    max_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.84
    """Share of a rank's memory that weights, states and pages may take."""
    prefix: bool = True
    """Prompts that begin like an earlier one start from where they differ (not with
    speculation.pin_rows, which promises bits)."""
    prefix_bytes: Count | Literal["auto"] = "auto"
    """Memory of a rank for the states behind prompts' beginnings; auto: 4 states a slot, at least
    32."""
    prefix_tokens: Count = 2048
    """A long prompt's state is saved at multiples of so many tokens, and at its end."""
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What operations of the delta net may round a state to on its way (its memory is float32);
    auto: what the checkpoint says."""


@dataclass(frozen=True, kw_only=True)
class LimitsSpec:
    """How much work is in flight at a time."""

    max_slots: Count = 8
    """Requests that decode together."""
    max_model_len: Count | Literal["auto"] = "auto"
    """Prompt + answer, in tokens; auto: what the model allows, at most 4096."""
    prefill_chunk: Count = 512
    """Prompt tokens a step takes before the decoding requests get their turn."""
    max_queue: Count = 1024
    """Requests that may wait for a slot; more are refused."""
    batch_buckets: tuple[Count, ...] = ()
    """Batch sizes an iteration is padded to, rising, the last = max_slots; empty: no padding."""


@dataclass(frozen=True, kw_only=True)
class RaySpec:
    """Which Ray cluster, and how long to wait for it."""

    address: str | None = None
    """null: the cluster this process or job is in, else a private one that ends with it."""
    namespace: str = "outrider"
    """Ray namespace of the actors."""
    placement_timeout_s: Seconds = 30.0
    """Longest wait for free devices and CPUs."""
    start_timeout_s: Seconds = 300.0
    """Longest wait for all ranks to load and answer."""
    collective_timeout_s: Seconds = 120.0
    """Longest wait of one rank for another inside a collective."""
    object_store_bytes: Annotated[int, Meta(ge=75 << 20)] = 100 << 20
    """Object store of a private cluster; tensors never pass through it. Ray's minimum: 75 MiB."""
    cpus_per_rank: Amount = 1
    """Ray's CPU count of a rank: the rank's resource on `cpu`, beside the device elsewhere."""


@dataclass(frozen=True, kw_only=True)
class RecoverySpec:
    """When the group of ranks counts as lost, and how often another one takes its place."""

    loading_s: Seconds = 120.0
    """Longest wait, while the ranks start and load, for the next sign of progress."""
    warmup_s: Seconds = 300.0
    """Longest warm-up: kernels are compiled and iterations captured."""
    prefill_s: Seconds = 60.0
    """Longest wait for a step while a request has not got a token since it joined."""
    decode_s: Seconds = 30.0
    """Longest wait for a step while all requests in slots decode."""
    max_losses: Amount = 5
    """Losses within window_s after which the ranks are started again; one more ends the engine."""
    window_s: Seconds = 300.0
    """See max_losses."""


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """The OpenAI endpoints on Ray Serve. Each replica is an engine with its own ranks."""

    host: str = "127.0.0.1"
    """Address that `outrider serve` listens on; 0.0.0.0: all."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """Of HTTP."""
    haproxy: bool = True
    """`outrider serve` with its own cluster: HAProxy before the replicas, if it is installed."""
    model_id: str | None = None
    """Name of the model for clients; null: its folder's."""
    generation_defaults: Literal["model", "neutral"] = "model"
    """What a request leaves open, through a server, a job or an Engine: "model": as the model's
    generation_config.json says; "neutral": temperature 1, through an Engine 0, and no filters."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What becomes of a request with fields that the server does not know: it is refused by their
    names, or answered without them."""
    request_templates: bool = False
    """Whether a chat may bring a chat template of its own, a program that runs in the replica."""
    special_tokens: bool = False
    """Whether names of special tokens in the messages of a chat are those tokens, through a server,
    a job or `generate --chat`; else they are plain text."""
    docs: bool | Literal["auto"] = "auto"
    """Whether /openapi.json and /docs describe the API, to everyone; auto: unless api_key_file is
    set."""
    page: bool = True
    """Whether a page at / lets people try the server in a browser, to everyone; with api_key_file
    they give it their key."""
    cors_origins: tuple[str, ...] | Literal["*"] = ()
    """Origins (scheme://host:port) of web pages that may call the server from a browser; "*": all
    of them."""
    slots: Count | None = None
    """Requests that decode together when serving; null: limits.max_slots."""
    num_replicas: Count = 1
    """Replicas; with max_replicas the fewest that run."""
    max_replicas: Count | None = None
    """Most replicas, which Serve starts and ends by load; null: num_replicas at all times."""
    api_key_file: str | None = None
    """File of the keys that clients may use, one a line; null: everyone may."""
    tls: str | None = None
    """PEM file with the server's certificate, its chain and its private key; null: no TLS."""
    request_timeout_s: Seconds = 30.0
    """Longest time that the headers of a request may take to arrive, and then its body."""
    reader_timeout_s: Seconds = 120.0
    """Longest time that a client may read nothing of an answer that is there."""
    client_connections: Annotated[int, Meta(ge=0)] = 512
    """Most connections of one address; 0: any number, as behind a proxy of your own."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait for a slot; then 429."""
    drain_timeout_s: Seconds = 60.0
    """How long open requests may go on when a replica is to end."""
    max_body_bytes: Count = 4 << 20
    """Largest body of a request."""
    max_choices: Count = 128
    """Most answers of a request: prompts x n."""


SECTIONS = {
    "parallel": ParallelSpec,
    "speculation": SpeculationSpec,
    "cache": CacheSpec,
    "limits": LimitsSpec,
    "ray": RaySpec,
    "recovery": RecoverySpec,
    "serve": ServeSpec,
    "ablation": Ablation,
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All of cluster.yaml. `reader.load_spec` makes one and checks it."""

    model: str
    """A local Hugging Face folder, relative to the file, or a hub id."""
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    """Device kind of every rank."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights, activations and KV; auto: float32 on cpu, bfloat16 elsewhere."""
    quantization: Literal["model", "fp8"] = "model"
    """How matrices are stored: as in the checkpoint, or rounded to FP8 at load where that has them
    as plain numbers: half the bytes to read, other tokens."""
    parallel: ParallelSpec = ParallelSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    cache: CacheSpec = CacheSpec()
    limits: LimitsSpec = LimitsSpec()
    ray: RaySpec = RaySpec()
    recovery: RecoverySpec = RecoverySpec()
    serve: ServeSpec = ServeSpec()
    ablation: Ablation = field(default_factory=Ablation)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Dotted key -> where it was written, for errors. Not itself a key of the file."""

    def error(self, key: str, rule: str) -> ConfigError:
        """An error that names a dotted key, its value, the rule, and the place to change it."""
        value = functools.reduce(getattr, key.split("."), self)
        return config_error(key, value, self.origins.get(key, "default"), rule)

    @property
    def resolved_dtype(self) -> str:
        """dtype with "auto" replaced."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def resolved_page_tokens(self) -> int:
        """cache.page_tokens with "auto" replaced."""
        if self.cache.page_tokens != "auto":
            return self.cache.page_tokens
        return NPU_PAGE_TOKENS if self.device == "npu" else 16

    def rank_cpu_sets(
        self, allowed: frozenset[int] | None = None, share: frozenset[int] | None = None
    ) -> tuple[frozenset[int] | None, ...]:
        """The CPUs of each rank, None where it is not pinned. Call it on the ranks' own machine.

        allowed: CPUs that this machine lets us use; None asks the system. share: the part of them
        that rank_cpus: auto splits; None is all. Raises ConfigError when a configured range has
        none of the allowed CPUs, warns when it has only some.
        """
        size, ranges = self.parallel.tensor_parallel, self.parallel.rank_cpus
        allowed = affinity.allowed_cpus() if allowed is None else allowed
        if ranges == "auto":
            share = allowed if share is None else share
            if not affinity.can_pin() or len(share) < size:
                return (None,) * size
            return affinity.split_evenly(share, size)
        if ranges is None:
            return (None,) * size
        return tuple(self._usable("parallel.rank_cpus", text, allowed) for text in ranges)

    def driver_cpu_set(self, allowed: frozenset[int] | None = None) -> frozenset[int] | None:
        """The CPUs of the driver, None where it is not pinned; as `rank_cpu_sets`."""
        if self.parallel.driver_cpus is None:
            return None
        allowed = affinity.allowed_cpus() if allowed is None else allowed
        return self._usable("parallel.driver_cpus", self.parallel.driver_cpus, allowed)

    def _usable(self, key: str, text: str, allowed: frozenset[int]) -> frozenset[int]:
        """The allowed CPUs of a configured range. ConfigError for none, a warning for some."""
        wanted = affinity.parse_cpu_range(text)
        try:
            usable = affinity.usable_cpus(wanted, allowed)
        except affinity.AffinityError as problem:
            raise self.error(key, str(problem)) from None
        if usable != wanted:
            outside = affinity.format_cpus(wanted - usable)
            warnings.warn(f'{key}: "{text}": CPUs {outside} are not available here', stacklevel=3)
        return usable

    def open_model(self, *, check_weights: bool = True) -> tuple[Path, ModelConfig]:
        """Find the checkpoint and check that it fits this spec; returns its folder and its config.

        Reads the headers of weight files, and only with check_weights downloads them for a hub id.
        Raises ConfigError for a missing folder, a foreign architecture, counts that the ranks do
        not divide, and with check_weights for tensors that are missing, unused or mis-shaped.
        """
        from outrider.model import weights

        model_dir = resolve_model(self.model, with_weights=check_weights)
        stated = load_config(model_dir)
        model = weights.settle(stated, model_dir)
        if model.tie_word_embeddings != stated.tie_word_embeddings:
            warnings.warn(
                f"{stated.source}: tie_word_embeddings is true, but the checkpoint holds an "
                f"lm_head.weight that differs from the embedding: it is used",
                stacklevel=3,
            )
        model.check_divides(
            self.parallel.tensor_parallel, expert_parallel=self.parallel.expert_parallel
        )
        run = self.run_config(model, model_dir, 0)
        if check_weights:
            weights.check_weights(model_dir, model, run)
        return model_dir, model

    def sampling_defaults(self, model: ModelConfig) -> Mapping[str, float]:
        """What requests take for fields of Sampling that they leave open, by field."""
        return model.sampling_defaults if self.serve.generation_defaults == "model" else {}

    def describe_defaults(self, model: ModelConfig) -> str:
        """One line on `sampling_defaults`, for whoever starts an engine."""
        found = self.sampling_defaults(model)
        if found:
            words = ", ".join(f"{name} {value:g}" for name, value in found.items())
            return f"requests default to {words} ({GENERATION_FILE})"
        if self.serve.generation_defaults == "neutral":
            return "requests have no defaults of the model (serve.generation_defaults: neutral)"
        return f"requests have no defaults of the model ({GENERATION_FILE} gives none)"

    def max_model_len(self, model: ModelConfig) -> int:
        """limits.max_model_len with "auto" replaced. Raises ConfigError beyond the model's own."""
        most = model.max_position_embeddings
        if self.limits.max_model_len == "auto":
            return min(most, MAX_AUTO_MODEL_LEN)
        if self.limits.max_model_len > most:
            rule = f"at most {most}, max_position_embeddings (or YaRN's) in {model.source}"
            raise self.error("limits.max_model_len", rule)
        return self.limits.max_model_len

    def run_config(self, model: ModelConfig, model_dir: Path, num_pages: int) -> RunConfig:
        """What one rank's runner needs. Raises ConfigError for what the model cannot do."""
        depth, auto = self.speculation.draft_tokens, self.speculation.draft_tokens == "auto"
        if depth == "auto":
            has_drafter = model.num_mtp_layers or self.speculation.drafter == "lookup"
            depth = MAX_AUTO_DEPTH if has_drafter else 0
        if depth and not model.num_mtp_layers and self.speculation.drafter != "lookup":
            rule = (
                f"must be 0, or speculation.drafter lookup: {model.source} has no MTP layer to "
                f"draft with"
            )
            raise self.error("speculation.draft_tokens", rule)
        coarse = self.cache.state_dtype
        if coarse == "bfloat16" and not model.gdn.coarse_state:
            rule = f"must be auto or float32: {model.source} asks for float32 (mamba_ssm_dtype)"
            raise self.error("cache.state_dtype", rule)
        quantised = model.quantisation
        if self.quantization == "fp8" and quantised and quantised.method != "fp8":
            rule = f"must be model: {model.source} has weights quantised by {quantised.method}"
            raise self.error("quantization", rule)
        run = RunConfig(
            model_dir=str(model_dir),
            coarse_state=coarse != "float32",
            dtype=self.resolved_dtype,
            tensor_parallel=self.parallel.tensor_parallel,
            expert_parallel=self.parallel.expert_parallel,
            quantization=self.quantization,
            draft_tokens=depth,
            auto_depth=auto and depth > 0,
            drafter=self.speculation.drafter,
            draft_body=self.speculation.draft_body,
            draft_head=self.speculation.draft_head,
            max_slots=self.limits.max_slots,
            max_model_len=self.max_model_len(model),
            page_tokens=self.resolved_page_tokens,
            num_pages=num_pages,
            prefill_chunk=self.limits.prefill_chunk,
            batch_buckets=self.limits.batch_buckets,
            pin_rows=self.speculation.pin_rows,
            ablation=self.ablation,
        )
        return dataclasses.replace(run, num_snapshots=self._num_snapshots(model, run))

    def _num_snapshots(self, model: ModelConfig, run: RunConfig) -> int:
        """Saved states of prompts' beginnings that a rank has room for."""
        if not self.cache.prefix or run.pin_rows:
            return 0
        if self.cache.prefix_bytes == "auto":
            return max(MIN_AUTO_SNAPSHOTS, SNAPSHOTS_PER_SLOT * run.max_slots)
        from outrider.model.plan import snapshot_bytes

        each = snapshot_bytes(model, run)
        if self.cache.prefix_bytes < each:
            rule = f"at least {each:,}, one state of this model on a rank; or cache.prefix: false"
            raise self.error("cache.prefix_bytes", rule)
        return self.cache.prefix_bytes // each

    def page_budget(self, memory_bytes: int | None = None) -> int:
        """Bytes that a rank may use. memory_bytes: what it has; None: an equal part of the host's
        free memory."""
        if memory_bytes is None:
            memory_bytes = free_host_bytes() // self.parallel.tensor_parallel
        return int(memory_bytes * self.cache.max_memory_utilization)

    def resolve_pages(
        self, model: ModelConfig, model_dir: Path, memory_bytes: int | None = None
    ) -> int:
        """cache.num_pages with "auto" replaced, the null page included.

        memory_bytes: what a rank has. None on the CPU is an equal part of the host's free memory;
        None on another device gives the pages that are wanted, since only a rank sees its device.
        Raises ConfigError when a request of full length, or what was asked for, does not fit.
        """
        from outrider.model.plan import check_pages, memory_plan, overshoot_rows, pages_for

        run = self.run_config(model, model_dir, 0)
        one = pages_for(run.max_model_len + overshoot_rows(run.draft_tokens), run.page_tokens)
        wanted = self.cache.num_pages
        wanted = run.max_slots * one + 1 if wanted == "auto" else wanted
        plan = memory_plan(model, run)
        if memory_bytes is None and self.device != "cpu":
            check_pages(dataclasses.replace(run, num_pages=wanted), plan)
            return wanted
        budget = self.page_budget(memory_bytes)
        fit = max(0, plan.pages_that_fit(budget))
        if self.cache.num_pages != "auto":
            if wanted > fit:
                rule = (
                    f"only {fit} pages fit in the {budget:,} bytes that a rank may use: "
                    f"{plan.total_bytes(wanted) - budget:,} bytes too few"
                )
                raise self.error("cache.num_pages", rule)
            check_pages(dataclasses.replace(run, num_pages=wanted), plan)
            return wanted
        if fit <= one:
            need = plan.total_bytes(one + 1)
            raise self.error(
                "cache.num_pages",
                f"a request of limits.max_model_len = {run.max_model_len} takes {need:,} bytes a "
                f"rank with the weights and {run.max_slots} slots, {budget:,} may be used, "
                f"{need - budget:,} too few: lower limits.max_model_len, limits.max_slots or "
                f"cache.prefix_bytes, raise cache.max_memory_utilization or use more ranks",
            )
        return min(fit, wanted)


def config_error(key: str, value: object, where: str, rule: str) -> ConfigError:
    shown = list(value) if isinstance(value, tuple) else value
    text = "null" if shown is None else repr(shown)
    return ConfigError(f"{where}: {key} = {text}: {rule}")
