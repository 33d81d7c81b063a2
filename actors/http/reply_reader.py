"""Reads one reply to a chat, for whichever dialect it is written in.

    Chunk or Completion -> ReplyReader.read -> the events of reply.py -> a writer
A reader is made for one choice. It gets the whole answer at once, or each chunk of a stream.
"""

from __future__ import annotations

from outrider.actors.driver.messages import Chunk, Completion
from outrider.actors.http.chats import ChatBody
from outrider.actors.http.reply import Event, ReplyParser
from outrider.model.reply_form import ReplyForm
from outrider.model.text import Tokenizer


class ReplyReader:
    """Divides a reply into thought, content and calls, and counts the tokens of its thought."""

    def __init__(self, body: ChatBody, form: ReplyForm, tokenizer: Tokenizer | None) -> None:
        """body: what was asked. form: of replies to its prompt."""
        use = body.tool_use
        self._parser = ReplyParser(
            form, use.schemas, max_calls=use.max_calls, calls_in_thought=not use.is_forced
        )
        self._tokenizer, self._with_special = tokenizer, not body.skip_special_tokens
        self._token_ids: list[int] = []

    def read(self, part: Chunk | Completion) -> list[Event]:
        """What this part adds to the reply."""
        self._token_ids += part.token_ids
        events = self._parser.push(part.text)
        if part.finish_reason is None:
            return events
        return events + self._parser.finish(was_cut=part.finish_reason == "length")

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thought so far, with its tags."""
        end, at = self._parser.num_thought_characters, 0
        if end is not None and self._tokenizer is not None:
            for count, token in enumerate(self._token_ids):
                if at >= end:
                    return count
                at += self._tokenizer.num_characters(token, special=self._with_special)
        return len(self._token_ids) if end != 0 else 0
