"""The tensors of a planted checkpoint, piece by piece, and the same in the form of FP8 releases.

    sizes, next and guess of each token -> pieces(...) -> tables | each layer | final norm and draft
      -> fp8_release(piece)

    embedding row of token t = [ a(t) | a(next(t)) | a(guess(t)) | 1 ], a(.) a random unit vector

No piece depends on an earlier one, so that a writer needs to hold one at a time.
Letters: V vocabulary | H hidden | N width of one block | E experts | I width of an MLP or expert
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.parallel.formats import quantise_fp8

FULL_ATTENTION_INTERVAL = 4
CONV_KERNEL = 4
DTYPE = torch.bfloat16
NEGLIGIBLE = 2e-5
"""Standard deviation of the output projections, so that their layers hardly change the hidden."""
GATE = 8.0
"""Input of the planted MLP's gate, which makes the gate the constant silu(GATE). Also what the gate
of a planted shared expert is made of: sigmoid(GATE) is nearly one."""

TARGET = "model.language_model."


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Weights of the model's shapes that change no token, drawn from one generator.

    sizes: those of the text config, by its keys.
    """

    sizes: dict[str, int]
    random: torch.Generator
    device: str

    def normal(self, *shape: int, std: float = 0.02) -> Tensor:
        """Normal numbers of mean 0 and standard deviation `std`, bfloat16."""
        numbers = torch.randn(*shape, generator=self.random, device=self.device)
        return (numbers * std).to(DTYPE)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros, bfloat16."""
        return torch.zeros(*shape, device=self.device, dtype=DTYPE)

    def attention(self) -> dict[str, Tensor]:
        """Gated attention, matrices [out, in]; q_proj holds query and gate of each head."""
        c, hidden = self.sizes, self.sizes["hidden_size"]
        queries = c["num_attention_heads"] * c["head_dim"]
        keys = c["num_key_value_heads"] * c["head_dim"]
        return {
            "self_attn.q_proj.weight": self.normal(2 * queries, hidden),
            "self_attn.k_proj.weight": self.normal(keys, hidden),
            "self_attn.v_proj.weight": self.normal(keys, hidden),
            "self_attn.o_proj.weight": self.normal(hidden, queries, std=NEGLIGIBLE),
            "self_attn.q_norm.weight": self.zeros(c["head_dim"]),
            "self_attn.k_norm.weight": self.zeros(c["head_dim"]),
        }

    def delta_net(self) -> dict[str, Tensor]:
        """Gated delta net; A_log and the gated norm are float32, as in released checkpoints."""
        c, hidden = self.sizes, self.sizes["hidden_size"]
        heads = c["linear_num_value_heads"]
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = heads * c["linear_value_head_dim"]
        decay = torch.empty(heads, device=self.device).uniform_(1, 16, generator=self.random)
        return {
            "linear_attn.in_proj_qkv.weight": self.normal(2 * keys + values, hidden),
            "linear_attn.in_proj_z.weight": self.normal(values, hidden),
            "linear_attn.in_proj_b.weight": self.normal(heads, hidden),
            "linear_attn.in_proj_a.weight": self.normal(heads, hidden),
            "linear_attn.conv1d.weight": self.normal(2 * keys + values, 1, CONV_KERNEL, std=0.3),
            "linear_attn.A_log": decay.log(),
            "linear_attn.dt_bias": self.normal(heads, std=1.0),
            "linear_attn.norm.weight": torch.ones(c["linear_value_head_dim"], device=self.device),
            "linear_attn.out_proj.weight": self.normal(hidden, values, std=NEGLIGIBLE),
        }

    def mlp(self, prefix: str, width: int) -> dict[str, Tensor]:
        """An MLP of `width` columns, whose output is negligible."""
        hidden = self.sizes["hidden_size"]
        return {
            f"{prefix}gate_proj.weight": self.normal(width, hidden),
            f"{prefix}up_proj.weight": self.normal(width, hidden),
            f"{prefix}down_proj.weight": self.normal(hidden, width, std=NEGLIGIBLE),
        }

    def mixture(self) -> dict[str, Tensor]:
        """A mixture of experts with fused experts, its router, and the shared expert's gate."""
        c, hidden = self.sizes, self.sizes["hidden_size"]
        experts, width = c["num_experts"], c["moe_intermediate_size"]
        fused = {
            "mlp.experts.gate_up_proj": self.zeros(experts, 2 * width, hidden),
            "mlp.experts.down_proj": self.zeros(experts, hidden, width),
        }
        for expert in range(experts):
            fused["mlp.experts.gate_up_proj"][expert] = self.normal(2 * width, hidden)
            fused["mlp.experts.down_proj"][expert] = self.normal(hidden, width, std=NEGLIGIBLE)
        return {
            **fused,
            "mlp.gate.weight": self.normal(experts, hidden),
            **self.mlp("mlp.shared_expert.", c["shared_expert_intermediate_size"]),
            "mlp.shared_expert_gate.weight": self.normal(1, hidden),
        }

    def layer(self, mixer: Callable[[], dict[str, Tensor]], prefix: str) -> dict[str, Tensor]:
        """A whole layer by full names. mixer: self.attention or self.delta_net.

        The weights of both norms are zeros, because they are offsets from one.
        """
        c, tensors = self.sizes, mixer()
        is_mixture = "num_experts" in c
        tensors |= self.mixture() if is_mixture else self.mlp("mlp.", c["intermediate_size"])
        tensors["input_layernorm.weight"] = self.zeros(c["hidden_size"])
        tensors["post_attention_layernorm.weight"] = self.zeros(c["hidden_size"])
        return {prefix + name: tensor for name, tensor in tensors.items()}


def num_pieces(sizes: dict[str, int]) -> int:
    """How many dicts `pieces` gives."""
    return sizes["num_hidden_layers"] + 2


def pieces(
    sizes: dict[str, int],
    following: Tensor,
    guess: Tensor,
    *,
    tied: bool,
    random: torch.Generator,
    device: str,
) -> Iterator[dict[str, Tensor]]:
    """All tensors under their Hugging Face names, on `device`: the tables, each layer, the rest.

    following, guess: what the target and the draft make of each token, int64 [V]. tied: whether the
    embedding is the head. random: a generator of the device. The experts of the target's layers are
    fused, the draft's one by one, as in the releases.
    """
    layers = sizes["num_hidden_layers"]
    fill = Filler(sizes=sizes, random=random, device=device)
    plant = Planting(sizes=sizes, tied=tied)
    yield plant.tables(following, guess, random, device)
    for index in range(layers):
        mixer = fill.attention if is_attention(index) else fill.delta_net
        layer = fill.layer(mixer, f"{TARGET}layers.{index}.")
        if index == layers - 1:
            plant.next(layer, f"{TARGET}layers.{index}.mlp.")
        yield layer
        del layer  # the caller alone keeps it while the next one is drawn
    hidden = sizes["hidden_size"]
    yield {
        TARGET + "norm.weight": plant.only_block_0(fill),
        **one_by_one(fill.layer(fill.attention, "mtp.layers.0.")),
        "mtp.pre_fc_norm_embedding.weight": fill.zeros(hidden),
        "mtp.pre_fc_norm_hidden.weight": fill.zeros(hidden),
        "mtp.fc.weight": plant.guess(fill),
        "mtp.norm.weight": plant.only_block_0(fill),
    }


def is_attention(layer: int) -> bool:
    """Whether a layer of the target has full attention."""
    return (layer + 1) % FULL_ATTENTION_INTERVAL == 0


@dataclass(frozen=True, kw_only=True)
class Planting:
    """What makes the output known: the tables, the last layer's MLP, the draft's first product."""

    sizes: dict[str, int]
    tied: bool

    @property
    def hidden(self) -> int:
        return self.sizes["hidden_size"]

    @property
    def scale(self) -> float:
        """What rows of the embedding are multiplied by, so that the root mean square of each is 1
        and a norm does not change it."""
        return math.sqrt(self.hidden / 4)

    @property
    def block(self) -> int:
        """N, the width of one of the three blocks; of the channels left over one is constant.

        The planted MLP needs a column for each channel of a block.
        """
        c = self.sizes
        columns = c.get("shared_expert_intermediate_size") or c["intermediate_size"]
        return min((self.hidden - 8) // 3, columns)

    @property
    def written(self) -> Tensor:
        """int64 [N]: the channels of block 0 that the channels of another block are copied to.

        A head of its own has the channels of block 0 in reverse order, and so has what it scores.
        An engine that scored with the embedding in its place would find other tokens.
        """
        channels = torch.arange(self.block)
        return channels if self.tied else channels.flip(0)

    def tables(
        self, following: Tensor, guess: Tensor, random: torch.Generator, device: str
    ) -> dict[str, Tensor]:
        """The embedding [V, H], and where it is not tied the head."""
        vocab, n = len(following), self.block
        unit = torch.randn(vocab, n, generator=random, device=device)
        unit /= unit.norm(dim=1, keepdim=True)
        rows = unit.mul_(self.scale).to(DTYPE)
        embedding = torch.zeros(vocab, self.hidden, device=device, dtype=DTYPE)
        embedding[:, :n] = rows
        embedding[:, n : 2 * n] = rows[following.to(device)]
        embedding[:, 2 * n : 3 * n] = rows[guess.to(device)]
        embedding[:, 3 * n] = self.scale
        tables = {TARGET + "embed_tokens.weight": embedding}
        if not self.tied:
            head = embedding.clone()
            head[:, self.written] = rows
            tables["lm_head.weight"] = head
        return tables

    def next(self, layer: dict[str, Tensor], mlp: str) -> None:
        """Set N columns of a layer's MLP so that it replaces block 0 of the hidden by block 1.

        In a mixture that is the shared expert's MLP, which works for every token whatever the
        router picks, with its gate held open.
        """
        n = self.block
        gain = 1 + math.exp(-GATE)  # one over sigmoid(GATE)
        output = gain / GATE
        if "num_experts" in self.sizes:
            layer[f"{mlp}shared_expert_gate.weight"].zero_()[0, 3 * n] = GATE / self.scale
            mlp, output = f"{mlp}shared_expert.", output * gain
        gate, up, down = (layer[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
        channel, written = torch.arange(n), self.written
        gate[:n] = 0
        gate[:n, 3 * n] = GATE / self.scale
        up[:n] = 0
        up[channel, n + channel] = 1
        up[channel, written] = -1
        down[:n] = 0
        down[:, :n] = 0
        down[written, channel] = output

    def guess(self, fill: Filler) -> Tensor:
        """mtp.fc, [H, 2H] over (embedding, hidden): its block 0 is block 2 of the embedding."""
        n, hidden = self.block, self.hidden
        fc = fill.normal(hidden, 2 * hidden, std=NEGLIGIBLE)
        fc[:n] = 0
        fc[self.written, 2 * n + torch.arange(n)] = 1
        return fc

    def only_block_0(self, fill: Filler) -> Tensor:
        """A final norm's weight, as an offset from one, that zeroes all channels but block 0."""
        weight = fill.zeros(self.hidden) - 1
        weight[: self.block] = 0
        return weight


def one_by_one(piece: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with fused experts [E, ..] as a matrix for each."""
    result = {}
    for name, tensor in piece.items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith(".experts"):
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor.unbind()):
            own = f"{prefix}.{expert}."
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                result |= {own + "gate_proj.weight": gate, own + "up_proj.weight": up}
            else:
                result[own + "down_proj.weight"] = matrix
    return result


def fp8_release(piece: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors as FP8 releases hold them.

    Matrices of projections become float8_e4m3fn, each with `weight_scale_inv`, the bfloat16 scales
    of its blocks; experts are one by one. All else stays: tables, norms, convolutions, routers, the
    gates of shared experts, in_proj_a, in_proj_b, mtp.fc. What is planted survives: the largest
    number of a block is exact but for the rounding of its scale, and a planted row has no other.
    """
    result = {}
    for name, tensor in one_by_one(piece).items():
        if not name.endswith(("proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")):
            result[name] = tensor
            continue
        codes, scales = quantise_fp8(tensor)
        result |= {name: codes, f"{name}_scale_inv": scales.to(torch.bfloat16)}
    return result
