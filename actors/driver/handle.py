"""One request as its caller sees it: tokens in, chunks of text out, and where a text must stop.

    ranks -> Driver -> Handle.push -> StopStrings -> Handle.take -> Chunk -> whoever waits
Text is made when a chunk is fetched; with stop strings at once, token by token, so that a match
ends the request whether or not somebody reads. What may begin a stop string is held back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from outrider.actors.driver.messages import Chunk, Completion, Request, RequestStats
from outrider.actors.driver.scheduler import Entry
from outrider.model.step import Progress


class Stream(Protocol):
    """Detokenizer of one request: only whole characters come out."""

    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Text(Protocol):
    """What the driver needs of model.text.Tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def stream(self) -> Stream: ...


class Tally:
    """Counters of one request, or of all of them."""

    def __init__(self, draft_tokens: int) -> None:
        self.iterations = self.drafted = self.accepted = self.tokens = 0
        self.per_position = [0] * draft_tokens

    def add(self, progress: Progress) -> None:
        self.tokens += len(progress.tokens)
        if progress.verified:
            self.iterations += 1
            self.drafted += progress.drafted
            self.accepted += progress.accepted
            for position in range(progress.accepted):
                self.per_position[position] += 1


class StopStrings:
    """Text on its way out, up to the first stop string; what may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = self._ready = ""

    def feed(self, text: str, *, armed: bool = True) -> bool:
        """True when a stop string ends within `text`; it and all behind it is dropped.

        Not armed (before min_tokens): nothing stops, and what ends here never will.
        """
        before = len(self._held)
        self._held += text
        if armed:
            starts = (self._held.find(s, max(0, before - len(s) + 1)) for s in self._stops)
            found = [start for start in starts if start >= 0]
            if found:
                self._release(min(found))
                self._held = ""
                return True
        self._release(len(self._held) - max(map(self._begun, self._stops)))
        return False

    def end(self) -> None:
        """No more text: what was held back comes out."""
        self._release(len(self._held))

    def take(self) -> str:
        ready, self._ready = self._ready, ""
        return ready

    def _begun(self, stop: str) -> int:
        """Characters of `stop` that the held text ends with, short of all."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]


class Handle:
    """One request as its caller sees it: iterate over chunks, or await the whole `result()`.

    Tokens that arrive while the caller is busy become one chunk.
    """

    def __init__(
        self,
        entry: Entry,
        request: Request,
        *,
        draft_tokens: int,
        stream: Stream | None,
        news: asyncio.Event | None = None,
    ) -> None:
        """news: set whenever there is something to take; None makes one of its own."""
        self.request = entry.request
        self.key = request.key
        self.entry = entry
        self.joined = asyncio.Event()
        """Set once the request has a slot, or has ended."""
        self._tally = Tally(draft_tokens)
        self._stream = stream
        self._stops = StopStrings(request.stop) if request.stop else None
        self._fresh: list[int] = []
        self._logprobs: list[list[tuple[int, float]]] = []
        self._error: Exception | None = None
        self._ended = False
        self._news = news or asyncio.Event()
        self._submitted_s = time.perf_counter()
        self._first_s = self._last_s = self._submitted_s
        self._first_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the stop token included."""
        return self._tally.tokens

    def push(self, progress: Progress) -> Progress:
        """New tokens from the ranks; -> what of them counts: a stop string may end it early."""
        self._last_s = time.perf_counter()
        if self._stops is not None:
            progress = self._scan(progress, self._stops)
        if self._tally.tokens == 0:
            self._first_s, self._first_tokens = self._last_s, len(progress.tokens)
        self._tally.add(progress)
        self._fresh += progress.tokens
        self._logprobs += progress.logprobs
        self._news.set()
        return progress

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.joined.set()
        self._news.set()

    def take(self) -> Chunk | None:
        """What has come since the last one; None: nothing yet. Raises what ended the request."""
        finish = self.entry.finish
        if not self._fresh and finish is None:
            if self._error is not None:
                self._ended = True
                raise self._error
            return None
        tokens, self._fresh = self._fresh, []
        logprobs, self._logprobs = self._logprobs, []
        text = self._decode(tokens, finish) if self._stops is None else self._stops.take()
        self._ended = finish is not None
        return Chunk(
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            at_s=self._last_s - self._submitted_s,
            finish_reason=finish,
            stats=self.stats() if self._ended else None,
        )

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        while (chunk := self.take()) is None:
            await self._news.wait()
            self._news.clear()
        return chunk

    async def result(self) -> Completion:
        """All of the answer that no iteration has taken yet; normally all of it."""
        tokens, texts, logprobs, finish = [], [], [], ""
        async for chunk in self:
            tokens += chunk.token_ids
            texts.append(chunk.text)
            logprobs += chunk.logprobs
            finish = chunk.finish_reason or ""
        seed = self.entry.sampling.seed
        assert seed is not None
        return Completion(
            prompt_ids=self.entry.prompt,
            token_ids=tokens,
            text="".join(texts),
            logprobs=logprobs,
            finish_reason=finish,
            seed=seed,
            stats=self.stats(),
        )

    def stats(self) -> RequestStats:
        tally = self._tally
        after = tally.tokens - self._first_tokens
        return RequestStats(
            iterations=tally.iterations,
            drafted=tally.drafted,
            accepted=tally.accepted,
            accepted_per_position=list(tally.per_position),
            ttft_s=self._first_s - self._submitted_s,
            tpot_s=(self._last_s - self._first_s) / after if after else 0.0,
            e2e_s=self._last_s - self._submitted_s,
        )

    def _decode(self, tokens: list[int], finish: str | None) -> str:
        if self._stream is None:
            return ""
        text = self._stream.push(tokens[:-1] if finish == "stop" else tokens)
        return text + self._stream.finish() if finish else text

    def _scan(self, progress: Progress, stops: StopStrings) -> Progress:
        """Make text of each token in turn, up to the one that completes a stop string."""
        least = self.entry.sampling.min_tokens
        last = len(progress.tokens) - 1
        for index, token in enumerate(progress.tokens):
            finish = progress.finish if index == last else None
            if stops.feed(
                self._decode([token], finish), armed=self._tally.tokens + index + 1 >= least
            ):
                kept = index + 1
                return msgspec.structs.replace(
                    progress,
                    tokens=progress.tokens[:kept],
                    logprobs=progress.logprobs[:kept],
                    finish="stop",
                )
        if progress.finish is not None:
            stops.end()
        return progress


async def merge(handles: Sequence[Handle], news: asyncio.Event) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of handles that share `news`, as they come, each with its handle's index."""
    unfinished = dict(enumerate(handles))
    while unfinished:
        for index, handle in list(unfinished.items()):
            chunk = handle.take()
            if chunk is not None:
                if chunk.finish_reason is not None:
                    del unfinished[index]
                yield index, chunk
        if unfinished:
            await news.wait()
            news.clear()
