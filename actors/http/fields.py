"""Fields of OpenAI's API, and of servers like this one, that change no text here.

    field, value -> UNUSED: accepted, whatever it says | NEUTRAL: accepted with these values alone
bodies.py takes them out of a body before it looks at the rest. What is in neither table and is no
field of a body is unknown. NEUTRAL fields with other values are refused, and never ignored: they
ask for something that this server does not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MESSAGES_UNUSED = frozenset({
    "cache_control", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id",
    "workspace_id",
})  # fmt: skip
UNUSED: Mapping[str, frozenset[str]] = {
    "Settings": frozenset({
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
        "spaces_between_special_tokens", "store", "verbosity",
    }),
    "ResponsesBody": frozenset({
        "client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options",
    }),
    "TextSettings": frozenset({"verbosity"}),
    "MessageItem": frozenset({"annotations", "cache_control", "id", "phase", "status"}),
    "FunctionCall": frozenset({"id", "status"}),
    "FunctionCallOutput": frozenset({"id", "status", "name"}),
    "ReasoningItem": frozenset({"id", "status"}),
    "MessagesBody": MESSAGES_UNUSED,
    "CountTokensBody": MESSAGES_UNUSED,
    "Tool": frozenset({"cache_control", "eager_input_streaming", "input_examples", "strict"}),
    "Thinking": frozenset({"budget_tokens"}),
    "TextBlock": frozenset({"cache_control", "citations"}),
    "ThinkingBlock": frozenset({"signature"}),
    "RedactedThinkingBlock": frozenset({"data"}),
    "ToolUseBlock": frozenset({"cache_control", "caller"}),
    "ToolResultBlock": frozenset({"cache_control", "is_error"}),
    "StreamOptions": frozenset({"include_obfuscation"}),
    "Message": frozenset({"annotations", "cache_control", "id", "provider_specific_fields"}),
    "Part": frozenset({"annotations", "cache_control", "id", "logprobs"}),
    "ChatTool": frozenset({"cache_control"}),
    "ToolFunction": frozenset({"strict"}),
    "ToolCall": frozenset({"index", "provider_specific_fields"}),
}  # fmt: skip
"""By class of a body, or of a part of one: fields that name, sort or store a request, or change
nothing but its speed."""
KEEP_CONTEXT = (
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
"""Of /v1/messages: nothing of the conversation is to be dropped."""
NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "Settings": {
        "add_special_tokens": (False,),
        "detokenize": (True,),
        "documents": ([],),
        "early_stopping": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    },
    "ResponsesBody": {
        "background": (False,),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    "MessagesBody": {"context_management": KEEP_CONTEXT},
    "CountTokensBody": {"context_management": KEEP_CONTEXT},
    "Thinking": {"display": ("summarized",)},
    "Message": {"thinking_blocks": ([],)},
}
"""By class and field: the values that ask for nothing."""


def changes_nothing(owner: str, name: str, value: object) -> bool:
    """Whether a field with this value means the same as none. owner: the class that gets it."""
    if name in UNUSED.get(owner, ()):
        return True
    neutral = NEUTRAL.get(owner, {}).get(name, ())
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def neutral_values(name: str) -> tuple[Any, ...]:
    """The values with which a field is accepted that this server does not act on; () for none."""
    return next((table[name] for table in NEUTRAL.values() if name in table), ())
