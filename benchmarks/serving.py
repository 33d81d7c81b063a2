"""What HTTP adds to the engine, and what the automatic depth costs and gains.

    python -m outrider.benchmarks.serving http     first token, events, the driver's CPU
    python -m outrider.benchmarks.serving depth    tokens a second by depth and acceptance
One JSON object on the last line of stdout. The http part serves examples/tiny on this host.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.actors.cluster.placement import prefer_haproxy, start_private
from outrider.actors.engine import Engine, Sampling

TINY = Path(__file__).parents[1] / "examples" / "tiny"
PORT, WARM_UP, ROUNDS, REQUESTS, ANSWER_TOKENS = 8765, 5, 4, 20, 64
DEPTH_SLOTS, DEPTH_TOKENS, DEPTH_ROUNDS = 4, 160, 8


def cpu_s(pid: int) -> float:
    """CPU seconds that the threads of a process have used, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def http() -> dict[str, Any]:
    """Rounds of the same request as a stream and whole: what differs is what its events cost."""
    prefer_haproxy()
    import httpx2

    from outrider.actors.serve import serving, serving_spec

    spec = serving_spec(None, {"model": str(TINY), "port": PORT})
    body = {"prompt": "To create a new project,", "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": ANSWER_TOKENS}
    waits_ms, streamed, whole, events = [], [], [], 0
    with serving(spec) as url, httpx2.Client(timeout=60) as client:
        root = url.removesuffix("/v1")
        for _ in range(WARM_UP):
            client.post(url + "/completions", json=body)
        for _ in range(ROUNDS):
            looks = [look(client, root)]
            for _ in range(REQUESTS):
                started = time.perf_counter()
                first = 0.0
                with client.stream(
                    "POST", url + "/completions", json=body | {"stream": True}
                ) as response:
                    for line in response.iter_lines():
                        first = first or time.perf_counter() - started
                        events += bool(line)
                waits_ms.append(1e3 * first)
            looks.append(look(client, root))
            for _ in range(REQUESTS):
                client.post(url + "/completions", json=body)
            looks.append(look(client, root))
            streamed.append({key: looks[1][key] - looks[0][key] for key in looks[0]})
            whole.append({key: looks[2][key] - looks[1][key] for key in looks[0]})
    requests = ROUNDS * REQUESTS
    ttft_ms = 1e3 * sum(one["ttft_s"] for one in streamed) / requests
    extra = [1e3 * (s["cpu_s"] - w["cpu_s"]) for s, w in zip(streamed, whole, strict=True)]
    return {
        "client_ttft_ms": statistics.mean(waits_ms),
        "engine_ttft_ms": ttft_ms,
        "added_ms": statistics.mean(waits_ms) - ttft_ms,
        "requests": requests,
        "events": events,
        "driver_cpu_ms_an_event": sum(extra) / events,
        "by_round": [round(ROUNDS * one / events, 3) for one in extra],
        "driver_cpu_ms_a_request": {
            "streamed": 1e3 * sum(one["cpu_s"] for one in streamed) / requests,
            "whole": 1e3 * sum(one["cpu_s"] for one in whole) / requests,
        },
    }


def look(client: Any, root: str) -> dict[str, float]:
    """The engine's sum of times to first tokens, and the driver's CPU time."""
    metrics = client.get(root + "/metrics").text
    name = "outrider_time_to_first_token_seconds_sum "
    total = next(line for line in metrics.splitlines() if line.startswith(name))
    pid = client.get(root + "/health").json()["driver"]["pid"]
    return {"ttft_s": float(total.removeprefix(name)), "cpu_s": cpu_s(pid)}


def depth() -> dict[str, Any]:
    """Engines that stand side by side take turns, so that the host's moods meet them all."""
    from outrider.benchmarks import planted

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for accept in (0.0, 0.95):
            model = Path(folder) / f"accept-{accept}"
            planted.write(model, "tiny", accept=accept, seed=0)
            result[f"accept {accept}"] = side_by_side(model, (0, "auto", 5))
    return result


def side_by_side(model: Path, settings: Sequence[int | str]) -> dict[str, Any]:
    """Tokens a second of DEPTH_SLOTS requests together, each of them as long as the others."""
    cluster = start_private(num_cpus=64, namespace="depth", object_store_bytes=10**8)
    how = Sampling(max_tokens=DEPTH_TOKENS, ignore_eos=True)
    speeds: dict[str, list[float]] = {str(k): [] for k in settings}
    drafts = {}
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.close)
        engines = {
            str(k): stack.enter_context(Engine.from_config(None, model=str(model), draft_tokens=k))
            for k in settings
        }
        for turn in range(DEPTH_ROUNDS + 1):
            for name, engine in engines.items():
                started = time.perf_counter()
                answers = engine.generate([[7, i] for i in range(DEPTH_SLOTS)], how)
                tokens = sum(len(answer.token_ids) for answer in answers)
                if turn:  # the first warms up, and tries every depth
                    speeds[name].append(tokens / (time.perf_counter() - started))
        for name, engine in engines.items():
            stats = engine.stats()
            drafts[name] = stats["drafted"] / max(1, stats["iterations"])
    base = speeds[str(settings[0])]
    return {
        name: {
            "tok_s": [round(one, 1) for one in own],
            "times_the_first": round(statistics.median(a / b for a, b in zip(own, base)), 3),
            "drafts_an_iteration": round(drafts[name], 2),
        }
        for name, own in speeds.items()
    }


if __name__ == "__main__":
    parts = {"http": http, "depth": depth}
    names = sys.argv[1:] or list(parts)
    print(json.dumps({name: parts[name]() for name in names}))
