"""Answers under a grammar are of its language, and are the same with and without drafts.

examples/tiny answers, since it has a tokenizer and an opinion: some drafts are legal, some are not.
Its answers are read as text and checked by hand-written rules, not by the library that made them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.model.batch import DecodeBatch
from outrider.model.config import Ablation
from outrider.model.executor import RunPiece
from outrider.model.grammar import GrammarError, Grammars, compiled
from outrider.model.runner import Runner
from outrider.model.sampling import SamplingMemory
from outrider.model.step import MAX_GRAMMAR_CHARS, Grammar, Join, Leave, Progress, Sampling
from outrider.model.text import Tokenizer
from outrider.model.warmup import warm_up
from outrider.parallel.devices import open_device
from outrider.parallel.group import threads
from outrider.parallel.operands import GatheredSlots
from outrider.parallel.sampling import mask
from tests.graphs import record
from tests.model.conftest import Checkpoint
from tests.ranks import BlockAllocator, ForcedDrafter, Output, Team, serve

TINY = Path(__file__).parents[2] / "examples" / "tiny"
EOS = (0, 2)
PROMPTS = ("def main(args):\n    ", "The parser reads", "x = ")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 99},
                "ok": {"type": "boolean"},
            },
            "required": ["x", "ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "tags", "at"],
    "additionalProperties": False,
}
LIST = 'root ::= "sum(" item (", " item)* ")"\nitem ::= [0-9]+ | "[" item "]"'
REGEX = r"(def|class) [a-z_]{3,12}\(self\): return [0-9]{1,4}"
SENTENCE = "import collections and then return the value of the answer"
GRAMMARS = {
    "json_object": Grammar("json_schema", '{"type": "object"}'),
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", REGEX),
    "grammar": Grammar("grammar", LIST),
    "choice": Grammar("choice", json.dumps(["the function returns", "the functional test"])),
}


def is_valid(kind: str, text: str) -> bool:
    """Whether a whole answer is of its language."""
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    if kind == "json_schema":
        value = json.loads(text)
        name, tags, at = value["name"], value["tags"], value["at"]
        return (
            (set(value), set(at)) == ({"name", "tags", "at"}, {"x", "ok"})
            and (isinstance(name, str) and len(name) <= 12)
            and (len(tags) <= 3 and set(tags) <= {"red", "green", "blue"})
            and (type(at["x"]) is int and 0 <= at["x"] <= 99 and type(at["ok"]) is bool)
        )
    if kind == "grammar":
        return re.fullmatch(r"sum\((\[*\d+\]*)(, \[*\d+\]*)*\)", text) is not None
    if kind == "choice":
        return text in json.loads(GRAMMARS[kind].text)
    return re.fullmatch(REGEX, text) is not None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def teams() -> dict[int, Team]:
    keys: dict = {"dtype": "float32", "max_slots": 6, "num_pages": 260}
    return {
        0: Team(TINY, draft_tokens=0, **keys),
        3: Team(TINY, draft_tokens=3, tensor_parallel=2, **keys),
        8: Team(TINY, draft_tokens=8, **keys),
    }


def how(grammar: Grammar | None, **changes: object) -> Sampling:
    keys: dict = {"max_tokens": 44, "seed": 5, "stop_ids": EOS, **changes}
    return Sampling(grammar=grammar, **keys)


def same(out: Output, off: Output) -> None:
    assert (out.tokens, out.finish, out.error) == (off.tokens, off.finish, off.error)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_answers_are_valid_and_the_same_with_drafts(
    teams: dict[int, Team], tokenizer: Tokenizer, kind: str, temperature: float
) -> None:
    sampling = how(GRAMMARS[kind], temperature=temperature, max_tokens=60)
    requests = [(tokenizer.encode(prompt), sampling) for prompt in PROMPTS]
    free = teams[8].generate([(p, how(None, temperature=temperature)) for p, _ in requests])
    off = teams[0].generate(requests)
    for depth in (3, 8):
        outs = teams[depth].generate(requests, stagger=1)
        for out, alone, without in zip(outs, off, free):
            same(out, alone)
            assert out.tokens != without.tokens, "the grammar changed nothing"
        assert sum(out.accepted for out in outs) > 0
    ended = [out for out in off if out.finish == "stop"]
    assert ended
    for out in off:
        if out.finish == "stop":
            assert out.tokens[-1] in EOS
            assert is_valid(kind, tokenizer.decode(out.tokens))
        else:
            assert (len(out.tokens), out.finish) == (60, "length")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_fifty_prompts_of_each_kind(tokenizer: Tokenizer, kind: str, temperature: float) -> None:
    """Every answer that ends is valid; one that max_tokens cut is the beginning of a valid one."""
    words = (TINY / "held_out.txt").read_text("utf-8").split()
    prompts = [tokenizer.encode(" ".join(words[4 * i : 4 * i + 9])) for i in range(50)]
    sampling = how(GRAMMARS[kind], temperature=temperature, max_tokens=100)
    keys: dict = {"dtype": "float32", "max_slots": 8, "num_pages": 300}
    on, off = (Team(TINY, draft_tokens=k, **keys) for k in (4, 0))
    outs = on.generate([(prompt, sampling) for prompt in prompts])
    ended = 0
    for out, alone in zip(outs, off.generate([(prompt, sampling) for prompt in prompts])):
        same(out, alone)
        if out.finish == "stop":
            ended += 1
            assert is_valid(kind, tokenizer.decode(out.tokens))
        else:
            matcher = Grammars(TINY, 4096, EOS).matcher(GRAMMARS[kind])
            for token in out.tokens:
                row = matcher.look_ahead([], 0).masks[0]
                assert row[token // 8] >> (token % 8) & 1
                matcher.commit([token])
    drafted, accepted = sum(o.drafted for o in outs), sum(o.accepted for o in outs)
    print(f"{kind} at {temperature}: {ended} of 50 ended, {accepted} of {drafted} accepted")
    assert ended >= 20
    assert accepted > 0


def test_what_the_grammar_forces_is_accepted_as_a_whole(
    teams: dict[int, Team], tokenizer: Tokenizer
) -> None:
    """The tokens are those that the tokenizer makes of the text, then EOS, at any temperature."""
    one = Grammar("choice", json.dumps([SENTENCE]))
    for depth, team in teams.items():
        for temperature in (0.0, 1.5):
            (out,) = team.generate([([5, 9], how(one, temperature=temperature))])
            text = tokenizer.encode(SENTENCE)
            assert (out.tokens, out.finish) == ([*text, EOS[0]], "stop")
            assert out.accepted == out.drafted
            if depth:  # the first token comes from the prompt, EOS is no draft
                assert out.iterations == -(-len(text) // (depth + 1))
                assert out.drafted == len(text) - out.iterations


def test_a_batch_mixes_requests_with_and_without_grammars(
    teams: dict[int, Team], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPTS[0])
    settings = [
        how(None),
        how(GRAMMARS["json_schema"], temperature=0.9, top_p=0.9),
        how(None, temperature=0.8, top_k=20, logprobs=2),
        how(GRAMMARS["regex"], presence_penalty=0.7, logprobs=1),
        how(GRAMMARS["json_object"], draft_tokens=1),
        how(GRAMMARS["regex"], temperature=0.7, min_p=0.05, draft_tokens=0),
    ]
    alone = [teams[0].generate([(prompt, one)])[0] for one in settings]
    for depth in (3, 8):
        for out, off in zip(teams[depth].generate([(prompt, one) for one in settings]), alone):
            same(out, off)
            assert [len(row) for row in out.logprobs] == [len(row) for row in off.logprobs]
    assert alone[3].logprobs[0][0][1] < 0.0, "they are those of the logits without masks"


class IllegalDrafter(ForcedDrafter):
    """Drafts what the answer is, but a token that no grammar allows at one place of each block."""

    def __init__(self, runner: Runner, answers: dict[tuple[int, ...], list[int]], place: int):
        super().__init__(runner, answers, lambda position, i: True)
        self.place = place

    def propose(self, batch: DecodeBatch, at: GatheredSlots, run: RunPiece) -> Tensor:
        drafts = super().propose(batch, at, run)
        drafts[:, self.place] = 1  # <|im_start|>
        return drafts


@pytest.mark.parametrize("place", range(4))
def test_an_illegal_draft_is_cut_with_all_behind_it(
    teams: dict[int, Team], tokenizer: Tokenizer, place: int
) -> None:
    """All drafts before it are right, so all that are verified are accepted; the grammar ends
    inside of a block, behind which the drafts go on."""
    prompt, sampling = tokenizer.encode(PROMPTS[1]), how(GRAMMARS["regex"])
    (off,) = teams[0].generate([(prompt, sampling)])
    team = Team(TINY, draft_tokens=4, dtype="float32")
    answers = {tuple(prompt): [*off.tokens, 7, 7, 7, 7]}
    team.runners[0].use_drafter(IllegalDrafter(team.runners[0], answers, place))  # type: ignore
    (out,) = team.generate([(prompt, sampling)])
    same(out, off)
    assert out.accepted == out.drafted
    assert max(out.kept) <= 5
    assert min(out.kept) <= place + 1, "the illegal draft was never met"
    assert off.finish == "stop"


def test_a_cancelled_request_leaves_nothing_behind(
    teams: dict[int, Team], tokenizer: Tokenizer
) -> None:
    """Cancelled before its first token and in the middle; its slot then has another request."""
    prompt, runner = tokenizer.encode(PROMPTS[2]), teams[8].runners[0]
    for steps in (0, 1, 3):
        for after in (how(None), how(GRAMMARS["regex"])):
            (off,) = teams[0].generate([(prompt, after)])
            books = BlockAllocator(runner.run)
            join = books.join(0, 0, prompt, how(GRAMMARS["json_schema"]))
            runner.apply([join])
            for _ in range(steps):
                books.book(runner.step())
            runner.apply([Leave(slot=0, request=0)])
            (out,) = serve(runner, [(prompt, after)])
            same(out, off)


def test_what_cannot_go_on_fails_alone(teams: dict[int, Team], tokenizer: Tokenizer) -> None:
    """The first of these cannot be compiled, the second is too large behind its first letter."""
    prompt = tokenizer.encode(PROMPTS[0])
    large = Grammar("regex", "x((a{1000}){1000}){1000}")
    wrong = Grammar("json_schema", '{"type": "object", "if": {}}')
    requests = [(prompt, how(g)) for g in (wrong, GRAMMARS["regex"], large, None)]
    first, right, late, free = teams[3].generate(requests)
    assert first.error == 'sampling.grammar: Unimplemented keys: ["if"]'
    assert (first.tokens, late.finish) == ([], None)
    assert "too many expressions" in late.error
    assert tokenizer.decode(late.tokens) == "x"
    same(right, teams[0].generate([requests[1]])[0])
    same(free, teams[0].generate([requests[3]])[0])


def test_a_checkpoint_without_a_tokenizer_says_so(varied: Checkpoint) -> None:
    (out,) = Team(varied.folder, draft_tokens=2).generate([([3, 5], how(GRAMMARS["regex"]))])
    assert "needs a checkpoint with a tokenizer" in out.error


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_and_devices_that_run_ahead_change_nothing(
    teams: dict[int, Team], tokenizer: Tokenizer, graphs: bool
) -> None:
    """All that answers under grammars need is captured before the first request. Graphs that are
    recorded on the CPU overwrite their results, so nothing can run ahead of them."""
    team = Team(TINY, draft_tokens=2, dtype="float32", max_slots=2, prefill_chunk=64)
    (runner,) = team.runners
    keys = record(runner) if graphs else list
    runner.run_ahead = 0 if graphs else 1
    warm_up(runner)
    captured: list = keys()
    pieces = [key for key in captured if key[-1] in ("drafts", "verify")]
    assert len(pieces) == (12 if graphs else 0), "two for each size and each depth"
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    settings = [how(GRAMMARS["json_schema"], temperature=0.8), how(GRAMMARS["regex"]), how(None)]
    outs = team.generate(list(zip(prompts, settings)), stagger=2)
    for prompt, sampling, out in zip(prompts, settings, outs):
        same(out, teams[0].generate([(prompt, sampling)])[0])
    assert keys() == captured
    assert sum(out.accepted for out in outs) > 0


def test_where_nothing_may_run_ahead_each_step_brings_tokens(tokenizer: Tokenizer) -> None:
    team = Team(TINY, draft_tokens=2, dtype="float32")
    (runner,) = team.runners
    runner.run_ahead, step, num_steps = 1, runner.step, 0

    def counted() -> list[Progress]:
        nonlocal num_steps
        num_steps += 1
        return step()

    runner.step = counted  # type: ignore[method-assign]
    (out,) = team.generate([(tokenizer.encode(PROMPTS[0]), how(GRAMMARS["regex"]))])
    assert out.iterations > 2
    assert num_steps == out.iterations + 1, "the first is that of the prompt"


@pytest.mark.parametrize(
    "changes",
    [
        {"drafter": "lookup"},
        {"drafter": "both", "draft_body": "sharded", "tensor_parallel": 2},
        {"ablation": Ablation(sync_each_draft=True)},
        {"auto_depth": True},
    ],
)
def test_however_drafts_are_made_the_answer_is_the_same(
    teams: dict[int, Team], tokenizer: Tokenizer, changes: dict
) -> None:
    """With auto_depth the plan changes how many there are, down to none."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    settings = [how(GRAMMARS["grammar"], temperature=0.8), how(GRAMMARS["regex"]), how(None)]
    team = Team(TINY, draft_tokens=3, dtype="float32", **changes)
    depths = iter([3, 0, 0, 1, 2] * 40)

    def work(runner: Runner) -> list[Output]:
        step = runner.step

        def limited() -> list[Progress]:
            runner.limit_drafts(next(depths))
            return step()

        if team.run_config.auto_depth:
            runner.step = limited  # type: ignore[method-assign]
        return serve(runner, list(zip(prompts, settings)), stagger=1)

    for prompt, sampling, out in zip(prompts, settings, team.each(work)[0]):
        same(out, teams[0].generate([(prompt, sampling)])[0])
        assert out.drafted > 0


def test_each_rank_gets_its_slice_of_a_mask() -> None:
    """Widths of slices that do not end with a byte or with a word; every row has its own mask."""
    generator = np.random.default_rng(3)
    for width in (24, 27, 40, 97):
        allowed = generator.integers(0, 2, (3, 2 * width), dtype=np.uint8)
        rows = np.packbits(allowed, axis=1, bitorder="little")
        for rank, group in enumerate(threads(2)):
            memory = SamplingMemory(2, 3, 2 * width, open_device("cpu", 0, group))
            memory.set_masks(1, rows)
            memory.by_slot.masked[1] = True
            logits = torch.randn(2, 3, width)
            masked = mask(logits, torch.tensor([1, 0]), memory.by_slot)
            mine = torch.from_numpy(allowed[:, rank * width : (rank + 1) * width]).bool()
            assert torch.equal(masked[0], logits[0].masked_fill(~mine, -torch.inf))
            assert torch.equal(masked[1], logits[1])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "array", "contains": {}}'), '["contains"]'),
        (Grammar("json_schema", '{"type": "strin"}'), "strin"),
        (Grammar("json_schema", "{"), "EOF"),
        (Grammar("json_schema", "3"), "object"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("choice", "[]"), "nothing to choose"),
        (Grammar("choice", '["a", 3]'), "str"),
        (Grammar("grammar", "start: nobody"), "nobody"),
        (Grammar("grammar", "hello ((("), "GBNF"),
        (Grammar("grammar", "start: start"), "NoExtension"),
    ],
)
def test_a_grammar_that_is_wrong_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    import llguidance

    with pytest.raises(GrammarError, match=re.escape(reason)):
        compiled(grammar, llguidance.LLTokenizer("byte"))


def test_requests_with_one_grammar_do_not_use_up_each_others_limits(tokenizer: Tokenizer) -> None:
    """Copies of a matcher share what llguidance has found out, which may be 50,000 states: of this
    grammar 500 answers of 60 random letters find as many."""
    grammars = Grammars(TINY, 4096, EOS)
    letters, draws = tokenizer.encode("b") + tokenizer.encode("a"), np.random.default_rng(0)
    for _ in range(700):
        matcher = grammars.matcher(Grammar("regex", "(a|b)*a(a|b){22}"))
        for letter in draws.integers(0, 2, 60):
            matcher.look_ahead([], 0)
            matcher.commit([letters[letter]])


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"min_tokens": 3}, "min_tokens = 3: must be 0 with a grammar"),
        ({"ignore_eos": True}, "ignore_eos = True: must be false with a grammar"),
        ({"text": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"at most {MAX_GRAMMAR_CHARS} are allowed"),
    ],
)
def test_what_a_grammar_excludes_is_named(changes: dict, rule: str) -> None:
    text = changes.pop("text", "a")
    with pytest.raises(ValueError, match=rule):
        Sampling(grammar=Grammar("regex", text), **changes)


def test_a_grammar_travels_with_its_request() -> None:
    join = Join(slot=0, request=1, tokens=[3], pages=[1], sampling=how(GRAMMARS["regex"]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join) == join
