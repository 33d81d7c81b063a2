"""A Qwen3.5-shaped checkpoint whose greedy output and draft acceptance are known in advance.

    embedding row of t = [ a(t) | a(next(t)) | a(guess(t)) | 1 ],  a(.): random unit vectors

The last target layer replaces block 0 by block 1, so the tied head's argmax is next(t); the MTP
layer replaces it by block 2, so the draft's is guess(t). Everything else runs at full shape with
weights too small to matter: an engine does the real model's work and must print the chain.
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
"""Standard deviation of the output projections: their layers barely move the residual."""
GATE = 8.0
"""Pre-activation that opens the last layer's gate to a constant silu(GATE)."""

TARGET = "model.language_model."


class Chain(NamedTuple):
    """What follows each token, int64 [V] each."""

    next: Tensor
    """The target's greedy token; one cycle through the whole vocabulary."""
    guess: Tensor
    """The draft's greedy token; equals `next` for a share of the tokens, never by accident."""


class Expected(NamedTuple):
    """What a greedy request on a planted checkpoint must report."""

    tokens: list[int]
    iterations: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


def chain(vocab: int, accept: float, seed: int) -> Chain:
    """The chain of a checkpoint of `vocab` tokens where a share `accept` of the guesses is right.

    Accepted / drafted with K drafts comes out near (P + P^2 + ... + P^K) / K for P = accept.
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

    The prefill yields the first token without a verify pass. Then each iteration drafts
    `draft_tokens`, or one less than the tokens still wanted where those are fewer (the target adds
    one), and keeps what the target agrees with. No end of sequence is seen. run_ahead: results
    that are not read yet when an iteration starts (a device's capability); each counts as one
    token of those wanted.
    """
    following, guess = chain.next.tolist(), chain.guess.tolist()
    last, tokens = following[start], []
    launched: deque[list[tuple[list[int], int]]] = deque()
    step, promised = [([last], 0)], 1
    iterations, drafted, accepted_per_position = -1, 0, [0] * draft_tokens
    while len(tokens) < num_tokens:
        wanted = num_tokens - len(tokens) - promised
        if wanted > 0:
            limit = min(draft_tokens, wanted - 1)
            burst = _burst(following, guess, last, limit)
            last, promised = burst[-1], promised + 1
            step.append((burst, limit))
        launched.append(step)
        step = []
        for burst, limit in launched.popleft() if len(launched) > run_ahead else ():
            if len(tokens) == num_tokens:
                break
            tokens += burst[: num_tokens - len(tokens)]
            promised, iterations, drafted = promised - 1, iterations + 1, drafted + limit
            for position in range(len(burst) - 1):
                accepted_per_position[position] += 1
    return Expected(
        tokens=tokens,
        iterations=iterations,
        drafted=drafted,
        accepted=sum(accepted_per_position),
        accepted_per_position=accepted_per_position,
    )


def _burst(following: list[int], guess: list[int], last: int, limit: int) -> list[int]:
    """The tokens of one iteration after `last`: drafts that are right, and the target's own."""
    tokens, draft = [], last
    for _ in range(limit):
        draft, last = guess[draft], following[last]
        if draft != last:
            return [*tokens, last]
        tokens.append(draft)
    return [*tokens, following[last]]


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Random weights of the right shape, from one generator."""

    sizes: dict[str, int]
    random: torch.Generator
    device: str

    def normal(self, *shape: int, std: float = 0.02) -> Tensor:
        draw = torch.randn(*shape, generator=self.random, device=self.device)
        return (draw * std).to(DTYPE)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device, dtype=DTYPE)

    def attention(self) -> dict[str, Tensor]:
        """Gated attention, [out, in] each; q_proj holds query and gate of each head."""
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
        """Gated delta net; A_log and the gated norm are float32 in real checkpoints too."""
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
        """The norms' weights are offsets from one, hence zeros."""
        hidden, width = self.sizes["hidden_size"], self.sizes["intermediate_size"]
        return {
            "mlp.gate_proj.weight": self.normal(width, hidden),
            "mlp.up_proj.weight": self.normal(width, hidden),
            "mlp.down_proj.weight": self.normal(hidden, width, std=NEGLIGIBLE),
            "input_layernorm.weight": self.zeros(hidden),
            "post_attention_layernorm.weight": self.zeros(hidden),
        }

    def layer(self, mixer: Callable[[], dict[str, Tensor]], prefix: str) -> dict[str, Tensor]:
        parts = mixer() | self.mlp_and_norms()
        return {prefix + name: tensor for name, tensor in parts.items()}


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
    kinds = {True: "full_attention", False: "linear_attention"}
    return sizes | {
        "model_type": "qwen3_5_text",
        "layer_types": [kinds[_is_attention(i)] for i in range(sizes["num_hidden_layers"])],
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
    """config.json as multimodal checkpoints have it; its one small vision layer has no weights."""
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
    """Write a checkpoint without a tokenizer; planted.json, written last, says how it was made."""
    text = text_config(size)
    generation = {"eos_token_id": text["eos_token_id"]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(nested_config(text), indent=1))
    (out / "generation_config.json").write_text(json.dumps(generation))
    weights = build(size, accept, seed, device)
    weights = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    made = {"size": size, "accept": accept, "seed": seed}
    (out / "planted.json").write_text(json.dumps(made))


def _is_attention(layer: int) -> bool:
    return (layer + 1) % FULL_ATTENTION_INTERVAL == 0


def _block(hidden: int) -> int:
    """N: three blocks and a few spare channels, one of them constant."""
    return (hidden - 8) // 3


def _plant_embedding(
    chain: Chain, hidden: int, random: torch.Generator, device: str
) -> tuple[Tensor, float]:
    """float32 [V, H] with rows of root mean square 1 (a norm leaves them alone), and the scale."""
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
    """Make N channels of an MLP add block 1 - block 0 of the residual to block 0."""
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
    """mtp.fc, [H, 2H] over (embedding, hidden): block 0 becomes block 2 of the embedding."""
    n = _block(hidden)
    channel = torch.arange(n)
    fc = fill.normal(hidden, 2 * hidden, std=NEGLIGIBLE)
    fc[:n] = 0
    fc[channel, 2 * n + channel] = 1
    return fc


def _only_block_0(fill: Filler, hidden: int) -> Tensor:
    """A final norm's offset from one that hides all channels but block 0 from the head."""
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
    """Write a planted checkpoint; chain() and expected_counts() tell what it must print."""
    if size not in SIZES:
        raise typer.BadParameter(f"size = {size!r}: must be one of {', '.join(SIZES)}")
    if not 0 <= accept <= 1:
        raise typer.BadParameter(f"accept = {accept}: must lie in [0, 1]")
    write(out, size, accept, seed, device)
    print(f"{out}: {size}, accept {accept}, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
