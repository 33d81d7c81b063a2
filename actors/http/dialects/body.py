"""A request that is a chat in other words: what the dialects of the API have in common.

    bytes -> parse -> DialectBody -> chat: ChatBody -> the way of every chat
A dialect names its own fields and says what they mean as fields of a chat. How tokens are picked,
where an answer ends and who may ask is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import PrivateAttr

from outrider.actors.http.bodies import ApiError, BodyLimits, CommonFields
from outrider.actors.http.chats import ChatBody, TemplateValues
from outrider.actors.http.parsing import validated

DialectT = TypeVar("DialectT", bound="DialectBody")


class DialectBody(CommonFields):
    """One of another dialect than OpenAI's chats."""

    names: ClassVar[Mapping[str, str]] = {}
    """What fields of a chat are called here, for errors."""
    chat_template_kwargs: TemplateValues | None = None
    _chat: ChatBody = PrivateAttr()

    @property
    def chat(self) -> ChatBody:
        """The chat that is meant; there since `check`."""
        return self._chat

    def chat_fields(self) -> dict[str, Any]:
        """Fields of the body of a chat, as JSON has them, from the own fields; None: not said."""
        raise NotImplementedError

    def check(self, limits: BodyLimits | None) -> None:
        """Makes the chat and checks it as one. ApiError in the words of the dialect."""
        said = {name: value for name, value in self.chat_fields().items() if value is not None}
        try:
            chat = validated(ChatBody, said, limits)
            for name in CommonFields.model_fields.keys() - said.keys():
                setattr(chat, name, getattr(self, name))
            chat.chat_template_kwargs = self.chat_template_kwargs
            chat.check(limits)
        except ApiError as error:
            raise error.renamed(self.names) from None
        self._chat = chat
