"""Metrics for Prometheus, under vLLM's names with the prefix ``specdec_fast:``; a registry for every application."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from specdec_fast.service import AsyncEngine, RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PREFIX = "specdec_fast:"
_TOKEN_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The metrics of one engine: gauges and counters are read when asked for, histograms count requests as they end."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._registry.register(_EngineCollector(engine, model))
        self._finished = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._responses = self._counter("http_responses", "Responses, by status.", "status")
        self._queue = self._histogram("request_queue_time_seconds", "Time until it got KV pages.", _REQUEST_SECONDS)
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.", _FIRST_SECONDS)
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Time to the end.", _REQUEST_SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._emitted = self._histogram("request_generation_tokens", "Emitted tokens.", _TOKENS)
        engine.add_observer(self._observe)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_response(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(self._model, str(status)).inc()

    def _observe(self, record: RequestRecord) -> None:
        self._finished.labels(self._model, record.finish_reason).inc()
        self._whole.observe(record.seconds)
        self._prompt.observe(record.num_prompt_tokens)
        self._emitted.observe(record.num_emitted_tokens)
        if record.queue_seconds is not None:
            self._queue.observe(record.queue_seconds)
        if record.first_token_seconds is not None:
            self._first.observe(record.first_token_seconds)
            if record.num_emitted_tokens > 1:
                seconds = record.seconds - record.first_token_seconds
                self._each.observe(seconds / (record.num_emitted_tokens - 1))

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(_PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not read the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        stats = self._engine.stats()
        decoding = stats.decoding
        num_queried = stats.num_prompt_tokens if self._engine.engine.core.prefixes.is_on else 0
        gauges = (
            ("num_requests_running", "Requests that hold KV pages.", stats.num_running),
            ("num_requests_waiting", "Requests that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", stats.kv_usage),
        )
        counters = (
            ("num_preemptions", "Times that a request gave up its KV pages.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", num_queried),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            ("generation_tokens", "Emitted tokens.", decoding.num_emitted_tokens),
            ("spec_decode_num_drafts", "Verifications with draft tokens.", decoding.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", decoding.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", decoding.num_accepted_tokens),
        )
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in values:
                family = kind(_PREFIX + name, text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family
        name = f"{_PREFIX}spec_decode_num_accepted_tokens_per_pos"
        labels = ["model_name", "position"]
        accepted = CounterMetricFamily(name, "Draft tokens accepted, by position in the draft.", labels=labels)
        for position, number in enumerate(decoding.accepted_per_position):
            accepted.add_metric([self._model, str(position)], number)
        yield accepted
