"""Parts of the benchmarks that no other test runs: paths, and the arithmetic of kernel tables."""

from __future__ import annotations

from typing import Any

from outrider.benchmarks import ranks, serving


def test_the_served_checkpoint_is_there() -> None:
    assert (serving.TINY / "config.json").is_file()


def event(name: str, start: float, end: float) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start}


def test_a_kernel_counts_for_what_it_adds_after_the_one_before() -> None:
    """From 10 to 30: `a` runs to 16, `b` overlaps it by 2 and adds 4, then 5 idle, `a` again."""
    events = [event("begin", 0, 10), event("a", 10, 16), event("b", 14, 20), event("a", 25, 30)]
    lines = ranks.kernel_table(events, 2, "rounds").splitlines()
    assert lines[0] == "2 rounds of 10.0 us, device busy 75.00%"
    assert [line.split() for line in lines[1:]] == [
        ["5.5", "us", "1.0", "calls", "a"],
        ["2.0", "us", "0.5", "calls", "b"],
    ]


def test_the_table_of_iterations_leaves_out_the_first_quarter_and_the_last() -> None:
    events = [event("prompt", 0, 1), event("chunk", 1, 4)]
    for number in range(8):
        start = 10.0 * (number + 1)
        events += [
            event("verify", start, start + 6),
            event("_commit_kernel", start + 6, start + 10),
        ]
    decode, prompts = ranks.tables(events).split("\n\n")
    assert decode.startswith("4 iterations of 10.0 us, device busy 100.00%")
    assert "4.0 us    1.0 calls  _commit_kernel" in decode
    assert prompts.startswith("1 stretch of prompts of 15.0 us")
