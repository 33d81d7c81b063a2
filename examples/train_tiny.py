"""Trains the bundled checkpoint: a Qwen3.5 text model and its MTP draft, on open documentation.

    prepare: packages -> tokens    train: tokens -> target and draft -> folder    evaluate: folder

`prepare` needs the network (pip); the others need only what it wrote into the work folder. The
target is transformers' Qwen3.5 text model. The draft is built of the same decoder layer and norm.
It is trained as it is used: each of DRAFT_STEPS steps gets the hidden of the step before, and the
target's distribution is what it must learn.
Letters: B batch | S tokens in a window | T draft rows, S - DRAFT_STEPS | V vocabulary | H hidden
"""

import argparse
import csv
import json
import math
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_corpus import END_OF_TEXT, IM_END, SEED, SPECIAL, VOCAB_SIZE, prepare
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

DRAFT_STEPS = 3
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


# ---------------------------------------------------------------- model


def text_config() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        eos_token_id=END_OF_TEXT,
    )


class Draft(nn.Module):
    """The MTP layer. Row t pairs the target's post-norm hidden h_t with token x_{t+1}."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        full = config.layer_types.index("full_attention")
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5RMSNorm(H, eps=eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5RMSNorm(H, eps=eps)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, full)])
        self.norm = qwen.Qwen3_5RMSNorm(H, eps=eps)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=config.initializer_range)

    def attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], kv: list[Tensor], mask: Tensor):
        """The layer's gated attention over `kv`, the keys and values of the steps so far.

        x [B, T, H] -> [B, T, H]; this step's own keys and values are appended to `kv`.
        """
        attn = self.layers[0].self_attn
        shape = (*x.shape[:-1], -1, attn.head_dim)
        q, gate = attn.q_proj(x).view(*x.shape[:-1], -1, 2 * attn.head_dim).chunk(2, dim=-1)
        q = attn.q_norm(q).transpose(1, 2)
        k = attn.k_norm(attn.k_proj(x).view(shape)).transpose(1, 2)
        q, k = qwen.apply_rotary_pos_emb(q, k, *rotary)
        kv.append(
            torch.stack((k.to(x.dtype), attn.v_proj(x).view(shape).transpose(1, 2).to(x.dtype)))
        )
        keys, values = torch.cat(kv, dim=3).repeat_interleave(attn.num_key_value_groups, dim=2)
        out = F.scaled_dot_product_attention(q.to(x.dtype), keys, values, attn_mask=mask)
        out = out.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate)
        return attn.o_proj(out.flatten(-2))

    def forward(self, target: Qwen3_5ForCausalLM, ids: Tensor, hidden: Tensor) -> list[Tensor]:
        """ids [B, S], hidden [B, S, H] -> for each step i from 1 the hiddens [B, T, H].

        Their logits predict x_{t+1+i}. Step i of row t is at position t+i-1, and attends to the
        true rows up to t and to the rows that the steps before it made.
        """
        layer = self.layers[0]
        T = ids.shape[1] - DRAFT_STEPS
        embedded = self.pre_fc_norm_embedding(target.model.embed_tokens(ids))
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos, sin = target.model.rotary_emb(hidden, positions.expand(3, 1, -1))
        causal = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        mask, own = causal, torch.eye(T, dtype=torch.bool, device=ids.device)
        kv: list[Tensor] = []
        out, h = [], hidden[:, :T]
        for i in range(DRAFT_STEPS):
            pair = (embedded[:, i + 1 : i + 1 + T], self.pre_fc_norm_hidden(h))
            y = self.fc(torch.cat(pair, dim=-1)).to(hidden.dtype)
            rotary = (cos[:, i : i + T], sin[:, i : i + T])
            y = y + self.attend(layer.input_layernorm(y), rotary, kv, mask)
            y = y + layer.mlp(layer.post_attention_layernorm(y))
            h = self.norm(y)
            out.append(h)
            mask = torch.cat((mask, own), dim=1)
        return out


def full_precision(rule):
    """The delta rule in float32, where autocast would use bfloat16 for its small products."""

    def wrapped(*args, **kwargs):
        with torch.autocast(args[0].device.type, enabled=False):
            return rule(*args, **kwargs)

    return wrapped


def build(device: str) -> tuple[Qwen3_5ForCausalLM, Draft]:
    """Target and draft with fresh random weights."""
    config = text_config()
    qwen.torch_chunk_gated_delta_rule = full_precision(qwen.torch_chunk_gated_delta_rule)
    target, draft = Qwen3_5ForCausalLM(config).to(device), Draft(config).to(device)
    target.requires_grad_(True)
    for layer in target.model.layers:
        if layer.block_type == "linear_attention":
            # Time steps from 0.001 to 0.1, as in Mamba: some heads forget slowly, others fast.
            steps = torch.exp(torch.empty(4).uniform_(math.log(1e-3), math.log(0.1)))
            layer.linear_attn.dt_bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))
    return target, draft


def load(folder: Path, device: str) -> tuple[Qwen3_5ForCausalLM, Draft]:
    """Target and draft with the weights that `export` wrote, in float32."""
    target, draft = build(device)
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    renamed = {k.replace("model.language_model.", "model."): v for k, v in tensors.items()}
    own = {k.removeprefix("mtp."): renamed.pop(k) for k in list(renamed) if k.startswith("mtp.")}
    renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
    target.load_state_dict(renamed)
    draft.load_state_dict(own)
    return target, draft


def export(target: Qwen3_5ForCausalLM, draft: Draft, work: Path, folder: Path) -> None:
    """Write the folder in the layout of the published Qwen3.5 checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in target.state_dict().items()
        if name != "lm_head.weight"
    } | {f"mtp.{name}": value for name, value in draft.state_dict().items()}
    for name, value in tensors.items():
        exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        dtype = torch.float32 if exact else torch.bfloat16
        tensors[name] = value.detach().to("cpu", dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(work / "tokenizer.json", folder)
    text = text_config().to_dict()
    text = {k: v for k, v in text.items() if v is not None and k in TEXT_KEYS} | {
        "dtype": "bfloat16",
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": VISION,
    }
    stops = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "model_max_length": text["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")


TEXT_KEYS = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_bias",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "layer_types",
    "eos_token_id",
]
# There is no vision tower in the file: these sizes keep the one that transformers makes small.
VISION = {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 32, "num_heads": 2} | {
    "intermediate_size": 64,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
}


# ---------------------------------------------------------------- train


def losses(target: Qwen3_5ForCausalLM, draft: Draft, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Target's cross-entropy; and for each draft step its distance from the target, and agreement.

    The distance is the KL divergence plus the cross-entropy of the target's likeliest token. The
    agreement is the share of rows in which the likeliest tokens are the same. Rows that were fed
    the target's own likeliest tokens weigh four times as much, since greedy decoding only visits
    such rows.
    """
    T, V = ids.shape[1] - DRAFT_STEPS, target.vocab_size
    hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = target.lm_head(hidden).float()
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))
    goal = torch.log_softmax(logits.detach(), dim=-1)
    choice = goal.argmax(dim=-1)
    on_path = torch.ones_like(choice[:, :T], dtype=torch.bool)
    distance, agreement = [], []
    for i, h in enumerate(draft(target, ids, hidden), start=1):
        on_path = on_path & (ids[:, i : i + T] == choice[:, i - 1 : i - 1 + T])
        weight = 0.25 + 0.75 * on_path
        rows = slice(i, i + T)
        guess = torch.log_softmax(target.lm_head(h).float(), dim=-1)
        kl = F.kl_div(guess, goal[:, rows], reduction="none", log_target=True).sum(dim=-1)
        first = -guess.gather(-1, choice[:, rows, None]).squeeze(-1)
        distance.append((weight * (kl + first)).sum() / weight.sum())
        agreement.append((guess.argmax(dim=-1) == choice[:, rows]).float().mean())
    return loss, torch.stack(distance), torch.stack(agreement)


def optimizers(target: nn.Module, draft: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for all other parameters."""
    named = [*target.named_parameters(), *draft.named_parameters()]
    is_matrix = [p.dim() == 2 and min(p.shape) > 8 and "embed" not in name for name, p in named]
    matrices = [p for (_, p), yes in zip(named, is_matrix, strict=True) if yes]
    others = [p for (_, p), yes in zip(named, is_matrix, strict=True) if not yes]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """Factor of the learning rate: up over the first 2 %, 1 up to 40 %, then down to 0."""
    return min(1.0, progress / 0.02, (1.0 - progress) / 0.6)


def train(args: argparse.Namespace) -> None:
    """Train on train.bin; write the folder every minute and at the end, with the loss curve."""
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = False
    device, work = args.device, args.work
    tokens = torch.from_numpy(np.fromfile(work / "train.bin", dtype=np.uint16).astype(np.int32))
    tokens = tokens.to(device)
    target, draft = build(device)
    target.train()
    parameters = [*target.parameters(), *draft.parameters()]
    opts = optimizers(target, draft, args.lr)
    window = torch.arange(args.window, device=device)
    generator = torch.Generator().manual_seed(SEED)
    rows, step, began, saved = [], 0, time.time(), time.time()
    while (progress := max(step / args.steps, (time.time() - began) / (60 * args.minutes))) < 1:
        starts = torch.randint(len(tokens) - args.window, (args.batch,), generator=generator)
        ids = tokens[starts.to(device)[:, None] + window].long()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss, distance, agreement = losses(target, draft, ids)
        (loss + args.draft_weight * distance.mean()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * rate(progress)
            opt.step()
            opt.zero_grad()
        step += 1
        if step % args.log_every == 0:
            values = [loss.item(), *distance.tolist(), *agreement.tolist()]
            rows.append([step, round(time.time() - began, 1)] + [round(v, 4) for v in values])
            print(*rows[-1], flush=True)
        if time.time() - saved > 60:
            export(target, draft, work, args.out)
            saved = time.time()
    export(target, draft, work, args.out)
    steps = range(1, DRAFT_STEPS + 1)
    header = ["step", "seconds", "target_loss"] + [f"draft{i}_loss" for i in steps]
    with open(args.out / "curve.csv", "w", newline="") as file:
        csv.writer(file).writerows([header + [f"draft{i}_agreement" for i in steps], *rows])


# ---------------------------------------------------------------- evaluate


def accepted_drafts(target, draft, ids: Tensor, prompt_len: int) -> list[list[bool]]:
    """ids [1, S], a prompt and its greedy continuation -> which drafts of each iteration are right.

    The continuation is cut into iterations as the engine would: the first draft pass gets true
    hiddens, the others those of the pass before, and an iteration keeps the drafts before the
    first wrong one. Drafts after a wrong one never count, so that the passes may be fed the true
    tokens in place of the drafts.
    """
    padded = F.pad(ids, (0, DRAFT_STEPS))
    hidden = target.model(input_ids=padded, use_cache=False).last_hidden_state
    steps = [target.lm_head(h)[0].argmax(dim=-1) for h in draft(target, padded, hidden)]
    iterations, t = [], prompt_len - 1
    while t + 1 + DRAFT_STEPS < ids.shape[1]:
        right = [bool(g[t] == ids[0, t + 1 + i]) for i, g in enumerate(steps, start=1)]
        kept = right.index(False) if False in right else DRAFT_STEPS
        iterations.append([True] * kept + [False] * (DRAFT_STEPS - kept))
        t += kept + 1
    return iterations


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """Measure held-out losses and the acceptance of greedy drafts, in float32."""
    target, draft = load(args.out, args.device)
    target.eval()
    held_out = np.fromfile(args.work / "held_out.bin", dtype=np.uint16).astype(np.int64)
    size, batch = 512, 8
    windows = torch.from_numpy(held_out[: len(held_out) // size * size]).view(-1, size)
    windows = windows[: args.windows].to(args.device)
    sums = [torch.cat([x.view(-1) for x in losses(target, draft, w)]) for w in windows.split(batch)]
    weights = torch.tensor([len(w) for w in windows.split(batch)], device=args.device)
    mean = (torch.stack(sums) * weights[:, None]).sum(dim=0) / weights.sum()
    names = ["target_loss"] + [f"draft{i}_loss" for i in range(1, DRAFT_STEPS + 1)]
    names += [f"draft{i}_agreement" for i in range(1, DRAFT_STEPS + 1)]
    report: dict = dict(zip(names, [round(v, 4) for v in mean.tolist()], strict=True))
    report["held_out_tokens"] = windows.numel()
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    greedy = GenerationConfig(
        max_new_tokens=128 + DRAFT_STEPS,
        do_sample=False,
        eos_token_id=[IM_END, END_OF_TEXT],
        pad_token_id=END_OF_TEXT,
    )
    samples = []
    for kind, prompts in json.loads((args.work / "prompts.json").read_text()).items():
        iterations, early, num_tokens = [], [], 0
        for prompt in prompts[: args.prompts]:
            ids = torch.tensor([prompt], device=args.device)
            ids = target.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy
            )
            num_tokens += ids.shape[1] - len(prompt)
            iterations += accepted_drafts(target, draft, ids, len(prompt))
            early += accepted_drafts(target, draft, ids[:, : len(prompt) + 32], len(prompt))
            new = tokenizer.decode(ids[0, len(prompt) :].tolist(), skip_special_tokens=False)
            samples.append([kind, tokenizer.decode(prompt, skip_special_tokens=False), new])
        by_step = np.array(iterations, dtype=float).mean(axis=0).round(4).tolist()
        report[kind] = {
            "prompts": len(prompts[: args.prompts]),
            "tokens": num_tokens,
            "drafted": len(iterations) * DRAFT_STEPS,
            "accepted": int(np.sum(iterations)),
            "rate": round(float(np.mean(iterations)), 4),
            "rate_by_position": by_step,
            "rate_in_first_32_tokens": round(float(np.mean(early)), 4),
        }
    print(json.dumps(report, indent=1))
    (args.out / "evaluation.json").write_text(
        json.dumps(report | {"samples": samples[::8]}, indent=1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("prepare", "train", "evaluate"))
    parser.add_argument(
        "--work", type=Path, default=Path("out/train_tiny"), help="tokens, packages"
    )
    parser.add_argument("--out", type=Path, default=Path("out/tiny"), help="the checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2155)
    parser.add_argument("--minutes", type=float, default=1e9, help="ends the schedule earlier")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--window", type=int, default=1024, help="tokens in a training row")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--draft-weight", type=float, default=0.3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--windows", type=int, default=10**9, help="held-out windows evaluated")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each kind evaluated")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.command == "prepare":
        prepare(args.work)
    elif args.command == "train":
        train(args)
    else:
        evaluate(args)


if __name__ == "__main__":
    main()
