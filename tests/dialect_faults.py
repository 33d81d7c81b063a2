"""The faults of tests/mutants.py in the doors beside completions and chats.

What a fault is stands in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import Fault

TOKENS = "tests/actors/http/test_tokens.py::test_"
RESPONSES = "tests/actors/http/test_responses_dialect.py::test_"
MESSAGES = "tests/actors/http/test_messages_dialect.py::test_"
BLOCKS = "tests/actors/http/test_dialect_tools.py::test_a_message_has_a_block_for_each_part[tags]"

DIALECT_FAULTS = (
    Fault(
        "special tokens lost on the way back to text",
        "actors/http/prompts.py",
        "ids, special=True)",
        "ids, special=False)",
        TOKENS + "a_prompt_becomes_the_ids_that_completions_make_of_it",
    ),
    Fault(
        "an id that the model lacks has no text",
        "actors/http/tokens.py",
        ") >= vocab_size:",
        ") < 0:",
        TOKENS + "what_cannot_be_tokenised_is_refused_by_name",
    ),
    Fault(
        "settings of tokens get lost on the way to the chat",
        "actors/http/dialects/body.py",
        "CommonFields.model_fields.keys() - said.keys()",
        "()",
        RESPONSES + "the_answer_is_that_of_a_chat_whole_and_streamed",
    ),
    Fault(
        "errors of a dialect name the fields of chats",
        "actors/http/endpoints.py",
        "raise error.renamed(kind.names)",
        "raise error",
        RESPONSES + "what_changes_no_text_is_accepted_and_errors_have_names_of_this_api",
    ),
    Fault(
        "a response cut by its limit is called completed",
        "actors/http/dialects/responses_writer.py",
        '"incomplete" if part.finish_reason == "length" else "completed"',
        '"completed"',
        RESPONSES + "a_stream_tells_each_item_from_its_beginning_to_its_end",
    ),
    Fault(
        "events of a stream carry the same number",
        "actors/http/dialects/responses_writer.py",
        "number, **fields})\n        self._num_events += 1",
        "number, **fields})\n        self._num_events += 0",
        RESPONSES + "a_stream_tells_each_item_from_its_beginning_to_its_end",
    ),
    Fault(
        "a thought, a text and calls of a reply are messages of their own",
        "actors/http/dialects/responses_body.py",
        'said[-1]["role"] != "assistant" or',
        "True or",
        RESPONSES + "items_become_the_messages_of_a_chat",
    ),
    Fault(
        "what a tool returned comes behind what the user says",
        "actors/http/dialects/messages_body.py",
        "[*returned, told]",
        "[told, *returned]",
        MESSAGES + "blocks_become_the_messages_of_a_chat",
    ),
    Fault(
        "any stop is told as the end of the turn",
        "actors/http/dialects/messages_writer.py",
        "elif part.stop_string is not None:",
        "elif False:",
        MESSAGES + "the_reason_of_an_end_is_told",
    ),
    Fault(
        "a call of a tool is told as the end of the turn",
        "actors/http/dialects/messages_writer.py",
        '"tool_use" if has_calls else',
        '"end_turn" if has_calls else',
        BLOCKS,
    ),
    Fault(
        "a call goes on in the item of the one before",
        "actors/http/dialects/responses_writer.py",
        'self._open("function_call", call_id',
        'self._pieces or self._open("function_call", call_id',
        "tests/actors/http/test_dialect_tools.py::test_a_response_has_an_item_for_each_part[tags]",
    ),
    Fault(
        "tokens of thoughts are not counted",
        "actors/http/reply_reader.py",
        "self._token_ids += part.token_ids",
        "pass",
        "tests/actors/http/test_dialect_tools.py::test_a_response_has_an_item_for_each_part[json]",
    ),
    Fault(
        "what another server has encrypted is taken for a thought",
        "actors/http/dialects/responses_body.py",
        "if kept.startswith(SEAL):",
        "if kept:",
        "tests/actors/http/test_dialect_tools.py::"
        "test_a_thought_that_clients_keep_unseen_comes_back",
    ),
    Fault(
        "an empty thought is a turn of its own",
        "actors/http/dialects/responses_body.py",
        'ReasoningItem(text=""):',
        'ReasoningItem(text="-"):',
        RESPONSES + "items_become_the_messages_of_a_chat",
    ),
    Fault(
        "a key in x-api-key is not taken",
        "actors/http/middleware.py",
        'headers.get(b"x-api-key", b"")',
        'b""',
        MESSAGES + "errors_have_the_form_of_this_api",
    ),
)
