"""How a model writes a reply: where its thought stands and how it calls tools.

    source of the chat template, text of the prompt -> form_of -> ReplyForm

Both kinds of tags are those of the Qwen family. Nothing of a reply is read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, FUNCTION = "<tool_call>", "<function="

Thought = Literal["none", "possible", "begun"]
"""none: a reply has no thought, tags are text. possible: it may begin with <think>. begun: the
prompt ends inside the thought, so that the reply begins there."""
CallForm = Literal["xml", "json"]
"""xml: <function=NAME> with a <parameter=NAME> for each argument, of Qwen3.5 and Qwen3-Coder. json:
an object with `name` and `arguments`, of Qwen3 and Qwen3-Next. Either stands in <tool_call>."""


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What is known of a reply before it comes."""

    thought: Thought = "none"
    calls: CallForm | None = None
    """None: the chat template has no words for tools."""


PLAIN = ReplyForm()
"""Of a reply that is nothing but its text."""


def form_of(source: str, prompt: str, continued: str | None = None) -> ReplyForm:
    """The form of the reply to a prompt.

    source: the chat template. prompt: the text that it wrote. continued: the message with which the
    prompt ends, where the reply is more of it.
    """
    calls: CallForm | None = None
    if TOOL_CALL in source:
        calls = "xml" if FUNCTION in source else "json"
    thought: Thought = "none"
    if END_THINK in source:
        end = prompt.rstrip()
        if end.endswith(THINK) or _is_open(continued or ""):
            thought = "begun"
        elif continued is None and not end.endswith(END_THINK):
            thought = "possible"
    return ReplyForm(thought, calls)


def _is_open(text: str) -> bool:
    """Whether the text ends inside a thought."""
    return text.rfind(THINK) > text.rfind(END_THINK)
