"""What /tokenize and /detokenize are asked and answer, in vLLM's form.

    TokenizeBody -> PromptEncoder.all_tokens -> ids -> tokenized      DetokenizeBody -> text
A prompt becomes the ids that /v1/completions would make of it, a conversation those of
/v1/chat/completions: a body of the latter may be sent as it is. Nothing is generated, and a text
may be longer than the model's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field

from outrider.actors.http.bodies import ApiError, Body, BodyLimits, TokenId
from outrider.actors.http.chats import ChatBody, Message
from outrider.model.text import Tokenizer


class TokenizeBody(ChatBody):
    """A prompt or a conversation. The fields of a chat that say how its answer is made are taken
    and do nothing here."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=4096)] = []
    add_special_tokens: bool = False
    return_token_strs: bool = False

    def check(self, limits: BodyLimits | None) -> None:
        super().check(limits)
        if (self.prompt is None) == (not self.messages):
            raise ApiError(400, "prompt, messages: give one of them", param="prompt")


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]

    def check_ids(self, vocab_size: int) -> None:
        """ApiError for an id that is none of the model's."""
        if (largest := max(self.tokens, default=0)) >= vocab_size:
            why = f"token id {largest}: ids of this model lie in [0, {vocab_size - 1}]"
            raise ApiError(400, f"tokens: {why}", param="tokens")


def tokenized(
    tokenizer: Tokenizer, ids: Sequence[int], *, max_model_len: int, with_strs: bool
) -> bytes:
    """The answer of /tokenize. with_strs: `token_strs` holds each token as the vocabulary writes
    it."""
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
    answer["token_strs"] = list(map(tokenizer.token_name, ids)) if with_strs else None
    return msgspec.json.encode(answer)
