"""The rows of `outrider bench` for people: a line each while it runs, then tables and plots.

    {"rows": [...], "host": {...}} -> DIR/report.md, DIR/result.json, DIR/*.png

Tables have the columns of the anchor's: end-to-end time, time to the first token and time a token,
as the server and the client saw them (means, ms). Plots need matplotlib (the extra "bench").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.model.config import ConfigError

Row = dict[str, Any]

HEAD = (
    "srv E2E | srv TTFT | srv TPOT | cli E2E | cli TTFT | cli TPOT | ITL p50 / p90 / p99 | "
    "tok/s | decode tok/s | wave tok/s | accepted | tok/iteration | exact | as computed"
)


def need_plots() -> None:
    """Raise ConfigError where there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--report draws plots with matplotlib: pip install 'outrider[bench]'")


def one_line(row: Row) -> str:
    """A row while the others still run."""
    server = row["server"]
    parts = [
        f"{row['configuration']}, batch {row['batch']}",
        f"TPOT {_mean(row, 'server', 'tpot_ms')} ms",
        f"TTFT {_mean(row, 'server', 'ttft_ms')} ms",
        f"E2E {_number(server['e2e_ms']['mean'])} ms",
        f"client E2E {_mean(row, 'client', 'e2e_ms')} ms",
        f"{row['tok_s']:g} tok/s, {_number(row['decode_tok_s'])} decoding, "
        f"{_number(row['wave_tok_s'])} at once",
        f"accepted {_share(row)}",
        f"exact {_exact(row)}",
        f"start {row['start_to_first_token_s']:g} s",
    ]
    return " | ".join(parts)


def write(folder: Path, result: dict[str, Any]) -> None:
    """report.md, result.json and a plot for each thing that was swept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    (folder / "report.md").write_text(markdown(result))
    rows = result["rows"]
    if _is_ablation(rows):
        _plot_ablation(folder / "ablation.png", rows)
        return
    _plot_positions(folder / "acceptance.png", rows)
    if len({row["draft_tokens"] for row in rows}) > 1:
        _plot_sweep(folder / "drafts.png", rows, "draft_tokens", "K, drafts an iteration", "batch")
    if len({row["batch"] for row in rows}) > 1:
        _plot_sweep(folder / "batch.png", rows, "batch", "requests at once", "draft_tokens")


def markdown(result: dict[str, Any]) -> str:
    """Host, command and the tables."""
    host, rows = result["host"], result["rows"]
    versions = ", ".join(
        f"{name} {host[name]}"
        for name in ("python", "torch", "triton", "fla-core", "ray")
        if host[name]
    )
    first, protocol = rows[0], result["protocol"]
    lines = [
        f"`{result['command']}`",
        "",
        f"Host: {host['cpu']}, {host['cpus']} CPUs; "
        f"{'; '.join(host['devices']) or 'no device'}"
        + (f", driver {host['driver']}" if host["driver"] else "")
        + f"; {versions}; commit {host['commit']}; {host['date']}.",
        "",
        f"{first['device']}, TP{first['tensor_parallel']}, {first['dtype']}, greedy, prompt "
        f"{protocol['prompt']}, {protocol['new']} new, {protocol['requests']} requests x "
        f"{protocol['rounds']} rounds after {protocol['warmup']}. Times are means in ms.",
        "",
    ]
    lines += _ablation_tables(result) if _is_ablation(rows) else _sweep_table(rows)
    lines += ["", "p50 / p90 / p99, ms:", "", *_percentile_table(rows)]
    return "\n".join(lines) + "\n"


def _sweep_table(rows: Sequence[Row]) -> list[str]:
    lines = [f"| K | batch | {HEAD} | first token after start, s |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in rows:
        start = f"{row['start_to_first_token_s']:g}"
        lines.append(f"| {row['draft_tokens']} | {row['batch']} | {_cells(row)} | {start} |")
    return lines


def _percentile_table(rows: Sequence[Row]) -> list[str]:
    """p50 / p90 / p99 of every time, at both ends."""
    lines = ["| engine | batch | end | E2E | TTFT | TPOT | ITL |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        for end in ("server", "client"):
            cells = [_marks(row[end][n]) for n in ("e2e_ms", "ttft_ms", "tpot_ms", "itl_ms")]
            name = f"{row['configuration']} | {row['batch']} | {end}"
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _ablation_tables(result: dict[str, Any]) -> list[str]:
    """Two tables a batch size; the change of the server's E2E beside each row."""
    lines = []
    for batch in sorted({row["batch"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        steps = [row for row in rows if not row["configuration"].startswith("without")]
        whole = steps[-1]
        lines += [f"Batch {batch}, one change after the other:", ""]
        lines += _changes(steps, [steps[0], *steps[:-1]], "to the row before")
        without = [row for row in rows if row["configuration"].startswith("without")]
        last = dict(steps[-2]) | {"configuration": "without: the last change (as above)"}
        lines += ["", f"Batch {batch}, all changes but one:", ""]
        rest = [whole, *without, last]
        lines += [*_changes(rest, [whole] * len(rest), "to all changes"), ""]
    if result.get("not_applicable"):
        lines.append(f"Not to be undone on this device: {', '.join(result['not_applicable'])}.")
    return lines


def _changes(rows: Sequence[Row], others: Sequence[Row], what: str) -> list[str]:
    lines = [f"| engine | srv E2E {what} | {HEAD} |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row, other in zip(rows, others, strict=True):
        change = row["server"]["e2e_ms"]["mean"] / other["server"]["e2e_ms"]["mean"] - 1
        lines.append(f"| {row['configuration']} | {100 * change:+.1f} % | {_cells(row)} |")
    return lines


def _cells(row: Row) -> str:
    times = [
        _mean(row, end, name)
        for end in ("server", "client")
        for name in ("e2e_ms", "ttft_ms", "tpot_ms")
    ]
    marks = _marks(row["client"]["itl_ms"])
    rates = [_number(row[name]) for name in ("tok_s", "decode_tok_s", "wave_tok_s")]
    counts = [_share(row), f"{row['tokens_per_iteration']:g}", _exact(row), _as_computed(row)]
    return " | ".join([*times, marks, *rates, *counts])


def _mean(row: Row, end: str, name: str) -> str:
    marks = row[end][name]
    return _number(marks["mean"]) if marks else "-"


def _marks(times: dict[str, float] | None) -> str:
    return " / ".join(_number(times[name]) for name in ("p50", "p90", "p99")) if times else "-"


def _number(value: float | None) -> str:
    """Three digits that matter, whole numbers from a thousand on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(row: Row) -> str:
    return f"{100 * row['accepted_share']:.1f} %"


def _exact(row: Row) -> str:
    return "unknown" if row["exact"] is None else f"{row['exact']}/{row['requests']}"


def _as_computed(row: Row) -> str:
    """Accepted drafts, and what the chain gives where it differs."""
    if row["expected_accepted"] is None:
        return "unknown"
    same = row["accepted"] == row["expected_accepted"] and row["drafted"] == row["expected_drafted"]
    return (
        "yes"
        if same
        else f"{row['accepted']} of {row['drafted']}, computed {row['expected_accepted']} of "
        f"{row['expected_drafted']}"
    )


def _is_ablation(rows: Sequence[Row]) -> bool:
    return any(row["configuration"].startswith("without") for row in rows)


def _axes(columns: int, width: float = 5.0) -> tuple[Any, Any]:
    """A figure and its axes, each `width` inches wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _plot_sweep(path: Path, rows: Sequence[Row], x: str, label: str, by: str) -> None:
    """TPOT, TTFT and decode speed over `x`, a line for each value of `by`."""
    names = {"batch": "batch", "draft_tokens": "K"}
    figure, axes = _axes(3)
    for value in sorted({row[by] for row in rows}):
        line = sorted((row for row in rows if row[by] == value), key=lambda row: row[x])
        times = [
            [(row["server"][key] or {}).get("mean") for row in line]
            for key in ("tpot_ms", "ttft_ms")
        ]
        for axis, values in zip(axes, [*times, [row["decode_tok_s"] for row in line]]):
            known = [(row[x], y) for row, y in zip(line, values) if y is not None]
            axis.plot(*zip(*known) if known else ([], []), "o-", label=f"{names[by]} {value}")
    titles = ("time a token, ms (server)", "time to the first token, ms (server)", "decode tok/s")
    for axis, title in zip(axes, titles, strict=True):
        highest = max((y for drawn in axis.lines for y in drawn.get_ydata()), default=1.0)
        axis.set(title=title, xlabel=label, ylim=(0, 1.08 * highest))
        axis.grid(alpha=0.3)
        if x == "batch" and any(len(drawn.get_xdata()) for drawn in axis.lines):
            axis.set_xscale("log", base=2)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _plot_positions(path: Path, rows: Sequence[Row]) -> None:
    """Share of iterations in which the draft at each position was accepted."""
    figure, (axis,) = _axes(1)
    for row in rows:
        shares = row["accepted_by_position"]
        if shares:
            name = f"K {row['draft_tokens']}, batch {row['batch']}"
            axis.plot(range(1, len(shares) + 1), shares, "o-", label=name)
    axis.set(title="drafts accepted", xlabel="position", ylabel="share of iterations", ylim=(0, 1))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _plot_ablation(path: Path, rows: Sequence[Row]) -> None:
    """Server E2E of each engine, smallest batch; a bar far beyond the others is cut."""
    figure, (axis,) = _axes(1, width=9.0)
    least = min(row["batch"] for row in rows)
    shown = [row for row in rows if row["batch"] == least][::-1]
    values = [row["server"]["e2e_ms"]["mean"] for row in shown]
    edge = min(max(values), 2.5 * sorted(values)[len(values) // 2])
    bars = axis.barh([row["configuration"] for row in shown], [min(v, edge) for v in values])
    axis.bar_label(bars, [_number(v) + (" (cut)" if v > edge else "") for v in values], padding=3)
    axis.set(title=f"end to end, ms (server, batch {least})", xlim=(0, 1.2 * edge))
    axis.tick_params(axis="y", labelsize="small")
    figure.savefig(path, dpi=120)
