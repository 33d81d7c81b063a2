"""Structured output: which tokens the grammar of a request allows behind its text.

    Grammar -> compiled -> Matcher.look_ahead(drafts) -> LookAhead: the drafts that it leaves, masks
    committed tokens -> Matcher.commit

llguidance does the matching. Where only one token is possible its mask allows no other, so a draft
of that token is always accepted. A mask depends on nothing but the grammar and the tokens before.
`check_grammars` is the main function of the process in which a driver tries grammars.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import llguidance
import msgspec
import numpy as np

from outrider.model.step import JSON_WHITESPACE, Grammar
from outrider.model.text import Tokenizer

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
"""What a grammar may take to compile, and a mask to compute, in llguidance's units of work."""
THOUGHT_TEXT = r'thought[suffix="</think>"]: /(?s:.*)/'
THOUGHT_RULES = {
    "none": "",
    "begun": r"thought /\n{0,2}/",
    "possible": r'("<think>" thought /\n{0,2}/)?',
}
"""What stands before the text, by Grammar.thought."""
MAX_CHECK_BYTES = 2 << 30
"""Memory of the process that tries grammars. One that needs more is refused."""
TRIED_TOKENS = 20
"""So many tokens are followed when a grammar is tried."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or under which no token can follow."""


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. ValueError for a text that is none of its kind."""
    source = _text_source(grammar)
    if grammar.thought == "none" and not grammar.calls:
        return source
    parts = [("text", source), *([("calls", grammar.calls)] if grammar.calls else [])]
    start = (
        f"start: {THOUGHT_RULES[grammar.thought]} ({' | '.join(f'@{name}' for name, _ in parts)})"
    )
    whole = {"lark_grammar": f"{start}\n{THOUGHT_TEXT}"}
    return json.dumps({"grammars": [whole, *(_part(name, text) for name, text in parts)]})


def _part(name: str, source: str) -> dict[str, object]:
    """A grammar that another one refers to as @name."""
    if not source.startswith("{"):  # Lark's form; llguidance writes others as JSON
        return {"name": name, "lark_grammar": source}
    (part,) = json.loads(source)["grammars"]
    return part | {"name": name}


def _text_source(grammar: Grammar) -> str:
    """The grammar of the text that follows a thought."""
    match grammar.kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": JSON_WHITESPACE}
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            texts = msgspec.json.decode(grammar.text, type=list[str])
            if not texts:
                raise ValueError("an empty list leaves nothing to choose")
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        case "grammar":
            return llguidance.grammar_from("grammar", grammar.text)


def compiled(grammar: Grammar, trie: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """A matcher at the start of the grammar. GrammarError says what is wrong with it."""
    try:
        matcher = llguidance.LLMatcher(trie, source_of(grammar), log_level=0, limits=LIMITS)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    _mask_of(matcher)
    return matcher


def _mask_of(matcher: llguidance.LLMatcher) -> np.ndarray:
    """The ids that may follow [bytes] uint8, as LookAhead.masks. GrammarError where none can."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error() or not mask.any():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarError(reason or "no token can follow")
    return mask


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What the grammar leaves of the drafts of an iteration."""

    drafts: list[int]
    """The drafts to verify, with those that it forces in their places."""
    masks: np.ndarray
    """[len(drafts) + 1, bytes] uint8: which ids may follow the text before each row, one bit an id,
    the lowest first."""


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, start: Future[llguidance.LLMatcher], eos_ids: Sequence[int]) -> None:
        """start: a matcher of its own, behind what there is of the answer, compiled in another
        thread."""
        self._start, self._eos_ids = start, list(eos_ids)

    @cached_property
    def _matcher(self) -> llguidance.LLMatcher:
        """Waits until the grammar is compiled."""
        return self._start.result()

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, which look_ahead has allowed."""
        self._matcher.consume_tokens(list(tokens))

    def look_ahead(self, drafts: Sequence[int], most: int) -> LookAhead:
        """Follow the grammar along the drafts, and along the tokens that it forces instead.

        most: drafts to take at most, of which `drafts` holds as many. A draft that the grammar
        forbids, or that ends the answer, is left out with all behind it. GrammarError when no token
        can follow the text.
        """
        ahead, taken = self._matcher.deep_copy(), []
        masks = [self._mask(ahead)]
        while len(taken) < most:
            forced = _only_id(masks[-1])
            token = drafts[len(taken)] if forced is None else forced
            if token in self._eos_ids or not masks[-1][token // 8] >> (token % 8) & 1:
                break
            ahead.consume_token(token)
            try:
                masks.append(self._mask(ahead))
            except GrammarError:
                break  # the text itself may get there: then the answer ends with this error
            taken.append(token)
        return LookAhead(taken, np.stack(masks))

    def _mask(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        """_mask_of, with the first EOS alone where only an end can follow."""
        mask = _mask_of(matcher)
        ends = np.zeros_like(mask)
        for token in self._eos_ids:
            ends[token // 8] |= 1 << (token % 8)
        if not (mask & ~ends).any():
            mask = np.zeros_like(mask)
            mask[self._eos_ids[0] // 8] = 1 << (self._eos_ids[0] % 8)
        return mask


def _only_id(mask: np.ndarray) -> int | None:
    """The one id that a mask allows; None where it allows several."""
    (filled,) = mask.nonzero()
    bits = int(mask[filled[0]])
    if len(filled) > 1 or bits.bit_count() > 1:
        return None
    return 8 * int(filled[0]) + bits.bit_length() - 1


class Grammars:
    """The grammars of one rank's requests, compiled in a thread beside its loop.

    The tokenizer's tokens are put into a trie when this is made, in that thread, while the weights
    load: for 250,000 tokens it takes 2 s, in which no other thread runs Python.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._eos_ids = list(eos_ids)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._trie: Future[llguidance.LLTokenizer] | None = None
        if self._eos_ids and Tokenizer.exists(model_dir):
            self._trie = self._pool.submit(_trie_of, model_dir, vocab_size, tuple(eos_ids))

    @property
    def are_possible(self) -> bool:
        """Whether the checkpoint has a tokenizer and an EOS token, which grammars need."""
        return self._trie is not None

    def matcher(self, grammar: Grammar, emitted: Sequence[int] = ()) -> Matcher:
        """A matcher for a request that joins, behind the tokens of its answer so far. It waits for
        the grammar when it is asked for something.

        Each request compiles its own: copies share the states that were found, whose number is
        limited, so one request would use up what another may need.
        """
        start = self._pool.submit(self._compile, grammar, list(emitted))
        return Matcher(start, self._eos_ids)

    def _compile(self, grammar: Grammar, emitted: list[int]) -> llguidance.LLMatcher:
        if self._trie is None:
            raise GrammarError("a grammar needs a checkpoint with a tokenizer and an EOS token")
        matcher = compiled(grammar, self._trie.result())
        if emitted:
            matcher.consume_tokens(emitted)
        return matcher


_tries: dict[tuple[Path, int, tuple[int, ...]], llguidance.LLTokenizer] = {}
_one_trie = threading.Lock()


def _trie_of(model_dir: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    """The trie of a folder's tokenizer, once a process. GrammarError where it cannot be made."""
    key = model_dir, vocab_size, eos_ids
    with _one_trie:
        if key not in _tries:
            source = Tokenizer(model_dir).to_json()
            try:
                _tries[key] = llguidance.LLTokenizer(source, vocab_size, list(eos_ids))
            except ValueError as error:
                raise GrammarError(f"no grammars with this tokenizer: {error}") from None
        return _tries[key]


def _follow(matcher: llguidance.LLMatcher, eos_ids: Sequence[int]) -> None:
    """Take the lowest id that may follow, a few times: some grammars explode behind their start."""
    for _ in range(TRIED_TOKENS):
        token = int(np.unpackbits(_mask_of(matcher), bitorder="little").argmax())
        if token in eos_ids:
            return
        matcher.consume_token(token)


def check_grammars() -> None:
    """Write a line when it is ready; then read a Grammar a line from stdin, as JSON, and write a
    line each: why it is refused, or "".

    The vocabulary is that of single bytes: what a grammar costs hardly depends on it, and the
    process starts in no time.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECK_BYTES, MAX_CHECK_BYTES))
    trie, refusal = llguidance.LLTokenizer("byte"), ""
    while True:
        sys.stdout.buffer.write(msgspec.json.encode(refusal[:1000]) + b"\n")
        sys.stdout.buffer.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        refusal = ""
        try:
            matcher = compiled(msgspec.json.decode(line, type=Grammar), trie)
            _follow(matcher, trie.eos_tokens)
        except GrammarError as error:
            refusal = str(error)
