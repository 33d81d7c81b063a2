"""What a checkpoint's quantization_config says: how weights are stored, and which are not.

    config.json's table -> read_quantisation -> Quantisation -> covers(name of a weight)

Two ways are read: FP8 with a scale for each block (quant_method fp8, as of Qwen's and DeepSeek's
releases), and GPTQ with 4 bits, symmetric. Where the files are there, what they hold decides
(`stored`); without them, as for `outrider plan` with a hub id, the table's exceptions do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

PREFIXES = ("model.language_model.", "language_model.", "model.")
"""What the names of a checkpoint may begin with, before the part that every layout has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """How the weights of a checkpoint are stored."""

    method: Literal["fp8", "gptq"]
    block: tuple[int, int]
    """Rows and columns that share a scale; GPTQ: (1, columns of a group)."""
    zero_offset: int = 0
    """GPTQ: what its table of zeros holds is so much more than the code of zero."""
    plain_modules: tuple[str, ...] = ()
    """Patterns of the modules that are not quantised."""
    stored: frozenset[str] | None = None
    """Names of the weights that the files hold in codes; None: not looked at."""

    def covers(self, name: str) -> bool:
        """Whether the weight of this name, without prefix, is stored in codes."""
        if self.stored is not None:
            return name in self.stored
        module = name.removesuffix(".weight")
        return not any(re.search(pattern, module) for pattern in self.plain_modules)


def read_quantisation(table: object) -> Quantisation | None:
    """The quantization_config of config.json; None where there is none.

    Raises ValueError that names what cannot be run and what can.
    """
    if not table:
        return None
    if not isinstance(table, dict):
        raise ValueError(f"quantization_config = {table!r}: a JSON object is needed")
    method = table.get("quant_method")
    if method == "fp8":
        return _read_fp8(table)
    if method in ("gptq", "gptq_v2"):
        return _read_gptq(table)
    raise ValueError(
        f"quantization_config has quant_method {method!r}: only fp8 with weight_block_size, and "
        f"gptq with 4 bits, can be run. Set `model` to such a release or to the one without "
        f"quantisation."
    )


def _read_fp8(table: dict[str, Any]) -> Quantisation:
    block = table.get("weight_block_size")
    sizes = tuple(n for n in block if isinstance(n, int) and n > 0) if block else ()
    if not isinstance(block, list) or len(block) != 2 or len(sizes) != 2:
        raise ValueError(
            f"quantization_config has quant_method fp8 with weight_block_size {block!r}: two "
            f"whole numbers, as [128, 128], are needed. FP8 with one scale a matrix or a row is "
            f"not supported."
        )
    kind = table.get("fmt") or "e4m3"
    if kind != "e4m3":
        raise ValueError(f"quantization_config has fmt {kind!r}: only e4m3 can be run")
    modules = table.get("modules_to_not_convert") or table.get("ignored_layers") or []
    patterns = tuple(rf"(^|\.){re.escape(_without_prefix(name))}(\.|$)" for name in modules)
    return Quantisation(method="fp8", block=(sizes[0], sizes[1]), plain_modules=patterns)


def _read_gptq(table: dict[str, Any]) -> Quantisation:
    bits, group = table.get("bits"), table.get("group_size")
    wrong = [
        f"{key} = {table.get(key)!r} ({wanted} is needed)"
        for key, ok, wanted in (
            ("bits", bits == 4, "4"),
            ("group_size", isinstance(group, int) and group > 0, "a whole number above 0"),
            ("sym", table.get("sym") is True, "true"),
            ("desc_act", not table.get("desc_act"), "false"),
        )
        if not ok
    ]
    if wrong:
        raise ValueError(f"quantization_config, quant_method gptq: {', '.join(wrong)}")
    excluded = [key[2:] for key in table.get("dynamic") or {} if key.startswith("-:")]
    is_v2 = "gptq_v2" in (table.get("quant_method"), table.get("checkpoint_format"))
    assert isinstance(group, int)
    return Quantisation(
        method="gptq",
        block=(1, group),
        zero_offset=0 if is_v2 else -1,
        plain_modules=tuple(excluded),
    )


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name
