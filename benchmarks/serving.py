"""What HTTP adds to the engine, and what the automatic depth costs and gains.

    python -m benchmarks.serving http       first token and events: client, engine, the driver's CPU
    python -m benchmarks.serving depth      tokens a second at K = 0, K = 5 and auto, by acceptance
One JSON object on the last line of stdout. The http part serves examples/tiny on this host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.engine import Engine, Sampling
from actors.placement import prefer_haproxy

TINY = Path(__file__).parents[1] / "examples" / "tiny"
PORT, ROUNDS, ANSWER_TOKENS = 8765, 30, 64


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def http() -> dict[str, Any]:
    prefer_haproxy()
    import httpx2

    from actors.serve import serving, serving_spec

    spec = serving_spec(None, {"model": str(TINY), "port": PORT})
    body = {"prompt": "To create a new project,", "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": ANSWER_TOKENS, "stream": True}
    waits_ms, events = [], 0
    with serving(spec) as url, httpx2.Client(timeout=60) as client:
        root = url.removesuffix("/v1")
        before: Any = None
        for number in range(ROUNDS + 5):
            if number == 5:  # after a warm-up
                before = look(client, root)
                events = 0
            started = time.perf_counter()
            first = 0.0
            with client.stream("POST", url + "/completions", json=body) as response:
                for line in response.iter_lines():
                    first = first or time.perf_counter() - started
                    events += bool(line)
            if number >= 5:
                waits_ms.append(1e3 * first)
        after = look(client, root)
    ttft_ms = 1e3 * (after["ttft_s"] - before["ttft_s"]) / ROUNDS
    driver_ms = 1e3 * (after["cpu_s"] - before["cpu_s"]) / events
    return {
        "client_ttft_ms": statistics.mean(waits_ms),
        "engine_ttft_ms": ttft_ms,
        "added_ms": statistics.mean(waits_ms) - ttft_ms,
        "events": events,
        "driver_cpu_ms_an_event": driver_ms,
    }


def look(client: Any, root: str) -> dict[str, float]:
    """The engine's sum of times to first tokens, and the driver's CPU time."""
    metrics = client.get(root + "/metrics").text
    name = "outrider_time_to_first_token_seconds_sum "
    total = next(line for line in metrics.splitlines() if line.startswith(name))
    pid = client.get(root + "/health").json()["driver"]["pid"]
    return {"ttft_s": float(total.removeprefix(name)), "cpu_s": cpu_s(pid)}


def depth() -> dict[str, Any]:
    """The best of several runs of each is what the host can do."""
    from benchmarks import planted

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for accept in (0.0, 0.95):
            model = Path(folder) / f"accept-{accept}"
            planted.write(model, "tiny", accept=accept, seed=0)
            settings: tuple[int | str, ...] = (0, "auto", 5)
            result[f"accept {accept}"] = {str(k): speed(model, k) for k in settings}
    return result


def speed(model: Path, draft_tokens: int | str) -> dict[str, float]:
    """Tokens a second of 4 requests together: the best of 4 runs after one to warm up."""
    how, speeds = Sampling(max_tokens=120, ignore_eos=True), []
    with Engine.from_config(None, model=str(model), draft_tokens=draft_tokens) as engine:
        for _ in range(5):
            started = time.perf_counter()
            answers = engine.generate([[7, i] for i in range(4)], how)
            tokens = sum(len(answer.token_ids) for answer in answers)
            speeds.append(tokens / (time.perf_counter() - started))
        stats = engine.stats()
    drafts = stats["drafted"] / max(1, stats["iterations"])
    return {"tok_s": round(max(speeds[1:]), 1), "drafts_an_iteration": round(drafts, 2)}


if __name__ == "__main__":
    parts = {"http": http, "depth": depth}
    names = sys.argv[1:] or list(parts)
    print(json.dumps({name: parts[name]() for name in names}))
