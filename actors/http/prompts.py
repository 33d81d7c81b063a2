"""Prompts and conversations become token ids, and ids the text of an echo, beside the event loop.

    texts, messages -> length check -> a thread -> Tokenizer -> token ids
The tokenizer runs without the interpreter lock, so streams go on meanwhile. A text that cannot fit
is refused by its length, before it is encoded. At most one request at a time has a long text in
work: others would find no free thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outrider.actors.http.bodies import ApiError, BodyLimits, CompletionBody
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.tokens import TokenizeBody, tokenized
from outrider.model.config import ConfigError
from outrider.model.reply_form import ReplyForm
from outrider.model.step import Grammar
from outrider.model.text import Tokenizer, TooManyTokensError

T = TypeVar("T")
LONG_TEXT_CHARS = 100_000
ECHO_TOKENS = 4096
"""Ids that are decoded in one call, which holds the interpreter lock."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The token ids of a prompt, and what is known of the reply to it."""

    ids: list[int]
    form: ReplyForm
    grammar: Grammar | None


class PromptEncoder:
    """One server's. Every method raises ApiError for what can never be answered."""

    def __init__(self, tokenizer: Tokenizer | None, limits: BodyLimits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._max_model_len = limits.max_prompt_tokens + 1
        self._one_long_text = asyncio.Lock()

    async def encode(self, body: CompletionBody) -> list[list[int]]:
        """Ids of each prompt; what is ids already stays, but for what is to be cut off."""
        kept = body.kept_prompt_tokens(self._max_model_len)
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        if texts:
            return await self._encode(texts, "prompt", kept)
        prompts = [prompt[-kept:] if kept else prompt for prompt in body.prompt]
        for prompt in prompts:
            self._limits.check_prompt(len(prompt))
        return prompts

    async def encode_chat(self, body: ChatBody) -> ReadPrompt:
        """The conversation, as the checkpoint's chat template writes it."""
        text = await self._chat_text(body)
        form, grammar = await asyncio.to_thread(reply_of, self._needed("messages"), body, text)
        kept = body.kept_prompt_tokens(self._max_model_len)
        (ids,) = await self._encode([text], "messages", kept)
        return ReadPrompt(ids, form, grammar)

    async def tokenize(self, body: TokenizeBody) -> bytes:
        """The answer of /tokenize. The text may have more tokens than fit."""
        tokenizer = self._needed("prompt")
        text = await self._chat_text(body) if body.prompt is None else body.prompt

        def answer() -> bytes:
            ids = tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
            return tokenized(
                tokenizer, ids, max_model_len=self._max_model_len, with_strs=body.return_token_strs
            )

        return await self._beside_the_loop([text], answer)

    async def count_chat(self, body: ChatBody) -> int:
        """How many tokens the conversation has, also if they do not fit."""
        tokenizer, text = self._needed("messages"), await self._chat_text(body)
        return await self._beside_the_loop([text], lambda: len(tokenizer.encode(text)))

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await asyncio.to_thread(_text, self._needed("tokens"), ids, special=True)

    def banned(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each of bad_words."""
        return banned_tokens(self._needed("bad_words"), words) if words else []

    async def texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The text of each prompt, for `echo`."""
        tokenizer = self._needed("echo")
        return [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(_text, tokenizer, prompt)
            for prompt in prompts
        ]

    async def _chat_text(self, body: ChatBody) -> str:
        tokenizer = self._needed("messages")
        try:
            return await asyncio.to_thread(chat_text, tokenizer, body)
        except ConfigError as error:  # the template's own refusal, without the folder's name
            raise ApiError(400, str(error).partition(": ")[2], param="messages") from None

    def _needed(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            rule = "this checkpoint has no tokenizer; /v1/completions takes token ids"
            raise ApiError(400, f"{param}: {rule}", param=param)
        return self._tokenizer

    async def _encode(self, texts: Sequence[str], param: str, kept: int | None) -> list[list[int]]:
        """Ids of the texts, the last `kept` of each. param: the field to name in errors."""
        tokenizer = self._needed(param)
        if kept is None:
            for text in texts:
                self._limits.check_prompt(tokenizer.min_tokens(text), param, about="at least ")
        most = self._limits.max_prompt_tokens if kept is None else None
        try:
            encoded = await self._beside_the_loop(
                texts, lambda: [tokenizer.encode(text, most) for text in texts]
            )
        except TooManyTokensError as error:
            self._limits.check_prompt(error.num_tokens, param)
            raise
        prompts = [ids[-kept:] if kept else ids for ids in encoded]
        for prompt in prompts:
            self._limits.check_prompt(len(prompt), param)
        return prompts

    async def _beside_the_loop(self, texts: Sequence[str], work: Callable[[], T]) -> T:
        """The result of work with these texts, which a thread does."""
        is_long = sum(map(len, texts)) > LONG_TEXT_CHARS
        async with self._one_long_text if is_long else contextlib.nullcontext():
            return await asyncio.to_thread(work)


def chat_text(tokenizer: Tokenizer, body: ChatBody) -> str:
    """The prompt of a chat. ConfigError where the chat template refuses it."""
    return tokenizer.render_chat(
        body.conversation(),
        chat_template=body.chat_template,
        add_generation_prompt=body.starts_reply,
        continue_final_message=body.continue_final_message,
        **body.template_values(),
    )


def reply_of(tokenizer: Tokenizer, body: ChatBody, text: str) -> tuple[ReplyForm, Grammar | None]:
    """The form of the reply to a prompt of chat_text, and what holds it. ApiError for tools that
    the chat template has no words for."""
    continued = body.messages[-1].text if body.continue_final_message else None
    form = tokenizer.reply_form(text, continued=continued, chat_template=body.chat_template)
    return form, body.grammar_of(form)


def banned_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The tokens of words that an answer may not hold: of each word alone, and behind a space."""
    spellings = (text for word in words for text in (word, " " + word.lstrip()))
    return [tokenizer.encode(text) for text in dict.fromkeys(spellings)]


def _text(tokenizer: Tokenizer, ids: Sequence[int], *, special: bool = False) -> str:
    stream = tokenizer.stream(special=special)
    pieces = [stream.push(ids[i : i + ECHO_TOKENS]) for i in range(0, len(ids), ECHO_TOKENS)]
    return "".join(pieces) + stream.finish()
