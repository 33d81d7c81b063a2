"""What Prometheus is told of a replica: sums of the driver, times of its requests, HTTP statuses.

    Driver.stats() at a scrape -> gauges and counters      Metrics.finished(...) -> histograms
Each server has a registry of its own, so that one process may hold several. docs/serving.md lists
the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.actors.driver.messages import RequestStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = tuple(4**i for i in range(1, 9))
GAUGES = {
    "queued": "requests_waiting",
    "active": "requests_running",
    "free_pages": "kv_pages_free",
    "num_pages": "kv_pages",
    "draft_depth": "draft_tokens",
    "recovering": "recovering",
    "last_recovery_s": "last_recovery_seconds",
}
COUNTERS = {
    "requests_submitted": "requests_submitted",
    "requests_finished": "requests_finished",
    "requests_aborted": "requests_aborted",
    "requests_failed": "requests_failed",
    "steps": "steps",
    "step_s": "step_seconds",
    "busy_s": "busy_seconds",
    "iterations": "iterations",
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "tokens": "generated_tokens",
    "recoveries": "recoveries",
    "recovery_s": "recovery_seconds",
    "preemptions": "preemptions",
    "prefix_hits": "prefix_hits",
    "cached_tokens": "cached_prompt_tokens",
    "prefix_evictions": "prefix_evictions",
}
"""Key of Driver.stats() -> name of the metric, after `outrider_`."""


class Metrics:
    """The metrics of one replica, with names that begin with `outrider_`."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        """stats: Driver.stats."""
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._http = Counter(
            "outrider_http_requests", "Answers by path and status.", ["path", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._queue_s = self._histogram("queue_seconds", "From submission to a slot.", SECONDS)
        self._ttft_s = self._histogram("time_to_first_token_seconds", "From submission.", SECONDS)
        self._tpot_s = self._histogram(
            "time_per_output_token_seconds", "Mean of a request, first token left out.", SECONDS
        )
        self._total_s = self._histogram("request_seconds", "From submission to the end.", SECONDS)
        self._prompt = self._histogram("prompt_tokens", "Of a request's prompt.", TOKENS)
        self._answer = self._histogram("answer_tokens", "Of a request's answer.", TOKENS)

    def answered(self, path: str, status: int) -> None:
        """An HTTP request to this route was answered."""
        self._http.labels(path, str(status)).inc()

    def joined(self, wait_s: float) -> None:
        """A request got its slot after wait_s."""
        self._queue_s.observe(wait_s)

    def finished(self, stats: RequestStats, total_s: float, prompt: int, answer: int) -> None:
        """A request was answered. prompt, answer: their tokens."""
        self._ttft_s.observe(stats.ttft_s)
        if stats.tpot_s:
            self._tpot_s.observe(stats.tpot_s)
        self._total_s.observe(total_s)
        self._prompt.observe(prompt)
        self._answer.observe(answer)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the driver counts; the registry calls this at each scrape."""
        stats = self._stats()
        for key, name in GAUGES.items():
            yield GaugeMetricFamily(f"outrider_{name}", f"Now: {key}.", stats[key])
        for key, name in COUNTERS.items():
            yield CounterMetricFamily(f"outrider_{name}", f"Since start: {key}.", stats[key])
        by_position = CounterMetricFamily(
            "outrider_accepted_at_position", "Accepted drafts.", labels=["position"]
        )
        for position, count in enumerate(stats["accepted_per_position"]):
            by_position.add_metric([str(position)], count)
        yield by_position

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not collect: the driver may not have started yet."""
        return []

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"outrider_{name}", what, buckets=buckets, registry=self.registry)
