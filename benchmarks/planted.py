"""Checkpoints of Qwen3.5's shapes whose greedy output and draft acceptance are known in advance.

    size, accept, seed -> chain(...): next and guess of each token -> write(...) -> a folder
                                                    -> expected_counts(...): tokens, counters

The last target layer replaces what the hidden says of token t by what it says of next(t), so that
the head picks next(t); the MTP layer likewise with guess(t). All other weights have their full
shape and are too small to change a token: an engine does the work of the real model and must
answer with the chain t, next(t), next(next(t)), ... planted_weights.py says how.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from outrider.benchmarks import planted_weights, shards
from outrider.benchmarks.planted_weights import CONV_KERNEL, FULL_ATTENTION_INTERVAL, is_attention
from outrider.parallel.formats import FP8_BLOCK

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
SIZES["9b"] = SIZES["4b"] | {"hidden_size": 4096, "intermediate_size": 12288}
SIZES["27b"] = SIZES["4b"] | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}


def _mixture(dense: str, **changes: int) -> dict[str, int]:
    """A dense size with a mixture of experts in place of each MLP."""
    sizes = SIZES[dense] | changes
    del sizes["intermediate_size"]
    return sizes


SIZES["tiny-moe"] = _mixture(
    "tiny",
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=128,
)
SIZES["35b-a3b"] = _mixture(
    "2b",
    num_hidden_layers=40,
    num_attention_heads=16,
    linear_num_value_heads=32,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)
TIED = ("tiny", "0.8b", "2b", "4b")
"""Sizes whose head is the embedding, as in the releases. They lie in one file, the others in a file
for each layer."""
QUANTIZATIONS = ("fp8",)
"""Releases that a checkpoint can have the form of, beside bfloat16."""

MAX_TEMPERATURE = 2.0
"""A draw at up to this temperature takes the chain's token: in size tiny its logit leads the others
by 33 and more, and another token is drawn with a chance below 1e-7. In the other sizes the lead
exceeds 170. Penalties change no token either, since an answer holds none of them twice."""


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


def text_config(size: str) -> dict[str, Any]:
    """The `text_config` of config.json; the last id of the vocabulary ends a sequence."""
    sizes = SIZES[size]
    # Releases with a head of their own say so at the root of config.json alone.
    return sizes | {
        "model_type": "qwen3_5_moe_text" if "num_experts" in sizes else "qwen3_5_text",
        "layer_types": [
            "full_attention" if is_attention(layer) else "linear_attention"
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
        **({"tie_word_embeddings": True} if size in TIED else {}),
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
    kind, prefix = (
        ("qwen3_5_moe", "Qwen3_5Moe") if "num_experts" in text else ("qwen3_5", "Qwen3_5")
    )
    return {
        "architectures": [f"{prefix}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "image_token_id": vocab - 4,
        "video_token_id": vocab - 3,
        "vision_start_token_id": vocab - 6,
        "vision_end_token_id": vocab - 5,
        "vision_config": {
            "model_type": kind,
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


def write(
    out: Path,
    size: str,
    accept: float,
    seed: int,
    device: str = "cpu",
    quantization: str | None = None,
) -> None:
    """Write a checkpoint without a tokenizer, and last planted.json with the arguments.

    Where the head is not tied the tensors are drawn and written a layer at a time, so that neither
    the device nor this host holds more than a few layers. quantization: one of QUANTIZATIONS.
    """
    text, sizes = text_config(size), SIZES[size]
    tokens = chain(sizes["vocab_size"], accept, seed)
    random = torch.Generator(device=device).manual_seed(seed + 1)
    pieces = planted_weights.pieces(
        sizes, tokens.next, tokens.guess, tied=size in TIED, random=random, device=device
    )
    out.mkdir(parents=True, exist_ok=True)
    if quantization:
        pieces = map(planted_weights.fp8_release, pieces)
    if size in TIED:
        whole = {name: tensor for piece in pieces for name, tensor in piece.items()}
        shards.write_file(out / "model.safetensors", whole)
        names = list(whole)
    else:
        names = list(shards.write_shards(out, pieces, planted_weights.num_pieces(sizes)))
    config = nested_config(text)
    if quantization:
        config["quantization_config"] = fp8_config(names)
    generation = {"eos_token_id": text["eos_token_id"]}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(generation))
    arguments: dict[str, Any] = {"size": size, "accept": accept, "seed": seed}
    if quantization:
        arguments["quantization"] = quantization
    (out / "planted.json").write_text(json.dumps(arguments))


def fp8_config(names: list[str]) -> dict[str, Any]:
    """The quantization_config of an FP8 release that holds tensors of these names."""
    converted = {name.removesuffix("_scale_inv") for name in names if name.endswith("_scale_inv")}
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": [
            name.removesuffix(".weight")
            for name in names
            if name.endswith(".weight") and name not in converted
        ],
    }


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write the checkpoint into.")],
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    accept: Annotated[float, typer.Option(help="Share of tokens whose draft is right.")] = 0.8425,
    seed: int = 0,
    device: Annotated[str, typer.Option(help="Where to draw the weights.")] = "cpu",
    quantization: Annotated[
        str | None, typer.Option(help="fp8: in the form of FP8 releases.  [default: bfloat16]")
    ] = None,
) -> None:
    """Write a planted checkpoint; chain() and expected_counts() give the answers it must give."""
    if size not in SIZES:
        raise typer.BadParameter(f"size = {size!r}: must be one of {', '.join(SIZES)}")
    if not 0 <= accept <= 1:
        raise typer.BadParameter(f"accept = {accept}: must lie in [0, 1]")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise typer.BadParameter(f"quantization = {quantization!r}: must be fp8, or not given")
    write(out, size, accept, seed, device, quantization)
    print(f"{out}: {size}, {quantization or 'bfloat16'}, accept {accept}, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
