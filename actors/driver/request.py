"""One request from submit to end: what was asked, what has come, how it ended, and with which text.

    Progress -> Request.accept -> tokens, stop strings, counters, finish      take -> Chunk
`prompt` and `emitted` are its whole text so far: with them it can leave its slot (`suspend`) and go
on later, in another slot or on other ranks, as if nothing had been. Text is made when a chunk is
taken. With stop strings it is made at once, token by token, so that a match
ends the request whether or not anybody reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from outrider.actors.driver.messages import Chunk, Completion, DraftInfo, RequestStats
from outrider.actors.driver.prefix import Chain
from outrider.actors.driver.stop_strings import StopStrings
from outrider.actors.errors import RequestFailedError
from outrider.model.step import Progress, Sampling


class Detokenizer(Protocol):
    """Turns the tokens of one request into text; only whole characters come out."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Counters:
    """Iterations, tokens and drafts: of one request, or summed over many."""

    def __init__(self, draft_tokens: int) -> None:
        """draft_tokens: the engine's K, the number of draft positions."""
        self.iterations = self.drafted = self.accepted = self.tokens = 0
        self.per_position = [0] * draft_tokens
        """How often the draft at each position was accepted."""

    def add(self, progress: Progress) -> None:
        self.tokens += len(progress.tokens)
        if progress.verified:
            self.iterations += 1
            self.drafted += progress.drafted
            self.accepted += progress.accepted
            for position in range(progress.accepted):
                self.per_position[position] += 1


class Request:
    """One request. The scheduler gives it its slot and its progress; its caller takes chunks."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        draft_tokens: int,
        drafter: str = "mtp",
        stop: Sequence[str] = (),
        include_stop: bool = False,
        key: str = "",
        priority: int = 0,
        draft_info: bool = False,
        cache_salt: str = "",
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """number: never used twice. sampling: its seed drawn, max_tokens cut to the context.

        stop: texts that end the answer. include_stop: what ends it has a part in its text. key: the
        caller's name for it. priority, draft_info, cache_salt: as in GenerationRequest.
        detokenizer: None where the checkpoint has no tokenizer; then every text is empty.
        """
        self.number = number
        self._drafter = drafter
        self.prompt = prompt
        self.sampling = sampling
        self.key = key
        self.priority, self.cache_salt = priority, cache_salt
        self.chain: Chain | None = None
        """Of what prefill runs when it joins next, once the scheduler has looked for it."""
        self.cached_tokens = 0
        """Tokens of its prompt that were not computed for it."""
        self.emitted: list[int] = []
        self.slot: int | None = None
        """None while it waits, and for ever if it ends before it gets one."""
        self.join_number = number
        """Its number in what the ranks are told and tell: another one each time that it joins."""
        self.was_admitted = False
        """Whether it has had a slot, though it may wait for the next one now."""
        self.losses = self.losses_alone = 0
        """Losses of the ranks in a row at which it was in a slot and had hardly got on; of those,
        the last ones at which no other was (driver/suspects.py)."""
        self._num_before = 0
        """Tokens that it had when it left a slot last."""
        self.finish: str | None = None
        """Why the answer is complete: "stop" or "length"; None while it goes on."""
        self.error: Exception | None = None
        """Why there will be no complete answer."""
        self.counters = Counters(draft_tokens)
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._stop_strings = StopStrings(stop, include=include_stop) if stop else None
        self._texts: list[str] = []
        """With stop strings: what each token that no chunk has carried yet adds to the text."""
        self._runs: deque[tuple[int, DraftInfo]] | None = deque() if draft_info else None
        """Tokens of one source that no chunk has carried yet, and what is to be told of them."""
        self._num_taken = 0
        self._logprobs: list[list[tuple[int, float]]] = []
        """Of the tokens that no chunk has carried yet."""
        asks = sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[list[tuple[int, float]] | None] = [None] if asks else []
        """Of the prompt, until the first chunk carries them."""
        self._submitted_s = self._first_s = self._last_s = time.perf_counter()
        self._num_first = 0
        """Tokens of the first step that yielded any."""

    @property
    def ended(self) -> bool:
        """No more tokens will come."""
        return self.finish is not None or self.error is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the answer."""
        return self._stop_strings.found if self._stop_strings is not None else None

    @property
    def num_since_join(self) -> int:
        """Tokens that have come since it joined last; 0 while it waits."""
        return len(self.emitted) - self._num_before

    def accept(self, progress: Progress) -> Progress:
        """Add one step's tokens, up to the end of the request; returns what of them counts.

        A stop string may end the request before the ranks do. Drafts that were accepted behind the
        last token that counts are not in the answer, so they do not count as accepted.
        """
        assert not self.ended, f"request {self.number} has ended and got more tokens"
        if progress.error:
            self.fail(RequestFailedError(f"request {self.number} failed: {progress.error}"))
            return progress
        if progress.prompt_logprobs:
            self._prompt_logprobs += progress.prompt_logprobs
            return progress
        count, finish = len(progress.tokens), progress.finish
        if self._stop_strings is not None:
            count, finish = self._scan(self._stop_strings, progress.tokens, finish)
        if finish is not None:
            progress = replace(
                progress,
                tokens=progress.tokens[:count],
                logprobs=progress.logprobs[:count],
                accepted=min(progress.accepted, count),
                finish=finish,
            )
        self._last_s = time.perf_counter()
        if not self.emitted:
            self._first_s, self._num_first = self._last_s, count
        self.counters.add(progress)
        self.emitted += progress.tokens
        self._logprobs += progress.logprobs
        self.finish = finish
        if self._runs is not None:
            self._runs += _runs_of(progress)
        return progress

    def admit(self, slot: int, cached_tokens: int = 0) -> None:
        """It joins the ranks in this slot, behind what it has emitted. cached_tokens: of those that
        prefill need not run."""
        if not self.was_admitted:
            self.cached_tokens = cached_tokens
        self.slot, self.was_admitted, self.chain = slot, True, None

    def suspend(self, join_number: int) -> None:
        """It leaves its slot and waits for another. join_number: for its next join.

        Progress that is still under way for it is lost: the ranks make those tokens again. So they
        do with log probabilities of its prompt, unless the first token has come, and so all of
        them.
        """
        self.slot, self.join_number = None, join_number
        self._num_before = len(self.emitted)
        if not self.emitted:
            del self._prompt_logprobs[1:]

    def fail(self, error: Exception) -> None:
        """End the request without a complete answer; the first end counts."""
        if not self.ended:
            self.error = error

    def take(self) -> Chunk | None:
        """What has come since the last chunk; None when nothing has.

        The last chunk has finish_reason and stats. Raises `error` behind the tokens before it.
        """
        count, info = len(self.emitted) - self._num_taken, None
        if not count and self.finish is None:
            if self.error is not None:
                raise self.error
            return None
        if self._runs:
            count, info = self._runs.popleft()
        tokens = self.emitted[self._num_taken : self._num_taken + count]
        self._num_taken += count
        is_last = self.finish is not None and self._num_taken == len(self.emitted)
        finish = self.finish if is_last else None
        logprobs, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        if self._stop_strings is None:
            text = self._decode(tokens, finish)
        else:
            text = "".join(self._texts[:count])
            del self._texts[:count]
        return Chunk(
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            at_s=self._last_s - self._submitted_s,
            finish_reason=finish,
            stop_string=self.stop_string if is_last else None,
            stats=self.stats() if is_last else None,
            draft_info=info,
        )

    def completion(self, chunks: Sequence[Chunk]) -> Completion:
        """The whole answer, from all of its chunks."""
        assert self.finish is not None
        assert self.sampling.seed is not None
        return Completion(
            prompt_ids=self.prompt,
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            text="".join(chunk.text for chunk in chunks),
            logprobs=[row for chunk in chunks for row in chunk.logprobs],
            prompt_logprobs=[row for chunk in chunks for row in chunk.prompt_logprobs],
            finish_reason=self.finish,
            stop_string=self.stop_string,
            seed=self.sampling.seed,
            stats=self.stats(),
        )

    def stats(self) -> RequestStats:
        counters = self.counters
        num_later = counters.tokens - self._num_first
        return RequestStats(
            iterations=counters.iterations,
            drafter=self._drafter if counters.drafted else None,
            drafted=counters.drafted,
            accepted=counters.accepted,
            accepted_per_position=list(counters.per_position),
            cached_tokens=self.cached_tokens,
            ttft_s=self._first_s - self._submitted_s,
            tpot_s=(self._last_s - self._first_s) / num_later if num_later else 0.0,
            e2e_s=self._last_s - self._submitted_s,
        )

    def _decode(self, tokens: list[int], finish: str | None) -> str:
        """The text of tokens; a token that stopped the answer has none, unless it is asked for."""
        if self._detokenizer is None:
            return ""
        is_cut = finish == "stop" and not self._include_stop
        text = self._detokenizer.push(tokens[:-1] if is_cut else tokens)
        return text + self._detokenizer.finish() if finish else text

    def _scan(
        self, stop_strings: StopStrings, tokens: list[int], finish: str | None
    ) -> tuple[int, str | None]:
        """Make text of each token in turn -> how many tokens count, and how the request ends.

        Before the answer has min_tokens tokens no stop string ends it.
        """
        for count, token in enumerate(tokens, 1):
            text = self._decode([token], finish if count == len(tokens) else None)
            armed = len(self.emitted) + count >= self.sampling.min_tokens
            is_found = stop_strings.feed(text, armed=armed)
            if finish is not None and count == len(tokens) and not is_found:
                stop_strings.end()
            self._texts.append(stop_strings.take())
            if is_found:
                return count, "stop"
        return len(tokens), finish


def _runs_of(progress: Progress) -> Iterator[tuple[int, DraftInfo]]:
    """The tokens of a step as runs of one source: how many, and what is told of them."""
    num_target = len(progress.tokens) - progress.accepted
    if progress.verified:
        end = {"drafted": progress.drafted, "accepted": progress.accepted}
    else:
        end = {}
    if progress.accepted:
        is_end = not num_target
        yield progress.accepted, DraftInfo(source="draft", **(end if is_end else {}))
    if num_target:
        yield num_target, DraftInfo(source="target", **end)
