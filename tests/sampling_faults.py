"""The faults of tests/mutants.py in how tokens are picked: noise, kept sets, edits, grammars,
drafts that are drawn. Those of everything else, and what a fault is, stand in tests/faults.py.
"""

from __future__ import annotations

from tests.faults import EDITS, EXECUTOR, OPS, RUNNER, Fault

SAMPLING = "parallel/sampling.py"
NOISE = "tests/parallel/test_noise.py::test_"
PICKS = "tests/parallel/test_sampling.py::test_"
BY_HAND = PICKS + "tokens_are_those_picked_by_hand_on_any_number_of_ranks"
CHI_SQUARE = PICKS + "draws_have_the_probabilities_of_the_renormalised_softmax"
GRAMMARS, GRAMMAR = "tests/model/test_grammar.py::test_", "model/grammar.py"
SAMPLED = "tests/model/test_sampled.py::test_"

SAMPLING_FAULTS = (
    Fault(
        "seed ignored",
        "model/sampling.py",
        "(sampling.seed or 0, sampling.top_k",
        "(0, sampling.top_k",
        SAMPLED + "each_token_is_picked_by_hand_from_the_oracles_logits",
    ),
    Fault(
        "random number of another position",
        SAMPLING,
        "torch.arange(1, num_rows + 1, device=last.device)",
        "torch.arange(num_rows, device=last.device)",
        EDITS + "the_oracle_draws_the_same",
    ),
    Fault(
        "noise without the position",
        SAMPLING,
        "positions + 0x7F4A7C15)",
        "positions * 0 + 0x7F4A7C15)",
        NOISE + "noises_are_independent[neighbouring positions]",
    ),
    Fault(
        "noise without the upper half of the seed",
        SAMPLING,
        "(seeds >> 32) + 0x9E3779B9",
        "(seeds >> 63) + 0x9E3779B9",
        NOISE + "noises_are_independent[seeds that differ above 32 bits]",
    ),
    Fault(
        "noise of 24 bits",
        SAMPLING,
        "u = ((u + 0.5) * 2.0**-32)",
        "u = (((u * 2.0**-8).floor() + 0.5) * 2.0**-24)",
        NOISE + "a_row_of_equal_logits_draws_all_its_ids_alike",
    ),
    Fault(
        "a greedy row is drawn where another row is",
        OPS,
        "torch.where(by_slot.drawn[slots].unsqueeze(1), x + noise, x)",
        "x + noise",
        SAMPLED + "the_number_of_drafts_changes_no_text[3]",
    ),
    Fault(
        "drafts drawn with the noise of another position",
        EXECUTOR,
        "shift=len(drafts),",
        "shift=len(drafts) + 1,",
        "tests/test_acceptance.py::test_so_many_first_drafts_are_accepted[False-first0]",
    ),
    Fault(
        "one id too many kept",
        SAMPLING,
        "torch.minimum(count, known)",
        "torch.minimum(count + 1, known)",
        PICKS + "of_equal_logits_the_smallest_ids_are_kept[filters0-3-1]",
    ),
    Fault(
        "top_p counts what top_k cuts away",
        SAMPLING,
        "whole = torch.where(top_k > 0, in_limit, total)",
        "whole = total",
        CHI_SQUARE + "[{'top_k': 7, 'top_p': 0.85, 'min_p': 0.0}-64]",
    ),
    Fault(
        "candidates of the first rank only",
        SAMPLING,
        "merged = group.all_gather(offered)",
        "merged = group.all_gather(offered)[:1]",
        BY_HAND + "[top_k-flat]",
    ),
    Fault(
        "order of candidates trusted beyond what every rank offers",
        SAMPLING,
        "merged[..., -1].amax(0)",
        "merged[..., -1].amin(0)",
        PICKS + "any_row_is_picked_as_by_hand",
    ),
    Fault(
        "search for the end of the kept set off by one",
        SAMPLING,
        "_from_key_on(keys, sums, middle)) >= target",
        "_from_key_on(keys, sums, middle)) > target",
        PICKS + "of_equal_logits_the_smallest_ids_are_kept[filters1-90-1]",
    ),
    Fault(
        "search adds up this rank's mass alone",
        SAMPLING,
        "share_of(top_p, group.all_reduce(_from_key_on(keys, masses, by_limit)))",
        "share_of(top_p, _from_key_on(keys, masses, by_limit))",
        BY_HAND + "[many and top_p-flat]",
    ),
    Fault(
        "bias not reset when a slot is used again",
        "model/sampling.py",
        "table.fill_(filler)",
        "history.fill_(filler)",
        SAMPLED + "a_used_slot_forgets_how_its_last_tenant_picked[1]",
    ),
    Fault(
        "rejected drafts counted as part of the answer",
        EXECUTOR,
        "self._count_tokens(batch.slots, targets, kept)",
        "self._count_tokens(batch.slots, targets, torch.full_like(kept, targets.shape[1]))",
        EDITS + "on_equals_off_alone_and_in_a_batch[frequency-0.9]",
    ),
    Fault(
        "penalties do not see the drafts before a row",
        SAMPLING,
        "count = count + extra[..., :width]",
        "count = count + 0 * extra[..., :width]",
        SAMPLED + "forced_drafts_of_sampled_requests_are_counted_as_predicted[1-all]",
    ),
    Fault(
        "log probabilities of the edited distribution",
        OPS,
        "logits.flatten(0, 1), tokens, features.logprobs",
        "edited.flatten(0, 1), tokens, features.logprobs",
        EDITS + "log_probabilities_are_the_models_own_with_and_without_drafts[0.0]",
    ),
    Fault(
        "every row has the mask of the first",
        SAMPLING,
        "sampling.masks[slots, : logits.shape[1]]",
        "sampling.masks[slots, :1].expand(-1, logits.shape[1], -1)",
        GRAMMARS + "answers_are_valid_and_the_same_with_drafts[regex-0.0]",
    ),
    Fault(
        "first token without its mask",
        RUNNER,
        "self._allow(request, [], 0)",
        "pass",
        GRAMMARS + "answers_are_valid_and_the_same_with_drafts[regex-0.0]",
    ),
    Fault(
        "drafts that a grammar forbids are verified",
        RUNNER,
        "limits[index] = len(allowed)",
        "pass",
        GRAMMARS + "an_illegal_draft_is_cut_with_all_behind_it[1]",
    ),
    Fault(
        "what a grammar forces is left to the draft",
        GRAMMAR,
        "drafts[len(taken)] if forced is None else forced",
        "drafts[len(taken)]",
        GRAMMARS + "what_the_grammar_forces_is_accepted_as_a_whole",
    ),
    Fault(
        "grammar moved on by the first token of a step alone",
        "model/running.py",
        "request.matcher.commit(tokens)",
        "request.matcher.commit(tokens[:1])",
        GRAMMARS + "what_the_grammar_forces_is_accepted_as_a_whole",
    ),
    Fault(
        "an iteration does not wait for the first token of a request with a grammar",
        "model/running.py",
        "request.matcher is not None and request.in_flight",
        "False",
        GRAMMARS + "answers_are_valid_and_the_same_with_drafts[regex-0.0]",
    ),
    Fault(
        "steps of requests with grammars are read late",
        RUNNER,
        "(0 if self.slots.constrained else self.run_ahead)",
        "self.run_ahead",
        GRAMMARS + "where_nothing_may_run_ahead_each_step_brings_tokens",
    ),
    Fault(
        "a grammar looks ahead with the matcher of its request",
        GRAMMAR,
        "self._matcher.deep_copy(), []",
        "self._matcher, []",
        GRAMMARS + "an_illegal_draft_is_cut_with_all_behind_it[3]",
    ),
    Fault(
        "drafts do not count for what completes a banned sequence",
        "model/banned.py",
        "            tokens.append(draft)\n",
        "",
        "tests/actors/http/test_forms.py::test_words_of_several_tokens_are_never_said",
    ),
    Fault(
        "a banned sequence forgets what a request said before it came back",
        "model/banned.py",
        "self._tokens = self._ends(emitted)",
        "self._tokens = self._ends([])",
        "tests/model/test_banned.py::test_a_token_is_banned_where_it_would_complete_a_sequence",
    ),
    Fault(
        "an id that a request names counts on every rank",
        "parallel/sampling.py",
        "local.clamp(0, width - 1)].masked_fill(~mine, 0.0)",
        "local.clamp(0, width - 1)]",
        "tests/model/test_edits.py::test_log_probabilities_of_ids_that_are_named[2]",
    ),
    Fault(
        "log probabilities of a prompt are those of the rows' own tokens",
        "model/runner.py",
        "chunk.following[index, :count]",
        "chunk.tokens[index, :count]",
        "tests/model/test_prompt_scores.py::test_they_are_those_of_transformers[1-16-3]",
    ),
)
