"""The Python API over real ranks: answers, streams, refusals, deaths, and what is left after."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from outrider.actors import cli
from outrider.actors.engine import Engine, RequestStats, _as_prompts, _as_samplings
from outrider.actors.errors import EngineClosedError, RequestError
from outrider.actors.options import USER_ERROR
from outrider.benchmarks import planted
from outrider.model.config import ConfigError
from outrider.model.step import Sampling
from tests.actors.footprint import Footprint, held_cpus, wait_until_free
from tests.conftest import RunningCluster

CHAIN = planted.chain(planted.SIZES["tiny"]["vocab_size"], 0.8425, 0)


def start(model: Path, **changes: object) -> Engine:
    return Engine.from_config(None, model=str(model), max_model_len=512, draft_tokens=5, **changes)


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Children that this process has before the engine starts."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="module")
def engine(planted_tiny: Path, others: set[int]) -> Iterator[Engine]:
    """Two CPU ranks in a private cluster, shared by the tests of this module."""
    with start(planted_tiny) as engine:
        yield engine


def assert_counts(stats: RequestStats, expected: planted.Expected) -> None:
    """The request's counters are those that the chain predicts."""
    assert stats.iterations == expected.iterations
    assert stats.drafted == expected.drafted
    assert stats.accepted == expected.accepted
    assert stats.accepted_per_position == expected.accepted_per_position


def rank_pids(engine: Engine) -> list[int]:
    return [rank["pid"] for rank in engine.stats()["ranks"]]


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one text", ["one text"]),
        ([1, 2], [[1, 2]]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([(1, 2), (3,)], [[1, 2], [3]]),
        ([], [[]]),
    ],
)
def test_a_prompt_is_text_or_ids_and_may_come_alone(given: Any, prompts: list[Any]):
    assert _as_prompts(given) == prompts


def test_ids_do_not_mix_with_whole_prompts():
    with pytest.raises(RequestError, match="mix token ids"):
        _as_prompts([1, "a"])  # type: ignore[list-item]


def test_one_sampling_serves_all_or_each_has_its_own():
    one, other = Sampling(seed=1), Sampling(seed=2)
    assert _as_samplings(one, 2) == [one, one]
    assert _as_samplings([one, other], 2) == [one, other]
    assert _as_samplings(None, 1) == [Sampling()]
    with pytest.raises(RequestError, match="2 samplings for 3 prompts"):
        _as_samplings([one, other], 3)


def test_mistakes_are_told_before_ray_starts(no_cluster: None, tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        start(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="draft_tokens"):
        Engine.from_config(None, model=str(tmp_path), draft_tokenz=3)
    assert not ray.is_initialized()


@pytest.mark.ray
def test_two_ranks_print_the_chain_with_the_known_acceptance(engine: Engine):
    (completion,) = engine.generate([5, 9, 17], Sampling(max_tokens=60))
    expected = planted.expected_counts(CHAIN, 17, 60, draft_tokens=5)
    assert completion.token_ids == expected.tokens
    assert_counts(completion.stats, expected)


@pytest.mark.ray
def test_a_ragged_batch_beyond_the_slots_is_answered_in_order(engine: Engine):
    prompts = [[3 + i] * (1 + 7 * i % 40) for i in range(12)]
    samplings = [Sampling(max_tokens=1 + 3 * i, ignore_eos=True) for i in range(12)]
    done = engine.generate(prompts, samplings)
    for i, completion in enumerate(done):
        expected = planted.expected_counts(CHAIN, 3 + i, 1 + 3 * i, draft_tokens=5)
        assert completion.prompt_ids == prompts[i]
        assert completion.token_ids == expected.tokens
        assert_counts(completion.stats, expected)


@pytest.mark.ray
def test_any_number_of_prompts_may_come_and_each_answer_as_soon_as_it_is_there(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than a server's queue takes. The long one comes first and is answered last."""
    assert engine.spec.limits.max_queue < 1500
    prompts = [[3 + i % 90] for i in range(1500)]
    samplings = [Sampling(max_tokens=400 if i == 0 else 2, ignore_eos=True) for i in range(40)]
    came = list(engine.as_completed(prompts[:40], samplings))
    assert sorted(index for index, _ in came) == [*range(40)]
    assert came[0][0] != 0
    assert came[-1][0] == 0
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    done = engine.generate(prompts, Sampling(max_tokens=2, ignore_eos=True))
    assert [one.prompt_ids for one in done] == prompts
    assert all(len(one.token_ids) == 2 for one in done)
    assert done[0].token_ids == planted.expected_counts(CHAIN, 3, 2, draft_tokens=5).tokens
    shown = terminal.getvalue()
    assert "answering" in shown
    assert "1.50k/1.50k" in shown
    iterator = engine.as_completed(prompts[:4], Sampling(max_tokens=400, ignore_eos=True))
    next(iterator)
    iterator.close()
    assert engine.generate([5, 9], Sampling(max_tokens=1))


@pytest.mark.ray
def test_a_stream_yields_the_same_tokens_in_several_chunks(engine: Engine):
    chunks = list(engine.stream([5, 9, 17], Sampling(max_tokens=60)))
    (whole,) = engine.generate([5, 9, 17], Sampling(max_tokens=60))
    assert len(chunks) > 3
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.accepted == whole.stats.accepted


@pytest.mark.ray
def test_a_dropped_stream_ends_its_request(engine: Engine):
    before = engine.stats()["requests_aborted"]
    stream = engine.stream([5], Sampling(max_tokens=500))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while engine.stats()["requests_aborted"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stats = engine.stats()
    assert (stats["active"], stats["queued"]) == (0, 0)
    assert stats["free_pages"] == stats["num_pages"] - 1


@pytest.mark.ray
def test_ctrl_c_ends_within_an_iteration_what_generate_waits_for(engine: Engine):
    before = engine.stats()

    def press() -> None:
        while engine.stats()["iterations"] < before["iterations"] + 12:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5], [9], [17]], Sampling(max_tokens=480, ignore_eos=True))
    thread.join()
    deadline = time.monotonic() + 5
    while (stats := engine.stats())["requests_aborted"] < before["requests_aborted"] + 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert (stats["active"], stats["queued"]) == (0, 0)
    assert stats["free_pages"] == stats["num_pages"] - 1
    time.sleep(0.5)
    later = engine.stats()
    assert later["steps"] - stats["steps"] <= 1  # the one that was under way
    assert later["tokens"] - before["tokens"] < 3 * 480


IMPOSSIBLE = [
    ("some text", "no tokenizer"),
    ([4000], r"prompt token 4000 at index 0.*\[0, 1024\)"),
    ([1] * 512, "512 tokens, 1 too many.*limits.max_model_len"),
]


@pytest.mark.ray
@pytest.mark.parametrize(("prompt", "says"), [([], "the prompt is empty"), *IMPOSSIBLE])
def test_a_request_that_cannot_run_is_refused_in_one_line(engine: Engine, prompt: Any, says: str):
    with pytest.raises(RequestError, match=says) as caught:
        engine.generate(prompt)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(RequestError, match=says):
        next(engine.stream(prompt))


@pytest.mark.ray
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("prompt", "says"), IMPOSSIBLE)
def test_the_command_refuses_it_with_exit_code_2(
    engine: Engine,
    prompt: Any,
    says: str,
    as_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    """`outrider generate` on the running engine."""
    monkeypatch.setattr(Engine, "from_config", lambda *_, **__: nullcontext(engine))
    ids = ["--prompt-ids", ",".join(map(str, prompt))]
    words = ["--prompt", prompt] if isinstance(prompt, str) else ids
    assert cli.main(["generate", *words, *(["--json"] if as_json else [])]) == USER_ERROR
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(f"error: .*{says}.*\n", err)


@pytest.mark.ray
def test_the_engine_counts_what_its_requests_counted(engine: Engine):
    before = engine.stats()
    done = engine.generate([[7], [8]], Sampling(max_tokens=20))
    after = engine.stats()
    for name in ("iterations", "drafted", "accepted"):
        assert after[name] - before[name] == sum(getattr(c.stats, name) for c in done)
    assert after["tokens"] - before["tokens"] == 40
    assert len(after["ranks"]) == 2


@pytest.mark.ray
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 CPUs to split")
def test_every_thread_of_a_rank_is_pinned_to_its_cpus_at_nice_0(engine: Engine):
    ranks = engine.stats()["ranks"]
    assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"])
    for rank in ranks:
        threads = [int(task) for task in os.listdir(f"/proc/{rank['pid']}/task")]
        assert len(threads) > 5
        pinned = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
        assert pinned == {frozenset(rank["cpus"])}
        assert rank["nice"] == 0


@pytest.mark.ray
def test_the_driver_starts_without_torch(engine: Engine):
    """It takes seconds to import and 200 MB, and the driver computes nothing."""
    driver, rank = engine.stats()["driver"]["pid"], rank_pids(engine)[0]
    assert "libtorch" in Path(f"/proc/{rank}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{driver}/maps").read_text()


@pytest.mark.ray
def test_an_idle_engine_uses_under_2_percent_of_a_core(engine: Engine):
    """Ranks and driver together. Each holds its worker's main thread, so nothing of Ray polls."""
    pids = [*rank_pids(engine), engine.stats()["driver"]["pid"]]
    windows = []
    while len(windows) < 15 and min(windows, default=1.0) >= 0.02:
        # What else runs on the machine may disturb a window; an engine that polls fills them all.
        before = sum(map(cpu_s, pids))
        time.sleep(2)
        windows.append((sum(map(cpu_s, pids)) - before) / 2)
    assert min(windows) < 0.02, windows


@pytest.mark.ray
@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([["x"]], Sampling()), ([1.5], Sampling()), ([1], Sampling(max_tokens=2.5))],  # type: ignore[arg-type]
)
def test_a_request_of_wrong_types_is_refused_and_harms_nobody(
    engine: Engine, prompt: Any, sampling: Sampling
):
    with pytest.raises(RequestError):
        engine.generate(prompt, sampling)
    assert engine.generate([5], Sampling(max_tokens=2))


@pytest.mark.ray
def test_calls_from_many_threads_share_one_line(engine: Engine):
    def one(start: int) -> list[int]:
        how = Sampling(max_tokens=30, ignore_eos=True)
        if start % 2:
            chunks = engine.stream([start], how)
            return [token for chunk in chunks for token in chunk.token_ids]
        return engine.generate([start], how)[0].token_ids

    with ThreadPoolExecutor(16) as pool:
        outputs = list(pool.map(one, range(3, 35)))
    for start, tokens in zip(range(3, 35), outputs, strict=True):
        assert tokens == planted.expected_counts(CHAIN, start, 30, draft_tokens=5).tokens


@pytest.mark.ray
def test_after_close_nothing_is_left_and_a_call_says_so(engine: Engine, others: set[int]):
    children = {child.pid for child in psutil.Process().children()} - others
    footprint = Footprint.of(*children)
    assert {*rank_pids(engine), engine.stats()["driver"]["pid"]} < footprint.pids
    assert any(path.parent.name.startswith("outrider-") for path in footprint.files)
    assert any(path.parent == Path("/dev/shm") for path in footprint.files)
    engine.close()
    assert not ray.is_initialized()
    footprint.wait_until_gone()
    with pytest.raises(EngineClosedError):
        engine.generate([1])
    engine.close()


@pytest.mark.ray
def test_inside_a_cluster_the_engine_takes_bundles_and_gives_them_back(
    cluster: RunningCluster, planted_tiny: Path
):
    @ray.remote(num_cpus=1)
    def job(model: str) -> tuple[list[int], dict[str, Any]]:
        with Engine.from_config(None, model=model, draft_tokens=2) as engine:
            (completion,) = engine.generate([5], Sampling(max_tokens=9))
            return completion.token_ids, placement_group_table()

    before = held_cpus(placement_group_table())
    tokens, during = ray.get(job.remote(str(planted_tiny)))
    assert tokens == planted.expected_counts(CHAIN, 5, 9, draft_tokens=2).tokens
    assert held_cpus(during) == before + 3
    assert held_cpus(placement_group_table()) == before
    wait_until_free("CPU", ray.cluster_resources()["CPU"] - before)
    assert ray.is_initialized()


@pytest.mark.ray
def test_ranks_without_their_device_end_the_start_with_the_reason(
    cluster: RunningCluster, planted_tiny: Path
):
    """The NPUs are emulated: placed they are, opened they cannot be."""
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^rank \d: .*npu") as caught:
        start(planted_tiny, device="npu", collective="gloo")
    assert time.monotonic() - started < 60
    assert "Traceback" not in str(caught.value)
    wait_until_free("NPU", 2)
