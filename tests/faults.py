"""The faults of tests/mutants.py: what each is, where it is planted, and the tests that find it.

`text` must be in its file exactly once (tests/test_mutants.py), and is as short as that allows. A
line that is to go away becomes one that does nothing. Those of how tokens are picked stand in
tests/sampling_faults.py, those of experts and of how weights are read in tests/loading_faults.py,
those of what a checkpoint's small files say in tests/checkpoint_faults.py.
"""

from __future__ import annotations

from dataclasses import dataclass

OPS, EXECUTOR, RUNNER = "parallel/ops.py", "model/executor.py", "model/runner.py"
SLOTS, RUNNING, BODIES = "model/slots.py", "model/running.py", "actors/http/bodies.py"
STOPS, REQUEST = "actors/driver/stop_strings.py", "actors/driver/request.py"


def speculation(name: str) -> str:
    return f"tests/model/test_speculation.py::test_{name}"


def drafts(name: str) -> str:
    return f"tests/model/test_drafts.py::test_{name}"


FOLLOW = drafts("drafts_follow_from_the_text_alone[1-local]")
USED_SLOT = speculation("a_used_slot_forgets_its_last_tenant")
KEPT_IN_PART = speculation("forced_drafts_are_counted_as_predicted[3-uneven]")
RAGGED = speculation("ranks_and_draft_homes_agree_in_ragged_batches[2-3-local]")
DEPTH = "tests/model/test_own_depth.py::test_"
OWN_TABLES = "tests/model/test_mtp.py::test_a_draft_with_tables_of_its_own_uses_them[True-2]"
PARAMETERS = (
    "tests/actors/http/test_parameters.py::"
    "test_a_parameter_means_what_it_means_to_the_engine[False]"
)
CHOICES = (
    "tests/actors/http/test_parameters.py::"
    "test_choices_draw_with_their_own_seeds_and_report_raw_probabilities[False]"
)
PINNED = "tests/model/test_pinned_rows.py::test_"
EDITS = "tests/model/test_edits.py::test_"
LOOKUP = "tests/model/test_lookup.py::test_"


@dataclass(frozen=True)
class Fault:
    """`text` of `file` becomes `becomes`; `test` turns red."""

    name: str
    file: str
    text: str
    becomes: str
    test: str


FAULTS = (
    # States, caches and positions
    Fault(
        "delta-net state not advanced while decoding",
        "model/gdn.py",
        "rows.fold, rows.max_fold)",
        "rows.fold, 0)",
        KEPT_IN_PART,
    ),
    Fault(
        "delta-net state folded with one row less than was kept",
        OPS,
        "memory.fold[slots] = kept",
        "memory.fold[slots] = kept - 1",
        KEPT_IN_PART,
    ),
    Fault(
        "states not reset when a slot is used again",
        RUNNER,
        "self.executor.states.reset(command.slot)",
        "pass",
        USED_SLOT,
    ),
    Fault(
        "conv window not reset when a slot is used again",
        "model/cache.py",
        "return [self.state, self.factors, self.conv]",
        "return [self.state, self.factors]",
        USED_SLOT,
    ),
    Fault(
        "conv window one row early in a verify pass",
        OPS,
        "layer.conv.shape[1] + fold)",
        "layer.conv.shape[1] + (fold - 1).clamp(min=0))",
        KEPT_IN_PART,
    ),
    Fault(
        "conv window lost at the border of a prompt chunk",
        OPS,
        "layer.conv[:, :before].index_select(0, slots), u)",
        "layer.conv.new_zeros(len(slots), before, u.shape[-1]), u)",
        speculation("off_equals_transformers"),
    ),
    Fault(
        "KV length not rewound past rejected rows",
        OPS,
        "memory.length[slots] += kept",
        "memory.length[slots] += rows",
        KEPT_IN_PART,
    ),
    Fault(
        "page table of another slot of the batch",
        OPS,
        "table=table[slots],",
        "table=table[slots.roll(1)],",
        RAGGED,
    ),
    Fault(
        "keys beyond a slot's length are read",
        OPS,
        "| stale.unsqueeze(1)",
        "",
        "tests/parallel/test_ops.py::test_attention_reads_only_its_own_keys",
    ),
    Fault(
        "rotary position off by one in a verify pass",
        OPS,
        "cos[positions].unsqueeze(2), sin[positions]",
        "cos[positions + more].unsqueeze(2), sin[positions + more]",
        speculation("off_equals_transformers"),
    ),
    # Drafts
    Fault(
        "draft's keys and values not refreshed after verification",
        EXECUTOR,
        "        hidden = self.draft(gathered.hidden, gathered.fresh, rows)\n",
        "        stale = torch.arange(batch.max_kept) < gathered.kept.unsqueeze(1) - 1\n"
        "        rows.kv_index.masked_fill_(stale, 0)\n"
        "        hidden = self.draft(gathered.hidden, gathered.fresh, rows)\n",
        FOLLOW,
    ),
    Fault(
        "draft fed the hiddens of the pass before",
        OPS,
        "memory.hidden[slots, :rows] = hidden",
        "pass",
        FOLLOW,
    ),
    Fault(
        "draft continues from the first kept row instead of the last",
        EXECUTOR,
        "last = (gathered.kept - 1)",
        "last = (gathered.kept * 0)",
        FOLLOW,
    ),
    Fault(
        "draft has not seen the prompt",
        EXECUTOR,
        "        self.draft.write_kv(hidden, chunk.following, rows)\n",
        "",
        FOLLOW,
    ),
    Fault(
        "position of a later draft off by one",
        EXECUTOR,
        "shift=i - 1,",
        "shift=i,",
        FOLLOW,
    ),
    Fault(
        "draft's input in the wrong order: hidden before embedding",
        OPS,
        "torch.cat((left, self.rms_norm(hidden, hidden_scale, eps)), -1)",
        "torch.cat((self.rms_norm(hidden, hidden_scale, eps), left), -1)",
        "tests/model/test_mtp.py::test_draft_equals_reference_in_one_pass_and_in_rows",
    ),
    Fault(
        "draft's norms swapped",
        "model/mtp.py",
        "hidden, e.scale, n.scale, e.eps",
        "hidden, n.scale, e.scale, e.eps",
        "tests/model/test_mtp.py::test_draft_equals_reference_in_one_pass_and_in_rows",
    ),
    Fault(
        "draft's own embedding table replaced by the target's",
        EXECUTOR,
        'table, group = tensors["embed_tokens.weight"], self.device.tp',
        "group = self.device.tp",
        OWN_TABLES,
    ),
    Fault(
        "draft head's share cut for another rank",
        EXECUTOR,
        "head_share(table, group.rank, group.size)",
        "head_share(table, group.size - 1 - group.rank, group.size)",
        OWN_TABLES,
    ),
    Fault(
        "draft head not rounded where fp8 is asked for",
        EXECUTOR,
        'Fp8Head(head) if self.run.draft_head == "fp8" else head',
        "head",
        drafts("a_rounded_draft_head_changes_drafts_and_no_token[1]"),
    ),
    Fault(
        "backlog not caught up with",
        RUNNER,
        "            drafter.catch_up(batch, 1 << (lag - 1).bit_length())\n",
        "",
        "tests/model/test_backlog.py::test_later_drafts_are_the_same[now and then-keys0]",
    ),
    # What is kept, and where an answer ends
    Fault(
        "drafts kept beyond a request's own limit",
        OPS,
        "targets[:, :num_drafts]) & offered",
        "targets[:, :num_drafts])",
        speculation("slots_with_their_own_k_share_a_batch"),
    ),
    Fault(
        "drafts kept behind a wrong one",
        OPS,
        ".cumprod(1).sum(1)",
        ".sum(1)",
        KEPT_IN_PART,
    ),
    Fault(
        "stop id at a draft's position ignored",
        RUNNING,
        "if t in join.end_ids)",
        "if t in join.end_ids and i + 1 == len(tokens))",
        speculation("a_stop_id_ends_at_every_draft_position[3]"),
    ),
    Fault(
        "answer goes past max_tokens",
        RUNNING,
        "        tokens = tokens[: request.remaining]\n",
        "",
        "tests/test_latency.py::test_counts_are_computed_for_devices_that_run_ahead[4-1]",
    ),
    Fault(
        "a request leaves for another one's Leave",
        RUNNING,
        "present is not None and present.join.request == request",
        "present is not None",
        speculation("launching_ahead_of_the_results_changes_nothing[1]"),
    ),
    Fault(
        "stop string across two steps not found",
        STOPS,
        "max(0, before - len(s) + 1)",
        "before",
        "tests/actors/driver/test_stop_strings.py::"
        "test_text_ends_before_the_stop_string_that_is_complete_first",
    ),
    Fault(
        "beginning of a stop string shown before it is decided",
        STOPS,
        "len(self._held) - max(map(self._num_begun, self._stops))",
        "len(self._held)",
        "tests/actors/driver/test_stop_strings.py::"
        "test_text_ends_before_the_stop_string_that_is_complete_first",
    ),
    Fault(
        "drafts behind an answer's end counted as accepted",
        REQUEST,
        "accepted=min(progress.accepted, count)",
        "accepted=progress.accepted",
        "tests/actors/driver/test_scheduler.py::test_drafts_behind_the_end_are_not_accepted_ones",
    ),
    # Ranks
    Fault(
        "ties go to the larger id across ranks",
        OPS,
        "winner = (values == values.amax(0, keepdim=True)).to(torch.int8).argmax(0, keepdim=True)",
        "best = (values == values.amax(0, keepdim=True)).to(torch.int8).flip(0)\n"
        "        winner = len(values) - 1 - best.argmax(0, keepdim=True)",
        speculation("ties_go_to_the_smallest_id_on_every_rank"),
    ),
    Fault(
        "parts of ranks gathered in another order",
        "parallel/group.py",
        "[t for t in self._table if",
        "[t for t in self._table[::-1] if",
        speculation("ties_go_to_the_smallest_id_on_every_rank"),
    ),
    Fault(
        "every rank scores the first rank's share of the vocabulary",
        EXECUTOR,
        "head_share(table, rank, size)",
        "head_share(table, 0, size)",
        "tests/model/test_oracle.py::test_prefill_equals_transformers[tied-2]",
    ),
    # Depth
    Fault(
        "a batch whose requests all want fewer drafts runs the engine's K",
        RUNNER,
        "depth = min(self.depth, max(r.draft_tokens for r in requests))",
        "depth = self.depth",
        DEPTH + "a_batch_runs_as_deep_as_its_deepest_request_to_the_end[1]",
    ),
    Fault(
        "captured iterations get shallower near the ends of answers",
        "model/batch.py",
        "wanted = depth if can.graphs else max(limits)",
        "wanted = max(limits)",
        DEPTH + "a_batch_runs_as_deep_as_its_deepest_request_to_the_end[2]",
    ),
    Fault(
        "rows of requests without drafts wait for the draft",
        RUNNER,
        "[r for r in requests if r.draft_tokens]",
        "requests",
        DEPTH + "nobody_waits_for_drafts_that_a_request_never_takes",
    ),
    Fault(
        "auto tries a depth that never runs for ever",
        "actors/ranks/depth.py",
        "if (size, k) not in self._tried_at]",
        "if (size, k) not in self._seconds]",
        "tests/actors/ranks/test_depth.py::"
        "test_a_depth_that_never_runs_is_no_reason_to_choose_it_for_ever[0.0-0]",
    ),
    # Pinned rows
    Fault(
        "rows not pinned",
        "model/batch.py",
        "    if run.pin_rows:\n        return (run.draft_tokens,)",
        "    if False:\n        return (run.draft_tokens,)",
        PINNED + "passes_have_all_rows_and_all_pages_with_and_without_drafts",
    ),
    Fault(
        "pinned rows fold delta-net states in groups",
        RUNNER,
        "rows_in_turn=run.pin_rows",
        "rows_in_turn=False",
        PINNED + "in_bfloat16_tokens_are_the_same_with_and_without_drafts",
    ),
    Fault(
        "rows that run in turn fold in groups",
        OPS,
        "step = 1 if layer.rows_in_turn else num_rows",
        "step = num_rows",
        "tests/parallel/test_ops.py::"
        "test_delta_net_rows_in_turn_are_the_same_bits_in_whatever_pass[groups0]",
    ),
    # The API
    Fault("top_p ignored", BODIES, '"top_p", ', "", PARAMETERS),
    Fault("presence_penalty ignored", BODIES, '"presence_penalty", ', "", PARAMETERS),
    Fault(
        "repetition_penalty ignored",
        BODIES,
        '"repetition_penalty", "ignore_eos"',
        '"ignore_eos",',
        PARAMETERS,
    ),
    Fault(
        "ignore_eos ignored",
        BODIES,
        '"repetition_penalty", "ignore_eos"',
        '"repetition_penalty",',
        PARAMETERS,
    ),
    Fault(
        "logit_bias ignored",
        BODIES,
        "(self.logit_bias or {}).items()",
        "{}.items()",
        PARAMETERS,
    ),
    Fault(
        "min_tokens ignored",
        BODIES,
        '"min_tokens": min(self.min_tokens, max_tokens)',
        '"min_tokens": 0',
        PARAMETERS,
    ),
    Fault(
        "stop_token_ids ignored",
        BODIES,
        '"stop_ids": tuple(self.stop_token_ids or ())',
        '"stop_ids": ()',
        PARAMETERS,
    ),
    Fault(
        "stop ignored",
        "actors/http/answering.py",
        "stop=body.stops",
        "stop=()",
        PARAMETERS,
    ),
    Fault(
        "all choices draw with one seed",
        BODIES,
        "(first + i) & MAX_SEED",
        "first",
        CHOICES,
    ),
    # Drafts by looking
    Fault(
        "looking takes the first of equally long matches",
        "model/lookup.py",
        "tokens.shape[1] + position).argmax",
        "tokens.shape[1] - position).argmax",
        LOOKUP + "the_latest_of_the_longest_matches_is_found[3]",
    ),
    Fault(
        "kept tokens are remembered one position too early",
        EXECUTOR,
        "self.history.write(batch.slots, gathered.start + 1,",
        "self.history.write(batch.slots, gathered.start,",
        LOOKUP + "depths_that_change_leave_no_gap_in_what_is_remembered",
    ),
    Fault(
        "iterations without drafts remember nothing",
        EXECUTOR,
        "self.history.write(batch.slots, gathered.start + 1, gathered.fresh, gathered.kept)",
        "batch.num_drafts and self.history.write("
        "batch.slots, gathered.start + 1, gathered.fresh, gathered.kept)",
        LOOKUP + "depths_that_change_leave_no_gap_in_what_is_remembered",
    ),
    Fault(
        "what was found is not repeated from the last token on",
        "model/lookup.py",
        "best + 1 + ahead % period",
        "best + 1 + ahead",
        LOOKUP + "the_latest_of_the_longest_matches_is_found[3]",
    ),
)
