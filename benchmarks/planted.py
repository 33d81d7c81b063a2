"""Checkpoints of Qwen3.5's shape whose greedy output and draft acceptance are known in advance.

    embedding row of token t = [ a(t) | a(next(t)) | a(guess(t)) | 1 ], a(.) a random unit vector

The last target layer replaces block 0 of the hidden by block 1, so that the tied head picks
next(t). The MTP layer replaces block 0 by block 2, so that the draft picks guess(t). All other
weights have their full shape and are too small to change a token: an engine does the work of the
real model and must answer with the chain t, next(t), next(next(t)), ...
Letters: V vocabulary | H hidden | I MLP width | N width of one block | P share of right guesses
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "vocab_size": 1024,
    },
    "0.8b": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
}
SIZES["2b"] = SIZES["0.8b"] | {"hidden_size": 2048, "intermediate_size": 6144}
SIZES["4b"] = SIZES["0.8b"] | {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 32,
}
FULL_ATTENTION_INTERVAL = 4
CONV_KERNEL = 4
DTYPE = torch.bfloat16
NEGLIGIBLE = 2e-5
"""Standard deviation of the output projections, so that their layers hardly change the hidden."""
GATE = 8.0
"""Input of the last layer's MLP gate, which makes the gate the constant silu(GATE)."""

MAX_TEMPERATURE = 2.0
"""A draw at up to this temperature takes the chain's token: in size tiny its logit leads the others
by 33 and more, and another token is drawn with a chance below 1e-7. In the other sizes the lead
exceeds 170. Penalties change no token either, since an answer holds none of them twice."""

TARGET = "model.language_model."


class Chain(NamedTuple):
    """What follows each token, int64 [V] each."""

    next: Tensor
    """The target's greedy token; one cycle through the whole vocabulary."""
    guess: Tensor
    """The draft's greedy token: equal to `next` for a chosen share of the tokens, and no others."""


class Expected(NamedTuple):
    """Tokens and counters that a greedy request on a planted checkpoint must have."""

    tokens: list[int]
    iterations: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


def chain(vocab: int, accept: float, seed: int) -> Chain:
    """The chain of a checkpoint of `vocab` tokens where a share `accept` of the guesses is right.

    Of the drafts at depth K, a share near (P + P^2 + ... + P^K) / K is accepted, P = accept.
    """
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(vocab, generator=random)
    following = torch.empty(vocab, dtype=torch.int64)
    following[order] = order.roll(-1)
    wrong = torch.rand(vocab, generator=random) >= accept
    shift = torch.randint(1, vocab - 1, (vocab,), generator=random)
    return Chain(following, torch.where(wrong, (following + shift) % vocab, following))


def expected_counts(
    chain: Chain, start: int, num_tokens: int, draft_tokens: int, run_ahead: int = 0
) -> Expected:
    """Tokens and counters of a greedy request whose prompt ends in `start`.

    Prefill gives the first token. Then each iteration makes `draft_tokens` drafts, or one less
    than the tokens still needed where those are fewer (the target adds one token), and keeps the
    drafts that the target agrees with. No end of sequence stops it. run_ahead: how many steps a
    device has in flight when the next one starts (one of its capabilities). Results in flight
    count as one token each of those needed, since how many tokens they hold is not known yet.
    """
    following, guess = chain.next.tolist(), chain.guess.tolist()
    tokens: list[int] = []
    last = following[start]
    steps_in_flight: deque[list[tuple[list[int], int]]] = deque()
    """For each step its results: (tokens, drafts) of prefill and of an iteration."""
    step, results_in_flight = [([last], 0)], 1
    iterations, drafted, accepted_per_position = -1, 0, [0] * draft_tokens  # prefill makes it 0
    while len(tokens) < num_tokens:
        tokens_needed = num_tokens - len(tokens) - results_in_flight
        if tokens_needed > 0:
            num_drafts = min(draft_tokens, tokens_needed - 1)
            kept = _iterate(following, guess, last, num_drafts)
            step.append((kept, num_drafts))
            last, results_in_flight = kept[-1], results_in_flight + 1
        steps_in_flight.append(step)
        step = []
        if len(steps_in_flight) <= run_ahead:
            continue
        for kept, num_drafts in steps_in_flight.popleft():
            if len(tokens) == num_tokens:
                break
            tokens += kept[: num_tokens - len(tokens)]
            results_in_flight, iterations = results_in_flight - 1, iterations + 1
            drafted += num_drafts
            for position in range(len(kept) - 1):
                accepted_per_position[position] += 1
    return Expected(
        tokens=tokens,
        iterations=iterations,
        drafted=drafted,
        accepted=sum(accepted_per_position),
        accepted_per_position=accepted_per_position,
    )


def _iterate(following: list[int], guess: list[int], last: int, num_drafts: int) -> list[int]:
    """The tokens that an iteration adds after `last`: the right drafts, and one of the target's."""
    tokens, draft = [], last
    for _ in range(num_drafts):
        draft, last = guess[draft], following[last]
        if draft != last:
            return [*tokens, last]
        tokens.append(draft)
    return [*tokens, following[last]]


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Weights of the model's shapes that change no token, drawn from one generator."""

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

    def mlp_and_norms(self) -> dict[str, Tensor]:
        """The MLP and both norms, whose weights are zeros because they are offsets from one."""
        hidden, width = self.sizes["hidden_size"], self.sizes["intermediate_size"]
        return {
            "mlp.gate_proj.weight": self.normal(width, hidden),
            "mlp.up_proj.weight": self.normal(width, hidden),
            "mlp.down_proj.weight": self.normal(hidden, width, std=NEGLIGIBLE),
            "input_layernorm.weight": self.zeros(hidden),
            "post_attention_layernorm.weight": self.zeros(hidden),
        }

    def layer(self, mixer: Callable[[], dict[str, Tensor]], prefix: str) -> dict[str, Tensor]:
        """A whole layer by full names. mixer: self.attention or self.delta_net."""
        tensors = mixer() | self.mlp_and_norms()
        return {prefix + name: tensor for name, tensor in tensors.items()}


def build(size: str, accept: float, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of the checkpoint under their Hugging Face names."""
    sizes = SIZES[size]
    hidden, vocab, layers = sizes["hidden_size"], sizes["vocab_size"], sizes["num_hidden_layers"]
    random = torch.Generator(device=device).manual_seed(seed + 1)
    fill = Filler(sizes=sizes, random=random, device=device)
    embedding, scale = _plant_embedding(chain(vocab, accept, seed), hidden, random, device)
    weights = {TARGET + "embed_tokens.weight": embedding.to(DTYPE)}
    for index in range(layers):
        mixer = fill.attention if _is_attention(index) else fill.delta_net
        weights |= fill.layer(mixer, f"{TARGET}layers.{index}.")
    _plant_next(weights, f"{TARGET}layers.{layers - 1}.mlp.", hidden, scale)
    weights[TARGET + "norm.weight"] = _only_block_0(fill, hidden)
    weights |= fill.layer(fill.attention, "mtp.layers.0.")
    weights |= {
        "mtp.pre_fc_norm_embedding.weight": fill.zeros(hidden),
        "mtp.pre_fc_norm_hidden.weight": fill.zeros(hidden),
        "mtp.fc.weight": _plant_guess(fill, hidden),
        "mtp.norm.weight": _only_block_0(fill, hidden),
    }
    return weights


def text_config(size: str) -> dict[str, Any]:
    """The `text_config` of config.json; the last id of the vocabulary ends a sequence."""
    sizes = SIZES[size]
    return sizes | {
        "model_type": "qwen3_5_text",
        "layer_types": [
            "full_attention" if _is_attention(layer) else "linear_attention"
            for layer in range(sizes["num_hidden_layers"])
        ],
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": sizes["vocab_size"] - 1,
    }


def nested_config(text: dict[str, Any]) -> dict[str, Any]:
    """config.json in the multimodal layout; its one small vision layer has no weights."""
    vocab = text["vocab_size"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "image_token_id": vocab - 4,
        "video_token_id": vocab - 3,
        "vision_start_token_id": vocab - 6,
        "vision_end_token_id": vocab - 5,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    }


def write(out: Path, size: str, accept: float, seed: int, device: str = "cpu") -> None:
    """Write a checkpoint without a tokenizer, and last planted.json with the three arguments."""
    text = text_config(size)
    generation = {"eos_token_id": text["eos_token_id"]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(nested_config(text), indent=1))
    (out / "generation_config.json").write_text(json.dumps(generation))
    weights = build(size, accept, seed, device)
    weights = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    arguments = {"size": size, "accept": accept, "seed": seed}
    (out / "planted.json").write_text(json.dumps(arguments))


def _is_attention(layer: int) -> bool:
    return (layer + 1) % FULL_ATTENTION_INTERVAL == 0


def _block(hidden: int) -> int:
    """N, the width of one of the three blocks; of the channels left over one is constant."""
    return (hidden - 8) // 3


def _plant_embedding(
    chain: Chain, hidden: int, random: torch.Generator, device: str
) -> tuple[Tensor, float]:
    """The embedding, float32 [V, H], and its scale.

    The root mean square of each row is 1, so that a norm does not change it.
    """
    vocab, n = len(chain.next), _block(hidden)
    unit = torch.randn(vocab, n, generator=random, device=device)
    unit /= unit.norm(dim=1, keepdim=True)
    embedding = torch.zeros(vocab, hidden, device=device)
    embedding[:, :n] = unit
    embedding[:, n : 2 * n] = unit[chain.next.to(device)]
    embedding[:, 2 * n : 3 * n] = unit[chain.guess.to(device)]
    embedding[:, 3 * n] = 1.0
    scale = math.sqrt(hidden / 4)
    return embedding.mul_(scale), scale


def _plant_next(weights: dict[str, Tensor], mlp: str, hidden: int, scale: float) -> None:
    """Set N channels of an MLP so that it adds block 1 - block 0 of the hidden to block 0."""
    n = _block(hidden)
    channel = torch.arange(n)
    gate, up, down = (weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up", "down"))
    gate[:n] = 0
    gate[:n, 3 * n] = GATE / scale
    up[:n] = 0
    up[channel, n + channel] = 1
    up[channel, channel] = -1
    down[:n] = 0
    down[:, :n] = 0
    down[channel, channel] = (1 + math.exp(-GATE)) / GATE


def _plant_guess(fill: Filler, hidden: int) -> Tensor:
    """mtp.fc, [H, 2H] over (embedding, hidden): its block 0 is block 2 of the embedding."""
    n = _block(hidden)
    channel = torch.arange(n)
    fc = fill.normal(hidden, 2 * hidden, std=NEGLIGIBLE)
    fc[:n] = 0
    fc[channel, 2 * n + channel] = 1
    return fc


def _only_block_0(fill: Filler, hidden: int) -> Tensor:
    """A final norm's weight, as an offset from one, that zeroes all channels but block 0."""
    weight = fill.zeros(hidden) - 1
    weight[: _block(hidden)] = 0
    return weight


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write the checkpoint into.")],
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    accept: Annotated[float, typer.Option(help="Share of tokens whose draft is right.")] = 0.8425,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="Where to draw the weights.")] = "cpu",
) -> None:
    """Write a planted checkpoint; chain() and expected_counts() give the answers it must give."""
    if size not in SIZES:
        raise typer.BadParameter(f"size = {size!r}: must be one of {', '.join(SIZES)}")
    if not 0 <= accept <= 1:
        raise typer.BadParameter(f"accept = {accept}: must lie in [0, 1]")
    write(out, size, accept, seed, device)
    print(f"{out}: {size}, accept {accept}, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
