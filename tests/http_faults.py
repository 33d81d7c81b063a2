"""The faults of tests/mutants.py in what the API takes and how it answers.

What a fault is stands in tests/faults.py, and so do those of the settings that pick tokens.
"""

from __future__ import annotations

from tests.faults import BODIES, Fault

CLIENTS = "tests/actors/http/test_clients.py::test_"
PAGE = "tests/actors/http/test_page.py::test_"
DRAFT_INFO = "tests/actors/http/test_draft_info.py::test_"
FORMS = "tests/actors/http/test_forms.py::test_"
MIDDLEWARE = "tests/actors/http/test_middleware.py::test_"
SAMPLING, PROMPTS = "model/sampling.py", "actors/http/prompts.py"

HTTP_FAULTS = (
    Fault(
        "null is a value",
        BODIES,
        "if value is not None and (name",
        "if (name",
        CLIENTS + "null_is_absent_everywhere",
    ),
    Fault(
        "a field that asks for something is ignored with the unknown ones",
        "actors/http/parsing.py",
        ' and not neutral_values(str(problem["loc"][-1]))',
        "",
        CLIENTS + "unknown_fields_are_dropped_where_the_server_says_so",
    ),
    Fault(
        "instructions after the first turn are lost",
        "actors/http/chats.py",
        "[m.text for m in self.messages if m.role in INSTRUCTING]",
        "[m.text for m in self.messages[:2] if m.role in INSTRUCTING]",
        "tests/actors/http/test_bodies.py::test_all_instructions_are_one_system_message",
    ),
    Fault(
        "the least likely answers come back",
        "actors/http/requests.py",
        "key=mean_logprob, reverse=True",
        "key=mean_logprob",
        FORMS + "of_best_of_answers_the_likeliest_a_token_come_back",
    ),
    Fault(
        "a stop string is dropped though it is asked for",
        "actors/driver/stop_strings.py",
        "start + length if self._include",
        "start if self._include",
        FORMS + "what_ends_an_answer_belongs_to_it_where_asked",
    ),
    Fault(
        "ids that are not allowed keep their logits",
        SAMPLING,
        "-math.inf if sampling.allowed_ids else 0.0",
        "0.0",
        FORMS + "allowed_and_banned_ids_hold_for_drawn_tokens_on_any_number_of_ranks",
    ),
    Fault(
        "banned ids keep their logits",
        SAMPLING,
        "added |= dict.fromkeys(self._local(sampling.banned_ids), -math.inf)",
        "pass",
        FORMS + "bad_words_are_never_said",
    ),
    Fault(
        "a prompt is cut at its end",
        PROMPTS,
        "prompt[-kept:] if kept",
        "prompt[:kept] if kept",
        FORMS + "a_prompt_is_cut_at_its_beginning_where_asked",
    ),
    Fault(
        "priorities do not count",
        "actors/driver/scheduler.py",
        "return request.priority, request.number",
        "return 0, request.number",
        FORMS + "the_smallest_priority_gets_the_next_slot_and_equal_ones_go_in_turn",
    ),
    Fault(
        "white space that a template has stripped is put back",
        "model/chat.py",
        "if text.startswith(space, end) else text[:end]",
        "",
        FORMS + "the_last_message_is_left_open_where_it_is_continued",
    ),
    Fault(
        "the API's description needs no key",
        "actors/http/endpoints.py",
        'not keys if serve.docs == "auto"',
        'True if serve.docs == "auto"',
        MIDDLEWARE + "the_api_describes_itself_unless_there_are_keys",
    ),
    Fault(
        "a compressed body is read as JSON",
        "actors/http/middleware.py",
        'not in ("identity", "")',
        'in ("compress",)',
        MIDDLEWARE + "a_compressed_body_is_415_and_a_byte_order_mark_is_no_part_of_one",
    ),
    Fault(
        "every web page may read answers",
        "actors/http/middleware.py",
        "allow_origins=origins,",
        'allow_origins=("*",),',
        "tests/actors/http/test_cross_origin.py::test_every_kind_of_answer_can_be_read_by_a_named_origin_alone",
    ),
    Fault(
        "accepted drafts are told as the target's own tokens",
        "actors/driver/request.py",
        'DraftInfo(source="draft"',
        'DraftInfo(source="target"',
        DRAFT_INFO + "each_token_is_named_a_draft_or_the_targets_own[/v1/completions-90]",
    ),
    Fault(
        "a stream that tells of drafts ends more than once",
        "actors/driver/request.py",
        "is_last = self.finish is not None and self._num_taken == len(self.emitted)",
        "is_last = self.finish is not None",
        DRAFT_INFO + "a_stop_string_takes_its_tokens_with_it_and_the_text_stays",
    ),
    Fault(
        "what was said of a stopped answer is forgotten",
        "actors/conversation.py",
        "self.messages += [question, answer]",
        "pass",
        "tests/actors/test_chat.py::test_on_a_terminal_ctrl_c_stops_an_answer_and_keeps_what_was_said",
    ),
    Fault(
        "a model's text steers the terminal",
        "actors/chat.py",
        "piece.text.translate(SHOWN_CONTROLS)",
        "piece.text",
        "tests/actors/test_chat.py::test_a_models_text_cannot_steer_the_terminal",
    ),
    Fault(
        "the page may run any script",
        "actors/http/page.py",
        "f\"script-src {inline('script')}\"",
        "\"script-src 'unsafe-inline'\"",
        PAGE + "the_page_names_all_that_it_runs_and_takes_nothing_from_elsewhere",
    ),
    Fault(
        "the page cannot be left out",
        "actors/http/endpoints.py",
        "[(page.PATH, page.Page().response)] if self._serve.page else []",
        "[(page.PATH, page.Page().response)]",
        PAGE + "the_page_can_be_left_out",
    ),
    Fault(
        "offsets of an answer do not count the echo before it",
        "actors/http/responses.py",
        "offset = len(self._echo(index))",
        "pass",
        "tests/actors/http/test_scores.py::test_a_stream_tells_the_same_piece_by_piece",
    ),
    Fault(
        "log probabilities of an echo begin at its first token",
        "actors/driver/request.py",
        "[None] if asks else []",
        "[]",
        "tests/actors/http/test_scores.py::test_an_echo_is_scored_as_the_engine_scores_it[1-False]",
    ),
)
