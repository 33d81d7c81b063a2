"""The parts that all layers have: norms, MLP, residual block, rotary table.

    x -> x + mixer(norm(x)) -> x + mlp(norm(x)), where x is the residual stream

Attributes carry the names of model/rules.py. Matrices that read the same input are one, and views
of its output are used.
Shapes: B slots | R rows | H hidden | i this rank's MLP columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.model.config import AttentionConfig, ExpertConfig, ModelConfig
from outrider.model.rope import Rope
from outrider.parallel.device import Device
from outrider.parallel.linear import RowLinear
from outrider.parallel.operands import ExpertLayer, PartialSum, Rows

Params = Mapping[str, Any]
"""Tensors and matrices (parallel/formats.py) of this rank by the names of model/rules.py, which
start below the module that takes them."""


def under(params: Params, prefix: str) -> dict[str, Any]:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name[len(prefix) :]: t for name, t in params.items() if name.startswith(prefix)}


class RmsNorm:
    """Zero-centred RMSNorm: y = x / rms(x) * (1 + weight), weight float32; keeps 1 + weight."""

    def __init__(self, weight: Tensor, eps: float, device: Device) -> None:
        self.scale, self.eps, self.ops = weight + 1.0, eps, device.ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.scale, self.eps)

    def sum_add(self, part: PartialSum, x: Tensor) -> tuple[Tensor, Tensor]:
        """Add the sum over ranks of `part` to the residual stream x; -> (norm of the stream, the
        stream)."""
        return self.ops.sum_add_rms_norm(part, x, self.scale, self.eps)


class Mlp:
    """down(silu(gate(x)) * up(x)), where gate and up are one matrix [2i, H]."""

    def __init__(self, params: Params, device: Device) -> None:
        self.gate_up = params["gate_up_proj.weight"]
        self.down_proj = RowLinear(params["down_proj.weight"], device)
        self.ops = device.ops

    def __call__(self, x: Tensor) -> PartialSum:
        """x [B, R, H] -> this rank's part of [B, R, H]."""
        return self.down_proj(self.ops.linear_swiglu(x, self.gate_up))


class Experts:
    """A mixture of experts with a shared one, in the place of an Mlp (Ops.experts)."""

    def __init__(self, config: ExpertConfig, params: Params, device: Device) -> None:
        gate_up = params["experts.gate_up_proj"]
        per_rank = gate_up.shape[0]
        self.layer = ExpertLayer(
            router=params["gate.weight"],
            top_k=config.top_k,
            normalised=config.normalised,
            first_expert=device.tp.rank * per_rank if per_rank < config.num_experts else 0,
            gate_up=gate_up,
            down=params["experts.down_proj"],
            shared_gate_up=params["shared_expert.gate_up_proj.weight"],
            shared_down=params["shared_expert.down_proj.weight"],
            shared_gate=params["shared_expert_gate.weight"],
        )
        self.ops, self.group = device.ops, device.tp

    def __call__(self, x: Tensor) -> PartialSum:
        """x [B, R, H] -> this rank's part of [B, R, H]."""
        return PartialSum(self.ops.experts(x, self.layer), self.group)


class Block:
    """One decoder layer around a mixer, which is its attention or its delta net. It has experts
    where its parameters have."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        mixer: Callable[[Tensor, Rows], PartialSum],
        device: Device,
    ) -> None:
        eps = config.rms_norm_eps
        self.mixer = mixer
        self.input_layernorm = RmsNorm(params["input_layernorm.weight"], eps, device)
        self.post_attention_layernorm = RmsNorm(
            params["post_attention_layernorm.weight"], eps, device
        )
        mlp = under(params, "mlp.")
        if "experts.gate_up_proj" in mlp:
            assert config.experts is not None, "config.json has experts where the weights do"
            self.mlp = Experts(config.experts, mlp, device)
        else:
            self.mlp = Mlp(mlp, device)

    def __call__(self, normed: Tensor, x: Tensor, rows: Rows) -> tuple[PartialSum, Tensor]:
        """The residual stream x [B, R, H] and its input norm -> this rank's part of what the MLP
        adds to the stream, and the stream before that.

        The sum over the ranks is left to the norm that reads it: a backend does both in one
        operation.
        """
        normed, x = self.post_attention_layernorm.sum_add(self.mixer(normed, rows), x)
        return self.mlp(normed), x


class RotaryTable:
    """Cosine and sine of the angles of every position, float32 [positions, rotary].

    The angles of the left half are repeated in the right half (NeoX's layout). Qwen3.5's rotary
    has several interleaved axes, which for text all have the same position: that is this ordinary
    rotary. YaRN scales both by its attention factor. (All compared with transformers.)
    """

    def __init__(self, config: AttentionConfig, num_positions: int, device: Device) -> None:
        inverse = inverse_frequencies(config.rope)
        angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse
        angle = torch.cat((angle, angle), -1).to(device.torch_device)
        scale = config.rope.yarn.attention_factor if config.rope.yarn else 1.0
        self.cos, self.sin = angle.cos() * scale, angle.sin() * scale


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians that each pair of dimensions turns in one position, float32 [rotary / 2].

    YaRN divides those of slow pairs by its factor, leaves fast ones, and mixes both in between.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    period = rope.theta**exponents
    fast = 1.0 / period
    if rope.yarn is None:
        return fast
    low, high = rope.yarn.range_of(rope.theta, rope.rotary_dim)
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.yarn.factor * period) * (1 - kept) + fast * kept
