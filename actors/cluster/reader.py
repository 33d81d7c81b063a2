"""Reads cluster.yaml, and nothing else does: file and overrides become a checked Spec.

    file -> dotted keys ("speculation.draft_tokens") + overrides -> types -> cross checks -> Spec
An override wins over the file, the file over the defaults of spec.py. The Spec remembers where each
value was written, so that an error raised later still names the place to change.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from outrider.actors.cluster.kinds import COLLECTIVES, NPU_MAX_ROWS, NPU_PAGE_TOKENS
from outrider.actors.cluster.spec import SECTIONS, Spec, config_error
from outrider.model.config import ConfigError
from outrider.parallel import affinity

RAY_LAUNCHER_KEYS = {
    "cluster_name", "provider", "auth", "docker", "available_node_types", "head_node_type",
    "max_workers", "file_mounts", "setup_commands", "head_setup_commands",
    "worker_setup_commands", "initialization_commands", "head_start_ray_commands",
    "worker_start_ray_commands", "upscaling_speed", "idle_timeout_minutes",
}  # fmt: skip
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[1-9][0-9]*)?")
"""What a browser sends as the origin of a page."""
WORDS: dict[object, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"
}  # fmt: skip


def load_spec(path: str | Path | None, overrides: Mapping[str, object] | None = None) -> Spec:
    """The configuration in a file, or the defaults where `path` is None, with `overrides` applied.

    The key of an override is dotted ("speculation.draft_tokens"), or its last part alone
    ("draft_tokens"). Raises ConfigError, which names key, value, rule and the place to change.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    if path is not None:
        for key, value in _flatten(_read_file(Path(path)), str(path)):
            values[key], origins[key] = _convert(key, value, str(path)), str(path)
        values |= _relative_model(values.get("model"), Path(path))
    short = {key.rpartition(".")[2]: key for key in _keys()}
    for name, value in _flatten(overrides or {}, "override"):
        key = short.get(name, name)
        values[key], origins[key] = _convert(key, value, "override"), "override"
    if not values.get("model"):
        where = origins.get("model", path or "no file")
        raise ConfigError(f"{where}: model is not set: write `model: FOLDER` or give --model")
    spec = _build(values, origins)
    _check_cpus(spec)
    _check_fits(spec)
    return spec


def parse_set(text: str) -> tuple[str, object]:
    """ "a.b=3" -> ("a.b", 3); the value is YAML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f'--set "{text}": expected KEY.SUBKEY=VALUE')
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as problem:
        raise ConfigError(f'--set "{text}": the value is not YAML: {_one_line(problem)}') from None


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key written twice is an error, not a silent overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below: no list or mapping can be a key
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f'line {line}: key "{key.value}" is written twice')
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_file(path: Path) -> Mapping:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read: {problem.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: not a YAML file: {_one_line(problem)}") from None
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected `key: value` lines, found {type(data).__name__}")
    if foreign := sorted(RAY_LAUNCHER_KEYS & data.keys()):
        raise ConfigError(
            f"{path}: {', '.join(foreign)}: these are keys of Ray's cluster launcher (`ray up`), "
            f"which also calls its file cluster.yaml; Outrider wants its own, with `model:` in it"
        )
    return data


def _flatten(data: Mapping, where: str) -> Iterator[tuple[str, object]]:
    """Each value with its dotted key; an empty section yields nothing."""
    for name, value in data.items():
        if name not in SECTIONS:
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif value is not None:
            raise config_error(str(name), value, where, "must be a section: keys indented below it")


@functools.cache
def _keys() -> dict[str, object]:
    """Dotted key -> type hint, of all that cluster.yaml may hold."""
    keys = dict(typing.get_type_hints(Spec, include_extras=True))
    del keys["origins"]
    for section, cls in SECTIONS.items():
        del keys[section]
        inner = typing.get_type_hints(cls, include_extras=True)
        keys |= {f"{section}.{name}": hint for name, hint in inner.items()}
    return keys


def _convert(key: str, value: object, where: str) -> object:
    """The value in its field's type. Raises ConfigError for an unknown key or a wrong value."""
    if key not in _keys():
        raise ConfigError(f"{where}: unknown key {key}{_suggestion(key)}")
    if isinstance(value, Path):
        value = str(value)
    if key.endswith("_cpus"):  # YAML reads the range "3" as a number
        value = _number_as_text(value)
    hint = _keys()[key]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise config_error(key, value, where, f"must be {_rule(hint)}") from None


def _number_as_text(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_number_as_text(item) for item in value]
    return str(value) if type(value) is int else value


def _suggestion(key: str) -> str:
    """What was probably meant by an unknown key, or which keys its section has."""
    section, _, name = key.rpartition(".")
    by_name = {known.rpartition(".")[2]: known for known in _keys()}
    top = [known for known in _keys() if "." not in known]
    names = [n for n, known in by_name.items() if known == f"{section}.{n}"]
    if name in by_name:
        close = [name]
    elif names:  # not the whole keys: they share the section's letters
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    else:
        close = difflib.get_close_matches(key, [*_keys(), *SECTIONS], n=1, cutoff=0.7)
        if not close and not section:
            close = difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {by_name.get(close[0], close[0])}?"
    if names:
        return f"; section {section} has {', '.join(names)}"
    return f"; there are {', '.join(top)} and the sections {', '.join(SECTIONS)}"


def _rule(hint: object) -> str:
    """What a value must be, in words, from its type hint."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(map(_rule, args))
    if kind is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if kind is tuple:
        return f"a list ({_rule(args[0])} each)"
    if kind is Annotated:
        words = {"ge": "at least", "gt": "above", "le": "at most"}
        bounds = ((word, getattr(args[1], name)) for name, word in words.items())
        return ", ".join([_rule(args[0]), *(f"{w} {b}" for w, b in bounds if b is not None)])
    return WORDS[hint]


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())


def _relative_model(model: object, path: Path) -> dict[str, object]:
    """`model` as a folder relative to the file's own; empty if there is no such folder."""
    folder = path.parent / str(model)
    return {"model": str(folder)} if model and folder.is_dir() else {}


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Spec:
    inner: dict[str, dict[str, Any]] = {section: {} for section in ("", *SECTIONS)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        inner[section][name] = value
    sections = {name: cls(**inner[name]) for name, cls in SECTIONS.items()}
    return Spec(**inner[""], **sections, origins=origins)


def _check_cpus(spec: Spec) -> None:
    """ConfigError unless CPU ranges can be read and there is one a rank; a warning if they overlap.

    Where the ranks will certainly run on this machine, the CPUs must be here too.
    """
    size, owners = spec.parallel.tensor_parallel, {}
    ranges, driver = spec.parallel.rank_cpus, spec.parallel.driver_cpus
    if isinstance(ranges, tuple):
        if len(ranges) != size:
            rule = f"has {len(ranges)} ranges, needs one a rank (parallel.tensor_parallel = {size})"
            raise spec.error("parallel.rank_cpus", rule)
        for rank, text in enumerate(ranges):
            owners[f"rank {rank}"] = _parse_range(spec, "parallel.rank_cpus", text)
    if driver is not None:
        owners["the driver"] = _parse_range(spec, "parallel.driver_cpus", driver)
    for (one, first), (other, second) in itertools.combinations(owners.items(), 2):
        if first & second:
            shared = affinity.format_cpus(first & second)
            warnings.warn(f"parallel: {one} and {other} share CPUs {shared}", stacklevel=3)
    if spec.device == "cpu" and spec.ray.address is None:
        spec.rank_cpu_sets()
        spec.driver_cpu_set()


def _parse_range(spec: Spec, key: str, text: str) -> frozenset[int]:
    try:
        return affinity.parse_cpu_range(text)
    except affinity.AffinityError as problem:
        raise spec.error(key, str(problem)) from None


def _check_fits(spec: Spec) -> None:
    """ConfigError for values that are fine alone and do not go together."""
    carriers = ("auto", *COLLECTIVES[spec.device])
    if spec.parallel.collective not in carriers:
        rule = f"on device {spec.device} it is {' or '.join(carriers)}"
        raise spec.error("parallel.collective", rule)
    if spec.device == "cpu" and not spec.ray.cpus_per_rank:
        raise spec.error("ray.cpus_per_rank", "must be from 1 on device cpu: it places the rank")
    if spec.device == "npu":
        _check_npu(spec)
    if spec.serve.max_replicas and spec.serve.max_replicas < spec.serve.num_replicas:
        rule = f"at least serve.num_replicas = {spec.serve.num_replicas}, or null"
        raise spec.error("serve.max_replicas", rule)
    _check_origins(spec)
    for key in ("ablation.greedy_probabilities", "ablation.gather_logits"):
        if getattr(spec.ablation, key.partition(".")[2]) and spec.speculation.draft_head != "model":
            raise spec.error(key, "needs speculation.draft_head = model: an fp8 head has no logits")
    buckets, most = spec.limits.batch_buckets, spec.limits.max_slots
    if buckets and (list(buckets) != sorted(set(buckets)) or buckets[-1] != most):
        raise spec.error("limits.batch_buckets", f"must rise and end with max_slots = {most}")


def _check_origins(spec: Spec) -> None:
    """ConfigError for an origin that no browser ever sends, so that no page would be allowed."""
    for origin in () if spec.serve.cors_origins == "*" else spec.serve.cors_origins:
        if not ORIGIN.fullmatch(origin) or re.fullmatch("http://.*:80|https://.*:443", origin):
            rule = (
                f'"{origin}" is no origin as browsers send it: scheme://host or '
                "scheme://host:port in lower case, without a path, and without the port where it "
                'is 80 of http or 443 of https; all pages are "*", not in a list'
            )
            raise spec.error("serve.cors_origins", rule)


def _check_npu(spec: Spec) -> None:
    """ConfigError for values that device npu cannot take."""
    depth = spec.speculation.draft_tokens
    if depth != "auto" and depth >= NPU_MAX_ROWS:
        rule = (
            f"at most {NPU_MAX_ROWS - 1} on npu: attention there takes {NPU_MAX_ROWS} rows, K + 1"
        )
        raise spec.error("speculation.draft_tokens", rule)
    if spec.resolved_page_tokens % NPU_PAGE_TOKENS:
        raise spec.error("cache.page_tokens", f"must be a multiple of {NPU_PAGE_TOKENS} on npu")
    if spec.speculation.draft_head == "fp8":
        raise spec.error("speculation.draft_head", "must be model on npu: no float8 products there")
    for key in ("prefill_s", "decode_s"):
        limit_s = getattr(spec.recovery, key)
        if spec.ray.collective_timeout_s <= limit_s:
            rule = f"must exceed recovery.{key} = {limit_s:g} on npu: the driver, not HCCL, is to "
            raise spec.error("ray.collective_timeout_s", rule + "find a stuck rank")
