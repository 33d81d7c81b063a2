"""Makes the corpus of the bundled checkpoint from the documentation of pinned source packages.

    pip download -> documents and docstrings -> plain text -> BPE -> tokens

Whole documents are held out for evaluation. Sections of the documents appear a second time as
conversations: the heading is the question and the first paragraphs are the answer. `prepare` does
all of it and writes train.bin and held_out.bin (uint16), tokenizer.json, prompts.json and
sources.json into one folder.
"""

import ast
import json
import random
import re
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, _, IM_END = range(3)
QUESTIONS = (
    "{title}",
    "{title}?",
    "Tell me about {title} in {package}.",
    "What does the {package} documentation say about {title}?",
    "Explain {title}.",
    "{package}: {title}",
)


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
    """Number of spaces at the beginning."""
    return len(line) - len(line.lstrip())


def take_block(lines: list[str], start: int, indent: int) -> tuple[list[str], int]:
    """The lines from `start` that are blank or deeper than `indent`, and where they end."""
    end = start
    while end < len(lines) and (not lines[end].strip() or indent_of(lines[end]) > indent):
        end += 1
    return textwrap.dedent("\n".join(lines[start:end])).strip("\n").split("\n"), end


def inline(text: str) -> str:
    """The text without reStructuredText's inline markup."""
    for pattern, replacement in INLINE:
        text = pattern.sub(replacement, text)
    return text


def paragraph(lines: list[str]) -> str:
    """Join wrapped lines; each list item becomes one line, and tables are left out."""
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
    """Paragraphs of one reStructuredText directive, as a reader of the page sees them."""
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
    """reStructuredText as plain text: headings with #, a line for each paragraph, code indented."""
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
    """The docstrings of a module that have over 150 characters, one section for each."""
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
    """The documents of one source package that have over 500 characters and are mostly letters."""
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
    """Conversations in ChatML: a section's heading asks, and its first paragraphs answer."""
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
    opening = "<|im_start|>assistant\n"
    chats = [tokenizer.encode(turn.partition(opening)[0] + opening).ids for turn in turns]
    return {"text": rng.sample(texts, min(40, len(texts))), "chat": rng.sample(chats, 8)}


def prepare(work: Path) -> None:
    """Download PACKAGES and write the files that the module's docstring lists into `work`."""
    rng = random.Random(SEED)
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    turns: dict[str, list[str]] = {"train": [], "held_out": []}
    sizes = {}
    for pin in PACKAGES:
        folder = work / "packages" / pin
        if not list(folder.glob("*.tar.gz")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", pin]
            command += ["--no-binary", pin.partition("==")[0], "--dest", str(folder)]
            subprocess.run(command, check=True)
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
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(mixed):
            ids += [*encoding.ids, END_OF_TEXT]
        np.array(ids, dtype=np.uint16).tofile(work / f"{part}.bin")
        print(part, len(texts), "documents", len(chats), "conversations", len(ids), "tokens")
