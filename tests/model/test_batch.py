"""Lists of the host become tensors: padding, counts, and tensors that stay where graphs read them.

No model and no checkpoint: what a forward pass would be given is looked at as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.model.batch import BatchPacker, DecodeBatch
from outrider.model.config import RunConfig
from outrider.model.prefill import PaddedSpans, PromptSpan
from outrider.model.running import RunningRequest
from outrider.model.sampling import CAPTURED_FEATURES, NO_FEATURES, features_of
from outrider.model.step import MAX_LOGPROBS, Join, Sampling
from outrider.parallel.device import Capabilities, Device
from outrider.parallel.devices import open_device
from outrider.parallel.group import alone
from outrider.parallel.operands import SamplingFeatures

K, SLOTS, MAX_PAGES = 3, 5, 20
GREEDY = Sampling(max_tokens=64)
DRAWN = Sampling(max_tokens=64, temperature=0.7)
EVERYTHING = CAPTURED_FEATURES[2]


def packer(can: Capabilities | None = None, **changes: object) -> BatchPacker:
    keys: dict = {"model_dir": "", "draft_tokens": K, "max_slots": SLOTS, "page_tokens": 8}
    device: Device = open_device("cpu", 0, alone())
    device = replace(device, capabilities=can or device.capabilities)
    return BatchPacker(RunConfig(**{**keys, **changes}), device, MAX_PAGES)


def request(slot: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> RunningRequest:
    join = Join(slot=slot, request=slot, tokens=list(prompt), pages=[1] * 40, sampling=sampling)
    return RunningRequest(join, draft_tokens=K)


def decoding(slot: int, *, tokens: int, last_rows: int = K + 1, **keys: Sampling) -> RunningRequest:
    """A request that holds so many tokens; its last verify pass had last_rows rows."""
    made = request(slot, [1] * tokens, **keys)
    made.launch_prompt(tokens)
    made.in_flight, made.last_rows = 0, last_rows
    return made


def ints(tensor: Tensor | None) -> list | None:
    assert tensor is None or tensor.dtype == torch.int64
    return None if tensor is None else tensor.tolist()


def test_a_batch_has_the_rows_and_pages_that_its_requests_can_reach() -> None:
    requests = [decoding(4, tokens=30, last_rows=0), decoding(0, tokens=9, last_rows=2)]
    batch = packer().decode(requests, [2, 1], K)
    assert (ints(batch.slots), ints(batch.limits), batch.num_drafts) == ([4, 0], [2, 1], 2)
    assert (batch.max_kept, batch.max_fold) == (2, 2)
    assert batch.num_pages == 5  # 30 tokens and K + 1 rows, 8 a page
    assert (batch.features, batch.host_lengths) == (NO_FEATURES, None)


def test_results_in_flight_count_as_rows_that_may_be_there() -> None:
    late = decoding(0, tokens=30)
    late.in_flight = 2
    assert packer().decode([late], [K], K).num_pages == 6  # 30 and 3 times K + 1


def test_right_after_prefill_one_row_is_kept_and_none_is_folded() -> None:
    batch = packer().decode([decoding(1, tokens=8, last_rows=0)], [K], K)
    assert (batch.max_kept, batch.max_fold) == (1, 0)


def test_a_batch_is_padded_to_its_bucket_with_the_padding_slot() -> None:
    batch = packer(batch_buckets=(4, 8)).decode([decoding(2, tokens=8)], [K], K)
    assert (ints(batch.slots), ints(batch.limits)) == ([2, SLOTS, SLOTS, SLOTS], [K, 0, 0, 0])


def test_pinned_rows_are_k_plus_1_whatever_is_drafted() -> None:
    for can in (None, Capabilities(graphs=True)):
        batch = packer(can, pin_rows=True).decode([decoding(2, tokens=8)], [0], 0)
        assert batch.num_drafts == K


def test_without_graphs_a_batch_drafts_no_more_than_its_requests_take() -> None:
    pack, requests = packer(draft_tokens=16), [decoding(0, tokens=8), decoding(1, tokens=8)]
    for most in (0, 3, 11, 16):
        assert pack.decode(requests, [most, 0], 16).num_drafts == most


@pytest.mark.parametrize(
    ("settings", "features"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {"drawn"}),
        ({"temperature": 0.7, "top_k": 5}, {"drawn", "filtered"}),
        ({"temperature": 0.7, "top_p": 0.9}, {"drawn", "filtered"}),
        ({"temperature": 0.7, "min_p": 0.1}, {"drawn", "filtered"}),
        ({"top_k": 5, "top_p": 0.9}, {}),  # the likeliest token is always kept
        ({"presence_penalty": 1.0}, {"edited"}),
        ({"logit_bias": ((1, 1.0),), "logprobs": 0}, {"edited", "logprobs"}),
    ],
)
def test_a_batch_has_the_features_that_some_request_needs(settings: dict, features: set) -> None:
    one = decoding(1, tokens=8, sampling=Sampling(max_tokens=64, **settings))
    batch = packer().decode([decoding(0, tokens=8), one], [K, K], K)
    logprobs = MAX_LOGPROBS if "logprobs" in features else None
    flags = dict.fromkeys(set(features) - {"logprobs"}, True)
    assert batch.features == SamplingFeatures(**flags, logprobs=logprobs)


def test_host_lengths_say_how_far_each_pass_reaches() -> None:
    can = Capabilities(graphs=False, host_lengths=True)
    old, new = decoding(0, tokens=20), decoding(1, tokens=9, last_rows=0)
    old.kept, new.in_flight = 2, 1  # the first token of `new` is not read yet
    batch = packer(can, batch_buckets=(3,)).decode([old, new], [K, K], K)
    # Rows in the caches: 19 and 9. Pass 0 starts at the kept rows and is as wide as K + 1.
    assert batch.host_lengths == ([21, 12, 4], [20, 10, 1], [21, 11, 1], [23, 13, 4])


class TestCaptured:
    """Where graphs are captured, the tensors of a shape stay."""

    can = Capabilities(graphs=True, run_ahead=1)

    def test_a_batch_of_the_same_shape_is_the_same_with_new_values(self) -> None:
        pack = packer(self.can)
        first = pack.decode([decoding(0, tokens=9), decoding(3, tokens=9)], [K, 1], K)
        assert (ints(first.slots), ints(first.limits)) == ([0, 3], [K, 1])
        assert (first.max_kept, first.max_fold, first.num_pages) == (K + 1, K + 1, MAX_PAGES)
        second = pack.decode([decoding(4, tokens=50), decoding(1, tokens=7)], [0, 2], K)
        assert second is first
        assert (ints(first.slots), ints(first.limits)) == ([4, 1], [0, 2])
        assert pack.decode([decoding(0, tokens=9)], [K], K) is not first
        assert pack.decode([decoding(0, tokens=9)] * 2, [1, 1], 1) is not first

    def test_only_values_that_changed_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pack = packer(self.can)
        pack.decode([decoding(0, tokens=9)], [K], K)
        sent: list[Tensor] = []
        monkeypatch.setattr(Device, "send", lambda self, values: sent.append(values) or values)
        pack.decode([decoding(0, tokens=13)], [K], K)
        assert sent == []
        pack.decode([decoding(0, tokens=17)], [1], K)
        assert [values.tolist() for values in sent] == [[1]]

    def test_sizes_are_powers_of_two_and_the_number_of_slots(self) -> None:
        pack = packer(self.can)
        for count, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 5)):
            requests = [decoding(slot, tokens=9) for slot in range(count)]
            batch = pack.decode(requests, [K] * count, K)
            assert ints(batch.slots) == [*range(count), *[SLOTS] * (size - count)]

    @pytest.mark.parametrize(
        ("sampling", "features"),
        [
            (GREEDY, NO_FEATURES),
            (DRAWN, CAPTURED_FEATURES[1]),
            (Sampling(max_tokens=64, temperature=0.7, top_k=9), EVERYTHING),
            (Sampling(max_tokens=64, frequency_penalty=1.0), EVERYTHING),
            (Sampling(max_tokens=64, logprobs=0), EVERYTHING),
            (Sampling(max_tokens=64, logit_bias=((1, 1.0),), temperature=1.0), EVERYTHING),
        ],
    )
    def test_a_variant_includes_all_that_is_asked(
        self, sampling: Sampling, features: SamplingFeatures
    ) -> None:
        requests = [decoding(0, tokens=9), decoding(1, tokens=9, sampling=sampling)]
        batch = packer(self.can).decode(requests, [K, K], K)
        assert batch.features == features
        asked = features_of([sampling])
        for name in ("drawn", "filtered", "edited"):
            assert getattr(features, name) >= getattr(asked, name)
        assert asked.logprobs in (None, features.logprobs)

    @pytest.mark.parametrize("pin_rows", [False, True])
    def test_every_shape_that_a_batch_may_have_is_listed(self, pin_rows: bool) -> None:
        pack = packer(self.can, pin_rows=pin_rows)
        listed = list(pack.captured_batches())
        shapes = 4 * 3 * (1 if pin_rows else K + 1)  # sizes, variants, depths
        assert len({batch.key for batch in listed}) == len(listed) == shapes
        assert all(set(batch.slots.tolist()) == {SLOTS} for batch in listed)
        for count in range(1, SLOTS + 1):
            for sampling in (GREEDY, DRAWN, Sampling(max_tokens=64, logprobs=3)):
                for depth in range(K + 1):
                    requests = [decoding(slot, tokens=9) for slot in range(count - 1)]
                    requests.append(decoding(count - 1, tokens=9, sampling=sampling))
                    batch = pack.decode(requests, [0] * count, depth)
                    assert any(batch is known for known in listed)

    def test_the_depth_is_what_requests_may_take_not_what_their_ends_leave(self) -> None:
        pack, requests = packer(self.can), [decoding(0, tokens=9), decoding(1, tokens=9)]
        for depth in range(K + 1):
            assert pack.decode(requests, [0, 0], depth).num_drafts == depth

    @pytest.mark.parametrize(
        ("most", "depths"),
        [
            (0, [0]),
            (3, [0, 1, 2, 3]),
            (8, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
            (9, [0, 1, 2, 4, 8, 9]),
            (16, [0, 1, 2, 4, 8, 16]),
        ],
    )
    def test_a_bounded_number_of_depths_is_captured(self, most: int, depths: list[int]) -> None:
        pack = packer(self.can, draft_tokens=most)
        assert sorted({batch.num_drafts for batch in pack.captured_batches()}) == depths
        for wanted in range(most + 1):
            batch = pack.decode([decoding(0, tokens=9)], [wanted], wanted)
            assert batch.num_drafts == min(depth for depth in depths if depth >= wanted)

    def test_without_sampled_graphs_batches_that_sample_do_not_stay(self) -> None:
        pack = packer(Capabilities(graphs=True, host_lengths=True))
        assert {batch.features for batch in pack.captured_batches()} == {NO_FEATURES}
        requests = [decoding(0, tokens=9, sampling=DRAWN)]
        assert pack.decode(requests, [K], K) is not pack.decode(requests, [K], K)


def chunk_of(pack: BatchPacker, *spans: tuple[RunningRequest, int, int], width: int):
    return pack.prompt(PaddedSpans([PromptSpan(*span) for span in spans], width))


def test_prompt_tokens_are_padded_and_followed_by_the_next_ones() -> None:
    ends, goes_on = request(1, [5, 6, 7], DRAWN), request(4, [10, 11, 12, 13, 14, 15])
    chunk = chunk_of(packer(), (ends, 1, 3), (goes_on, 0, 4), width=4)
    assert ints(chunk.tokens) == [[6, 7, 0, 0], [10, 11, 12, 13]]
    assert ints(chunk.following) == [[7, 0, 0, 0], [11, 12, 13, 14]]
    assert (ints(chunk.slots), ints(chunk.first)) == ([1, 4], [1, 0])
    assert (ints(chunk.counts), ints(chunk.draft_counts)) == ([2, 4], [1, 4])
    assert ints(chunk.ends) == [0]
    assert chunk.num_pages == 1
    assert packer().first_features([DRAWN]) == SamplingFeatures(drawn=True)
    assert chunk_of(packer(), (goes_on, 0, 4), width=4).ends is None


def test_a_captured_chunk_stays_and_takes_new_values() -> None:
    pack = packer(Capabilities(graphs=True))
    first = pack.captured_prompt(chunk_of(pack, (request(0, [1, 2, 3]), 0, 2), width=4))
    second = pack.captured_prompt(chunk_of(pack, (request(2, [4, 5, 6, 7]), 1, 4), width=4))
    assert second is first
    assert (ints(first.tokens), ints(first.slots)) == ([[5, 6, 7, 0]], [2])
    assert (ints(first.first), ints(first.draft_counts)) == ([1], [2])
    assert (ints(first.ends), first.num_pages) == ([0], MAX_PAGES)


def test_host_lengths_of_a_prompt_are_its_own() -> None:
    pack = packer(Capabilities(host_lengths=True))
    assert chunk_of(pack, (request(0, [1] * 9), 4, 8), width=4).host_lengths == [8]


def test_batches_of_one_shape_have_one_key() -> None:
    pack = packer(Capabilities(graphs=True))
    batches: list[DecodeBatch] = list(pack.captured_batches())
    assert batches[0].key == (1, 0)
    assert batches[1].key == (1, 0, CAPTURED_FEATURES[1])
    assert batches[-1].key == (SLOTS, K, EVERYTHING)
