"""Quantised releases of the tiny checkpoints, and the plain weights that they stand for.

    fp8(weights, block) or gptq(weights, group) -> Quantised
      -> checkpoints.write(folder, text, quantised.tensors, quantization=quantised.config)

An engine on the files must answer as one on the dequantised weights does, and as transformers'
model of those. Scales differ widely between neighbours, so that a wrong one changes the answer.
Letters: B rows and columns of an FP8 block | G inputs of an Int4 group | K inputs | O outputs
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import layouts

MATRICES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    *("out_proj", "gate_proj", "up_proj", "down_proj"),
)
"""Modules whose weights tools quantise. Not among them: embeddings, head, convolutions, norms,
in_proj_a, in_proj_b, in_proj_ba, mtp.fc, routers and the gates of shared experts."""
FP8_MAX = 448.0
"""The largest float8_e4m3fn."""
GPTQ_EXCLUDED = (r".*attn.*", r".*shared_expert.*", r".*mtp.*", r".*visual.*")
"""Modules that the official Int4 releases leave as they are, as regular expressions."""
ZERO_POINT = 8
"""Integer that means 0 in symmetric Int4; the files hold one less."""


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A quantised checkpoint by flat names."""

    tensors: dict[str, Tensor]
    """What the files hold."""
    dequantised: dict[str, Tensor]
    """The same checkpoint in plain float32, in the same layout: what the files stand for."""
    config: dict
    """quantization_config of config.json; empty where the files hold plain weights."""


def fp8(weights: dict[str, Tensor], block: int = 128, seed: int = 0) -> Quantised:
    """The FP8 release: each matrix as float8_e4m3fn with a bfloat16 scale for each block.

    `X.weight` [O, K] gets a `X.weight_scale_inv` [ceil(O / B), ceil(K / B)]; weight = values times
    scale. Experts are one by one in the files. As in some releases, the list of what is not
    converted also names a module that is not there.
    """
    random = torch.Generator().manual_seed(seed)

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        largest = _blocks(weight.abs(), block).amax((1, 3))
        spread = torch.rand(largest.shape, generator=random) * 3 + 1
        scale = (largest / FP8_MAX * spread).clamp_min(1e-12).to(torch.bfloat16)
        factor = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
        factor = factor[:rows, :columns]
        values = (weight / factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        tensors = {f"{name}.weight": values, f"{name}.weight_scale_inv": scale}
        return tensors, values.float() * factor

    tensors, dequantised, kept = _convert(weights, _is_matrix, quantise)
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": [*kept, "model.layers.0.mlp.shared_expert_gates"],
    }
    return Quantised(tensors=tensors, dequantised=dequantised, config=settings)


def fp8_at_load(weights: dict[str, Tensor], block: int = 128) -> Quantised:
    """Plain files, and the weights that an engine works with which makes FP8 of them itself.

    The scale of a block is its largest number over the largest of float8_e4m3fn, in float32.
    """

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        scale = _blocks(weight.abs(), block).amax((1, 3)) / FP8_MAX
        factor = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        rounded = (weight / factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        return {f"{name}.weight": weight}, rounded * factor

    _, dequantised, _ = _convert(weights, _is_matrix, quantise)
    return Quantised(tensors=weights, dequantised=dequantised, config={})


def _blocks(weight: Tensor, block: int) -> Tensor:
    """[O, K] as [O / B, B, K / B, B], filled up with zeros to whole blocks."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
    return padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)


def gptq(
    weights: dict[str, Tensor],
    group: int = 128,
    seed: int = 0,
    excluded: tuple[str, ...] = GPTQ_EXCLUDED,
) -> Quantised:
    """The GPTQ-Int4 release: symmetric, in groups of G inputs, without act-order.

    `X.weight` [O, K] becomes qweight [K / 8, O] int32, qzeros [ceil(K / G), O / 8] int32, scales
    [ceil(K / G), O] float16 and g_idx [K] int32. An int32 holds 8 integers, the first in its lowest
    4 bits: of consecutive inputs in qweight, of consecutive outputs in qzeros. qzeros holds the
    zero point less one, as the first version of the format has it (AutoGPTQ packs so).
    """
    random = torch.Generator().manual_seed(seed)
    patterns = [re.compile(pattern) for pattern in excluded]

    def is_converted(name: str) -> bool:
        return _is_matrix(name) and not any(pattern.match(name) for pattern in patterns)

    def quantise(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        index = torch.arange(inputs, dtype=torch.int32) // group
        groups = weight.t().split(group)
        largest = torch.stack([part.abs().amax(0) for part in groups])
        spread = torch.rand(largest.shape, generator=random) + 1
        scales = (largest / (ZERO_POINT - 1) * spread).clamp_min(1e-6).half()
        factor = scales.float()[index.long()]
        integers = (weight.t() / factor).round().add(ZERO_POINT).clamp(0, 15).int()
        zeros = torch.full((len(groups), outputs), ZERO_POINT - 1, dtype=torch.int32)
        tensors = {
            f"{name}.qweight": _pack(integers),
            f"{name}.qzeros": _pack(zeros.t()).t().contiguous(),
            f"{name}.scales": scales,
            f"{name}.g_idx": index,
        }
        return tensors, ((integers - ZERO_POINT) * factor).t().contiguous()

    tensors, dequantised, _ = _convert(weights, is_converted, quantise)
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "lm_head": False,
        "dynamic": {f"-:{pattern}": {} for pattern in excluded},
    }
    return Quantised(tensors=tensors, dequantised=dequantised, config=settings)


def _pack(integers: Tensor) -> Tensor:
    """[n, m] integers from 0 to 15 -> [n / 8, m] int32, the first of 8 in the lowest bits."""
    eights = integers.long().view(-1, 8, integers.shape[1])
    shifts = torch.arange(0, 32, 4)[None, :, None]
    packed = (eights << shifts).sum(1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _is_matrix(name: str) -> bool:
    return name.rpartition(".")[2] in MATRICES


def _convert(
    weights: dict[str, Tensor],
    is_converted: Callable[[str], bool],
    quantise: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]],
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The files' tensors, the dequantised weights, and the modules that are left as they are."""
    tensors, dequantised, kept = {}, {}, []
    for full_name, weight in layouts.split_experts(weights).items():
        name = full_name.removesuffix(".weight")
        if name != full_name and is_converted(name):
            stored, dequantised[full_name] = quantise(name, weight.float())
            tensors |= stored
        else:
            tensors[full_name] = dequantised[full_name] = weight
            kept += [name] if name != full_name else []
    return tensors, dequantised, kept
