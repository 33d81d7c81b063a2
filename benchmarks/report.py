"""The result rows of `outrider bench` as text: a line each while it runs, then tables and plots.

    {"rows": [...], "host": {...}} -> DIR/report.md, DIR/result.json, DIR/*.png

The tables show mean end-to-end time, time to the first token (TTFT) and time per token (TPOT) in
milliseconds, as the server and as the client saw them. Plots need matplotlib (the extra "bench").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.benchmarks.traffic import label
from outrider.model.config import ConfigError

Row = dict[str, Any]
"""What an engine did at one batch size, by the keys of the JSON line."""
COLUMNS = (
    "srv E2E | srv TTFT | srv TPOT | cli E2E | cli TTFT | cli TPOT | ITL p50 / p90 / p99 | "
    "tok/s | decode tok/s | wave tok/s | accepted | tok/iteration | exact | as computed | repeated"
)


def need_plots() -> None:
    """Raise ConfigError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--report draws plots with matplotlib: pip install 'outrider[bench]'")


def one_line(row: Row) -> str:
    """The line of a row that is printed as soon as it is measured."""
    server = row["server"]
    parts = [
        f"{row['configuration']}, batch {row['batch']}, {label(row['sampling'])}",
        f"TPOT {_mean(row, 'server', 'tpot_ms')} ms",
        f"TTFT {_mean(row, 'server', 'ttft_ms')} ms",
        f"E2E {_number(server['e2e_ms']['mean'])} ms",
        f"client E2E {_mean(row, 'client', 'e2e_ms')} ms",
        f"{row['tok_s']:g} tok/s, {_number(row['decode_tok_s'])} decoding, "
        f"{_number(row['wave_tok_s'])} at once",
        f"accepted {_share(row)}",
        f"exact {_exact(row)}",
        f"repeated {_repeated(row)}",
        f"start {row['start_to_first_token_s']:g} s",
    ]
    return " | ".join(parts)


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write report.md, result.json and a plot for each of K and batch that takes several values."""
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
    """The text of report.md: command, host and tables."""
    host, rows = result["host"], result["rows"]
    versions = ", ".join(
        f"{name} {host[name]}"
        for name in ("python", "torch", "triton", "fla-core", "ray")
        if host[name]
    )
    first, protocol = rows[0], result["protocol"]
    devices = "; ".join(host["devices"]) or "no device"
    if host["driver"]:
        devices += f", driver {host['driver']}"
    lines = [
        f"`{result['command']}`",
        "",
        f"Host: {host['cpu']}, {host['cpus']} CPUs; {devices}; {versions}; "
        f"commit {host['commit']}; {host['date']}.",
        "",
        f"{first['device']}, TP{first['tensor_parallel']}, {first['dtype']}, "
        f"{label(first['sampling'])}, prompt "
        f"{protocol['prompt']}, {protocol['new']} new, {protocol['requests']} requests x "
        f"{protocol['rounds']} rounds after {protocol['warmup']}. Times are means in ms.",
        "",
    ]
    if first["sampling"].get("temperature"):
        lines += [_what_is_checked(known=first["exact"] is not None), ""]
    lines += _ablation_tables(result) if _is_ablation(rows) else _sweep_table(rows)
    lines += ["", "p50 / p90 / p99, ms:", "", *_percentile_table(rows)]
    return "\n".join(lines) + "\n"


def _what_is_checked(*, known: bool) -> str:
    """What the columns "exact" and "repeated" say of sampled answers."""
    if known:
        return (
            "Sampled: at this temperature a draw takes the planted chain's token. `exact` checks "
            "how the engine runs sampled requests, and not how tokens are drawn."
        )
    return (
        "Sampled: no text is known for these answers. `repeated` tells how many of those whose "
        "prompt and seed were answered before got the same text."
    )


def _sweep_table(rows: Sequence[Row]) -> list[str]:
    lines = _table_head(f"| K | batch | {COLUMNS} | first token after start, s |")
    for row in rows:
        start = f"{row['start_to_first_token_s']:g}"
        lines.append(f"| {row['draft_tokens']} | {row['batch']} | {_cells(row)} | {start} |")
    return lines


def _percentile_table(rows: Sequence[Row]) -> list[str]:
    """p50 / p90 / p99 of every time, as the server and as the client saw it."""
    lines = _table_head("| engine | batch | end | E2E | TTFT | TPOT | ITL |")
    for row in rows:
        for end in ("server", "client"):
            times = ("e2e_ms", "ttft_ms", "tpot_ms", "itl_ms")
            cells = [row["configuration"], str(row["batch"]), end]
            cells += [_percentiles(row[end][name]) for name in times]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table_head(titles: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [titles, "|---" * (titles.count("|") - 1) + "|"]


def _ablation_tables(result: dict[str, Any]) -> list[str]:
    """Two tables for each batch size, with the relative change of the server's end-to-end time."""
    lines = []
    for batch in sorted({row["batch"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        cumulative = [row for row in rows if not _is_leave_one_out(row)]
        all_changes, all_but_last = cumulative[-1], cumulative[-2]
        lines += [f"Batch {batch}, one change after the other:", ""]
        lines += _changes(cumulative, [cumulative[0], *cumulative[:-1]], "to the row before")
        others = [all_changes, *(row for row in rows if _is_leave_one_out(row))]
        others.append(all_but_last | {"configuration": "without: the last change (as above)"})
        lines += ["", f"Batch {batch}, all changes but one:", ""]
        lines += [*_changes(others, [all_changes] * len(others), "to all changes"), ""]
    if result.get("not_applicable"):
        lines.append(f"Cannot be undone on this device: {', '.join(result['not_applicable'])}.")
    return lines


def _changes(rows: Sequence[Row], others: Sequence[Row], change_title: str) -> list[str]:
    """A table of rows, each compared with the row at the same place of `others`."""
    lines = _table_head(f"| engine | srv E2E {change_title} | {COLUMNS} |")
    for row, other in zip(rows, others, strict=True):
        change = row["server"]["e2e_ms"]["mean"] / other["server"]["e2e_ms"]["mean"] - 1
        lines.append(f"| {row['configuration']} | {100 * change:+.1f} % | {_cells(row)} |")
    return lines


def _cells(row: Row) -> str:
    """The cells of COLUMNS."""
    times = [
        _mean(row, end, name)
        for end in ("server", "client")
        for name in ("e2e_ms", "ttft_ms", "tpot_ms")
    ]
    latencies = _percentiles(row["client"]["itl_ms"])
    rates = [_number(row[name]) for name in ("tok_s", "decode_tok_s", "wave_tok_s")]
    counts = [_share(row), f"{row['tokens_per_iteration']:g}", _exact(row), _as_computed(row)]
    return " | ".join([*times, latencies, *rates, *counts, _repeated(row)])


def _mean(row: Row, end: str, name: str) -> str:
    times = row[end][name]
    return _number(times["mean"]) if times else "-"


def _percentiles(times: dict[str, float] | None) -> str:
    return " / ".join(_number(times[name]) for name in ("p50", "p90", "p99")) if times else "-"


def _number(value: float | None) -> str:
    """Four significant digits; whole numbers from a thousand on."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _share(row: Row) -> str:
    return f"{100 * row['accepted_share']:.1f} %"


def _exact(row: Row) -> str:
    """Answers that are exact, of all; of the others, the top-2 margins at the first difference."""
    if row["exact"] is None:
        return "unknown"
    margins = ", ".join(f"{one['margin']:g}" for one in row["differences"])
    share = f"{row['exact']}/{row['requests']}"
    return f"{share} (top-2 margins {margins})" if margins else share


def _repeated(row: Row) -> str:
    """Answers that equal the first one to the same request, of those that have one before."""
    return f"{row['repeated_same']}/{row['repeated']}"


def _as_computed(row: Row) -> str:
    """Whether the counters are those computed in advance; both where they differ."""
    if row["expected_accepted"] is None:
        return "unknown"
    counted = f"{row['accepted']} of {row['drafted']}"
    computed = f"{row['expected_accepted']} of {row['expected_drafted']}"
    return "yes" if counted == computed else f"{counted}, computed {computed}"


def _is_leave_one_out(row: Row) -> bool:
    return row["configuration"].startswith("without")


def _is_ablation(rows: Sequence[Row]) -> bool:
    return any(map(_is_leave_one_out, rows))


def _axes(columns: int, width: float = 5.0) -> tuple[Any, Any]:
    """A figure and its axes side by side, each `width` inches wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _plot_sweep(path: Path, rows: Sequence[Row], x: str, label: str, by: str) -> None:
    """Plot TPOT, TTFT and decode speed over column `x`, a line for each value of column `by`."""
    names = {"batch": "batch", "draft_tokens": "K"}
    figure, axes = _axes(3)
    for value in sorted({row[by] for row in rows}):
        series = sorted((row for row in rows if row[by] == value), key=lambda row: row[x])
        heights = [
            [(row["server"][name] or {}).get("mean") for row in series]
            for name in ("tpot_ms", "ttft_ms")
        ]
        heights.append([row["decode_tok_s"] for row in series])
        for axis, values in zip(axes, heights):
            known = [(row[x], y) for row, y in zip(series, values) if y is not None]
            places, heights_there = [place for place, _ in known], [y for _, y in known]
            axis.plot(places, heights_there, "o-", label=f"{names[by]} {value}")
    titles = ("time per token, ms (server)", "time to first token, ms (server)", "decode tok/s")
    for axis, title in zip(axes, titles, strict=True):
        highest = max((y for drawn in axis.lines for y in drawn.get_ydata()), default=1.0)
        axis.set(title=title, xlabel=label, ylim=(0, 1.08 * highest))
        axis.grid(alpha=0.3)
        if x == "batch" and any(len(drawn.get_xdata()) for drawn in axis.lines):
            axis.set_xscale("log", base=2)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _plot_positions(path: Path, rows: Sequence[Row]) -> None:
    """Plot the share of iterations in which the draft at each position was accepted."""
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
    """Plot the server's end-to-end time of each engine at the smallest batch.

    A bar of over 2.5 times the median is cut there.
    """
    figure, (axis,) = _axes(1, width=9.0)
    batch = min(row["batch"] for row in rows)
    shown = [row for row in reversed(rows) if row["batch"] == batch]  # barh draws from below
    values = [row["server"]["e2e_ms"]["mean"] for row in shown]
    edge = min(max(values), 2.5 * sorted(values)[len(values) // 2])
    bars = axis.barh([row["configuration"] for row in shown], [min(v, edge) for v in values])
    axis.bar_label(bars, [_number(v) + (" (cut)" if v > edge else "") for v in values], padding=3)
    axis.set(title=f"end to end, ms (server, batch {batch})", xlim=(0, 1.2 * edge))
    axis.tick_params(axis="y", labelsize="small")
    figure.savefig(path, dpi=120)
