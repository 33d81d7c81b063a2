"""Prompts and conversations become token ids, and ids the text of an echo, beside the event loop.

    texts, messages -> length check -> a thread -> Tokenizer -> token ids
The tokenizer runs without the interpreter lock, so streams go on meanwhile. A text that cannot fit
is refused by its length, before it is encoded. At most one request at a time has a long text in
work: others would find no free thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from outrider.actors.http.bodies import ApiError, BodyLimits, ChatBody
from outrider.model.config import ConfigError
from outrider.model.text import Tokenizer, TooManyTokensError

LONG_TEXT_CHARS = 100_000
ECHO_TOKENS = 4096
"""Ids that are decoded in one call, which holds the interpreter lock."""


class PromptEncoder:
    """One server's. Every method raises ApiError for what can never be answered."""

    def __init__(self, tokenizer: Tokenizer | None, limits: BodyLimits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._one_long_text = asyncio.Lock()

    async def encode(
        self, prompts: Sequence[str | list[int]], param: str = "prompt"
    ) -> list[list[int]]:
        """Ids of each prompt; what is ids already stays. param: the field to name in errors."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if isinstance(prompt, list)]
        tokenizer = self._needed(param)
        for text in texts:
            self._limits.check_prompt(tokenizer.min_tokens(text), param, about="at least ")
        is_long = sum(map(len, texts)) > LONG_TEXT_CHARS
        async with self._one_long_text if is_long else contextlib.nullcontext():
            return await asyncio.to_thread(self._encode, tokenizer, texts, param)

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """Ids of the conversation, as the checkpoint's chat template writes it."""
        tokenizer, values = self._needed("messages"), body.chat_template_kwargs or {}
        try:
            text = await asyncio.to_thread(tokenizer.render_chat, body.conversation(), **values)
        except ConfigError as error:  # the template's own refusal, without the folder's name
            raise ApiError(400, str(error).partition(": ")[2], param="messages") from None
        (ids,) = await self.encode([text], "messages")
        return ids

    async def texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The text of each prompt, for `echo`."""
        tokenizer = self._needed("echo")
        return [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(_text, tokenizer, prompt)
            for prompt in prompts
        ]

    def _needed(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            rule = "this checkpoint has no tokenizer; /v1/completions takes token ids"
            raise ApiError(400, f"{param}: {rule}", param=param)
        return self._tokenizer

    def _encode(self, tokenizer: Tokenizer, texts: Sequence[str], param: str) -> list[list[int]]:
        encoded = []
        for text in texts:
            try:
                encoded.append(tokenizer.encode(text, self._limits.max_prompt_tokens))
            except TooManyTokensError as error:
                self._limits.check_prompt(error.num_tokens, param)
        return encoded


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    stream = tokenizer.stream()
    pieces = [stream.push(ids[i : i + ECHO_TOKENS]) for i in range(0, len(ids), ECHO_TOKENS)]
    return "".join(pieces) + stream.finish()
