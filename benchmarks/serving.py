"""What serving over HTTP costs, and what `draft_tokens: auto` costs and gains.

    python -m outrider.benchmarks.serving http     first token, events, the driver's CPU time
    python -m outrider.benchmarks.serving depth    tokens a second by depth and acceptance

Without an argument both run. The http part serves examples/tiny on this host. The last line of
stdout is one JSON object.
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

from outrider.actors.cluster.haproxy import prefer_haproxy
from outrider.actors.cluster.placement import start_private
from outrider.actors.cluster.reader import load_spec
from outrider.actors.engine import Engine, Sampling

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"  # past the link outrider/
PORT, WARM_UP, ROUNDS, REQUESTS, ANSWER_TOKENS = 8765, 5, 4, 20, 64
"""Of the http part; REQUESTS a round are streamed, and as many are not."""
DEPTH_SLOTS, DEPTH_TOKENS, DEPTH_ROUNDS = 4, 160, 8
"""Of the depth part: requests at once, tokens of each answer, rounds."""


def cpu_s(pid: int) -> float:
    """CPU seconds that the threads of a process have used, which /proc gives in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def http() -> dict[str, Any]:
    """Rounds of one request, first as streams, then whole.

    The difference in the driver's CPU time is what the events of a stream cost.
    """
    keys = {"model": str(TINY), "port": PORT}
    instance = prefer_haproxy(load_spec(None, keys))
    import httpx2

    from outrider.actors.serve import serving_spec
    from outrider.actors.server import serving

    spec = serving_spec(None, keys)
    body = {"prompt": "To create a new project,", "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": ANSWER_TOKENS}
    first_ms: list[float] = []
    streamed, whole, events = [], [], 0
    with serving(spec, instance) as url, httpx2.Client(timeout=60) as client:
        root = url.removesuffix("/v1")
        for _ in range(WARM_UP):
            client.post(url + "/completions", json=body)
        for _ in range(ROUNDS):
            before = counters(client, root)
            for _ in range(REQUESTS):
                times_ms = stream_once(client, url + "/completions", body)
                first_ms.append(times_ms[0])
                events += len(times_ms)
            between = counters(client, root)
            for _ in range(REQUESTS):
                client.post(url + "/completions", json=body)
            after = counters(client, root)
            streamed.append({key: between[key] - before[key] for key in before})
            whole.append({key: after[key] - between[key] for key in before})
    requests = ROUNDS * REQUESTS
    ttft_ms = 1e3 * sum(one["ttft_s"] for one in streamed) / requests
    extra_ms = [1e3 * (s["cpu_s"] - w["cpu_s"]) for s, w in zip(streamed, whole, strict=True)]
    return {
        "client_ttft_ms": statistics.mean(first_ms),
        "engine_ttft_ms": ttft_ms,
        "added_ms": statistics.mean(first_ms) - ttft_ms,
        "requests": requests,
        "events": events,
        "driver_cpu_ms_an_event": sum(extra_ms) / events,
        "by_round": [round(ROUNDS * one / events, 3) for one in extra_ms],
        "driver_cpu_ms_a_request": {
            "streamed": 1e3 * sum(one["cpu_s"] for one in streamed) / requests,
            "whole": 1e3 * sum(one["cpu_s"] for one in whole) / requests,
        },
    }


def stream_once(client: Any, url: str, body: dict[str, Any]) -> list[float]:
    """Milliseconds from the request to each event of its stream."""
    times_ms = []
    started = time.perf_counter()
    with client.stream("POST", url, json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line:  # an empty line ends each event
                times_ms.append(1e3 * (time.perf_counter() - started))
    return times_ms


def counters(client: Any, root: str) -> dict[str, float]:
    """Sum of the engine's times to first tokens, and CPU time of the driver's process; seconds."""
    metrics = client.get(root + "/metrics").text
    name = "outrider_time_to_first_token_seconds_sum "
    total = next(line for line in metrics.splitlines() if line.startswith(name))
    pid = client.get(root + "/health").json()["driver"]["pid"]
    return {"ttft_s": float(total.removeprefix(name)), "cpu_s": cpu_s(pid)}


def depth() -> dict[str, Any]:
    """Depths 0, auto and 5, with drafts that are never right and with drafts that mostly are.

    The three engines exist at the same time and take turns, so that a slow moment of the host
    does not hit one of them alone.
    """
    from outrider.benchmarks import planted

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for accept in (0.0, 0.95):
            model = Path(folder) / f"accept-{accept}"
            planted.write(model, "tiny", accept=accept, seed=0)
            result[f"accept {accept}"] = side_by_side(model, (0, "auto", 5))
    return result


def side_by_side(model: Path, settings: Sequence[int | str]) -> dict[str, Any]:
    """Tokens a second of DEPTH_SLOTS equally long requests, for each draft_tokens setting."""
    cluster = start_private(num_cpus=64, namespace="depth", object_store_bytes=10**8)
    sampling = Sampling(max_tokens=DEPTH_TOKENS, ignore_eos=True)
    speeds: dict[str, list[float]] = {str(setting): [] for setting in settings}
    drafts = {}
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.close)
        engines = {
            str(setting): stack.enter_context(
                Engine.from_config(None, model=str(model), draft_tokens=setting)
            )
            for setting in settings
        }
        for turn in range(DEPTH_ROUNDS + 1):
            for name, engine in engines.items():
                started = time.perf_counter()
                answers = engine.generate([[7, i] for i in range(DEPTH_SLOTS)], sampling)
                tokens = sum(len(answer.token_ids) for answer in answers)
                if turn > 0:  # turn 0 warms up, and `auto` tries every depth in it
                    speeds[name].append(tokens / (time.perf_counter() - started))
        for name, engine in engines.items():
            stats = engine.stats()
            drafts[name] = stats["drafted"] / max(1, stats["iterations"])
    first = speeds[str(settings[0])]
    return {
        name: {
            "tok_s": [round(rate, 1) for rate in rates],
            "times_the_first": round(statistics.median(a / b for a, b in zip(rates, first)), 3),
            "drafts_an_iteration": round(drafts[name], 2),
        }
        for name, rates in speeds.items()
    }


if __name__ == "__main__":
    parts = {"http": http, "depth": depth}
    names = sys.argv[1:] or list(parts)
    print(json.dumps({name: parts[name]() for name in names}))
