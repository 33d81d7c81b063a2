"""`outrider bench`: what its numbers mean, which engines it starts, and one run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.actors import cli
from outrider.actors.options import USER_ERROR
from outrider.benchmarks import host, latency, oracle, planted, report, traffic
from outrider.model.config import ConfigError
from outrider.model.step import Sampling
from tests.conftest import RunningCluster
from tests.ranks import Team


def answer(started_s: float, stamps: list[tuple[float, int]]) -> oracle.Answer:
    pieces = [(at, at / 2, count) for at, count in stamps]
    tokens = [0] * sum(count for _, count in stamps)
    return oracle.Answer(
        prompt=[0], seed=0, tokens=tokens, started_s=started_s, pieces=pieces, server={}
    )


def test_a_piece_of_n_tokens_counts_as_n_latencies() -> None:
    times = latency.times_of([(1.0, 1), (1.3, 3), (1.5, 1)])
    assert times.e2e == 1.5
    assert times.ttft == 1.0
    assert times.tpot == pytest.approx(0.5 / 4)
    assert times.itl == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_tokens_of_the_first_piece_cost_no_time_after_it() -> None:
    """A piece may bring the first token and an iteration: TPOT is of what followed."""
    assert latency.times_of([(1.0, 4), (2.0, 2)]).tpot == pytest.approx(0.5)
    assert latency.times_of([(1.0, 4)]).tpot == 0.0


def test_server_and_client_times_are_kept_apart() -> None:
    ends = latency.both_ends([answer(0.0, [(0.2, 1), (0.4, 2)])])
    assert ends["client"]["ttft_ms"]["mean"] == pytest.approx(200)
    assert ends["server"]["ttft_ms"]["mean"] == pytest.approx(100)
    assert ends["client"]["itl_ms"]["p99"] == pytest.approx(100)


def test_decode_speed_counts_only_when_all_of_a_batch_decode() -> None:
    """Both decode from 1.0 to 1.5: five tokens of the first come then, ten of the second."""
    first = answer(0.0, [(0.5, 1), (0.9, 1), (1.2, 2), (1.5, 3)])
    second = answer(0.5, [(0.5, 4), (0.8, 10), (2.0, 100)])
    assert latency.decode_rate([first, second], 2) == pytest.approx(15 / 0.5, rel=1e-3)
    assert latency.decode_rate([first], 2) is None


def test_numbers_are_lists_and_ranges() -> None:
    assert latency.parse_numbers("0..3,5", "--k", 0, 16) == [0, 1, 2, 3, 5]
    assert latency.parse_numbers("1,2,2", "--batch", 1, 9) == [1, 2]


@pytest.mark.parametrize("text", ["", "a", "3..1", "17", "1,,2"])
def test_numbers_out_of_place_name_the_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"--k .*from 0 to 16"):
        latency.parse_numbers(text, "--k", 0, 16)


def test_ablation_undoes_changes_cumulatively_and_one_by_one() -> None:
    engines, skipped = latency.ablation({"model": "m"}, "cuda")
    old = [{key for key in one.keys if key != "model"} for one in engines]
    four = [set(keys) for keys in latency.CHANGES.values()]
    for done in range(5):
        assert old[done] == set().union(*four[done:])
    assert old[5:8] == four[:3]  # without the fourth: the engine before the last step
    assert old[8:] == [
        {"ablation.no_graph"}, {"parallel.collective"}, {"ablation.gather_logits"},
    ]  # fmt: skip
    assert skipped == []


def test_ablation_says_what_a_device_cannot_undo() -> None:
    engines, skipped = latency.ablation({}, "cpu")
    assert skipped == ["graph off -> on"]
    assert {"parallel.collective": "gloo"} in [one.keys for one in engines]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("draft_tokens", [0, 1, 4])
def test_counts_are_computed_for_devices_that_run_ahead(
    planted_tiny: Path, run_ahead: int, draft_tokens: int
) -> None:
    team = Team(planted_tiny, draft_tokens=draft_tokens)
    team.runners[0].run_ahead = run_ahead
    chain = planted.chain(1024, 0.8425, 0)
    lengths = (1, 2, 3, 11, 25)
    requests = [([7 + n], Sampling(max_tokens=n)) for n in lengths]
    for n, out in zip(lengths, team.generate(requests), strict=True):
        want = planted.expected_counts(chain, 7 + n, n, draft_tokens, run_ahead)
        assert out.tokens == want.tokens
        assert (out.iterations, out.drafted, out.accepted) == want[1:4]
        assert bool(out.drafted) == (draft_tokens > 0 and n > 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": planted.MAX_TEMPERATURE},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logprobs": 5},
    ],
)
def test_a_planted_chain_is_known_for_sampled_and_penalised_requests(
    planted_tiny: Path, settings: dict[str, Any]
) -> None:
    known = oracle.Oracle(planted_tiny, settings)
    team, new = Team(planted_tiny, draft_tokens=4), 200
    requests = [([5 + i], Sampling(max_tokens=new, seed=i, **settings)) for i in range(3)]
    for i, out in enumerate(team.generate(requests)):
        want = known.expected(5 + i, new, 4, 0)
        assert want is not None
        assert out.tokens == want.tokens
        assert (out.drafted, out.accepted) == (want.drafted, want.accepted)


def test_above_that_temperature_draws_leave_the_chain_and_nothing_is_known(
    planted_tiny: Path,
) -> None:
    settings = {"temperature": 20.0}
    known = oracle.Oracle(planted_tiny, settings)
    assert (known.knows, known.expected(5, 50, 4, 0)) == (False, None)
    (out,) = Team(planted_tiny).generate([([5], Sampling(max_tokens=50, seed=1, **settings))])
    want = oracle.Oracle(planted_tiny).expected(5, 50, 4, 0)
    assert want is not None
    assert out.tokens != want.tokens


def test_a_request_asked_again_must_get_the_text_of_its_first_answer() -> None:
    texts = [(7, [1, 2]), (8, [3]), (7, [1, 2]), (8, [4]), (7, [2, 1]), (9, [1, 2])]
    assert oracle.repeats(texts) == {"repeated": 3, "repeated_same": 1}
    assert oracle.repeats([]) == {"repeated": 0, "repeated_same": 0}


def test_the_requests_of_a_protocol_have_fixed_prompts_seeds_and_settings() -> None:
    settings = traffic.sampling_settings(temperature=0.7, top_p=0.9)
    asked = traffic.Protocol(
        prompt=6, new=4, requests=3, rounds=1, warmup=1, seed=40, sampling=settings
    )
    requests = asked.traffic(100, 3)
    assert requests == asked.traffic(100, 5)[:3]
    assert [sampling.seed for _, sampling in requests] == [40, 41, 42]
    assert {len(prompt) for prompt, _ in requests} == {6}
    assert requests[0][1] == Sampling(
        max_tokens=4, ignore_eos=True, seed=40, temperature=0.7, top_p=0.9
    )
    assert [prompt for prompt, _ in asked.traffic(100, 3, warm=True)] != [p for p, _ in requests]


def result(*names: str, batches: tuple[int, ...] = (1,), **sampling: Any) -> dict[str, Any]:
    marks = {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 1234.5}
    times = dict.fromkeys(("e2e_ms", "ttft_ms", "tpot_ms", "itl_ms"), marks)
    rows = [
        {
            "configuration": name,
            "draft_tokens": k,
            "batch": batch,
            "device": "cpu",
            "tensor_parallel": 2,
            "dtype": "float32",
            "sampling": sampling,
            "requests": 2,
            "repeated": 4,
            "repeated_same": 3,
            "server": times,
            "client": times,
            "tok_s": 10.0,
            "decode_tok_s": None,
            "wave_tok_s": 900.0,
            "drafted": 4,
            "accepted": 3,
            "accepted_share": 0.75,
            "accepted_by_position": [0.9] * k,
            "tokens_per_iteration": 1.5,
            "exact": None,
            "differences": [],
            "expected_accepted": 2,
            "expected_drafted": 4,
            "start_to_first_token_s": 1.0,
        }
        for k, name in enumerate(names)
        for batch in batches
    ]
    asked = traffic.Protocol(
        prompt=8, new=4, requests=2, rounds=1, warmup=1, seed=0, sampling=sampling
    )
    about = {"command": host.command(), "host": host.describe(), "protocol": vars(asked)}
    return about | {"rows": rows}


def test_report_of_a_sweep_has_a_row_and_plots_for_each_engine(tmp_path: Path) -> None:
    report.write(tmp_path, result("K = 0", "K = 1", batches=(1, 2)))
    text = (tmp_path / "report.md").read_text()
    assert text.count("| unknown | 3 of 4, computed 2 of 4 | 3/4 |") == 4
    assert "float32, greedy, prompt 8" in text
    assert "Sampled" not in text
    assert "| K = 1 | 2 | client | 2 / 3 / 1,234 |" in text
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.md", "result.json", "acceptance.png", "drafts.png", "batch.png",
    }  # fmt: skip


def test_report_tells_how_close_inexact_answers_were() -> None:
    found = result("K = 1")
    differences = [{"answer": 1, "position": 7, "margin": 0.0625}]
    found["rows"][0] |= {"exact": 1, "differences": differences}
    assert "| 1/2 (top-2 margins 0.0625) |" in report.markdown(found)
    assert "exact 1/2 (top-2 margins 0.0625) |" in report.one_line(found["rows"][0])


@pytest.mark.parametrize(("exact", "says"), [(2, "not how tokens are drawn"), (None, "no text")])
def test_report_of_sampled_requests_says_what_its_columns_check(
    exact: int | None, says: str
) -> None:
    found = result("K = 1", temperature=0.8, top_k=50)
    found["rows"][0]["exact"] = exact
    text = report.markdown(found)
    assert "float32, temperature 0.8, top_k 50, prompt 8" in text
    assert [line for line in text.splitlines() if line.startswith("Sampled:") and says in line]
    assert ", temperature 0.8, top_k 50 |" in report.one_line(found["rows"][0])
    assert "| repeated 3/4 |" in report.one_line(found["rows"][0])


def test_report_of_an_ablation_has_both_tables(tmp_path: Path) -> None:
    engines, skipped = latency.ablation({}, "cpu")
    found = result(*(one.name for one in engines)) | {"not_applicable": skipped}
    report.write(tmp_path, found)
    text = (tmp_path / "report.md").read_text()
    assert "one change after the other" in text
    assert text.count("| without: ") >= 5
    assert "graph off -> on." in text
    assert (tmp_path / "ablation.png").stat().st_size > 1000


def test_report_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    assert cli.main(["bench", "--report", str(tmp_path)]) == USER_ERROR
    assert "pip install 'outrider[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--batch", "0"], '--batch "0"'),
        (["--k", "1,2", "--ablation"], "an ablation takes one K"),
        (["--set", "limits.slots=3"], "limits.slots"),
        (["--nonsense"], "No such option"),
        (["--top-k", "5"], "need a --temperature above 0"),
        (["--temperature", "1", "--top-p", "2"], "top_p = 2.0: must lie in (0, 1]"),
        (["--temperature", "-1"], "temperature = -1.0: must lie in [0, 100]"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    words: list[str], complaint: str, planted_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--model", str(planted_tiny), *words]) == USER_ERROR
    assert complaint in capsys.readouterr().err


def test_a_missing_planted_checkpoint_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "CACHE", tmp_path)
    folder = latency.planted_model("tiny", "cpu", 0.5, 3)
    known = oracle.Oracle(folder)
    assert known.arguments == {"size": "tiny", "accept": 0.5, "seed": 3}
    assert torch.equal(known.chain.next, planted.chain(1024, 0.5, 3).next)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert latency.planted_model("tiny", "cpu", 0.5, 3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_size_may_name_an_fp8_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "CACHE", tmp_path)
    folder = latency.planted_model("tiny-moe-fp8", "cpu", 0.5, 3)
    assert folder != latency.planted_model("tiny-moe", "cpu", 0.5, 3)
    made_with = json.loads((folder / "planted.json").read_text())
    assert made_with == {"size": "tiny-moe", "accept": 0.5, "seed": 3, "quantization": "fp8"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_said_before_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(latency, "CACHE", tmp_path)
    assert cli.main(["bench", "--device", "cuda", "--size", "tiny"]) == USER_ERROR
    assert "--device cuda: cannot be used" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["3b", "fp8", "9b-fp8-fp8", "-fp8"])
def test_an_unknown_size_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=f"--size {size}: must be one of .*27b"):
        latency.planted_model(size, "cpu", 0.5, 0)


@pytest.mark.ray
def test_bench_runs_from_end_to_end(
    cluster: RunningCluster, planted_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(planted_tiny), "--prompt", "40", "--new", "12", "--k", "3"]
    few = ["--requests", "2", "--rounds", "1", "--warmup", "1", "--batch", "1,2"]
    few += ["--set", "parallel.collective=gloo"]  # what an ablation puts in shared memory's place
    assert cli.main(["bench", *words, *few, "--report", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert len(captured.out.splitlines()) == 1
    assert found["protocol"]["sampling"] == {}
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert row["exact"] == row["requests"] == 2
        assert row["differences"] == []
        assert row["repeated_same"] == row["repeated"] == row["batch"]  # in the wave
        assert row["accepted"] == row["expected_accepted"] > 0
        assert row["drafted"] == row["expected_drafted"]
        assert row["server"]["e2e_ms"]["p50"] <= row["client"]["e2e_ms"]["p50"]
        assert row["server"]["ttft_ms"]["p50"] > 0
        assert len(row["client"]["itl_ms"]) == 4
        assert len(row["accepted_by_position"]) == 3
        assert row["start_to_first_token_s"] > row["start_s"] > 0
    assert found["host"]["torch"] == torch.__version__
    assert found["host"]["python"] in sys.version
    assert (tmp_path / "out" / "batch.png").is_file()


@pytest.mark.ray
def test_bench_of_sampled_requests_repeats_their_texts(
    cluster: RunningCluster, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled checkpoint, whose sampled texts are not known: each request is asked again."""
    words = ["--model", str(repo / "examples" / "tiny"), "--prompt", "9", "--new", "12", "--k", "2"]
    few = ["--requests", "2", "--rounds", "2", "--warmup", "1", "--batch", "2"]
    how = ["--temperature", "0.9", "--top-p", "0.95", "--top-k", "40"]
    assert cli.main(["bench", *words, *few, *how]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out.splitlines()[-1])["rows"]
    assert row["sampling"] == {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    assert (row["repeated"], row["repeated_same"]) == (4, 4)  # the second round, and the wave
    assert (row["exact"], row["expected_accepted"], row["differences"]) == (None, None, [])
    assert row["accepted"] > 0
    assert "temperature 0.9, top_p 0.95, top_k 40" in captured.err
