"""`EngineMetrics`: the engines' counters for Prometheus, under vLLM's names, with its label `engine`: the replica's
number, from 0."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.record import STEP_SIZES, EngineStats

ReadStats: TypeAlias = Callable[[float], Awaitable[Mapping[int, EngineStats | None]]]
"""Queries running engines, waiting at most this many seconds; None: no answer."""

ENGINE_COUNTERS = (
    ("vllm:prompt_tokens", "num_prompt_tokens", "Prompt tokens of admitted sequences."),
    ("vllm:generation_tokens", "num_generated_tokens", "Tokens generated."),
    ("vllm:prefix_cache_queries", "num_prompt_tokens", "Prompt tokens looked for in the prefix cache."),
    ("vllm:prefix_cache_hits", "num_cached_tokens", "Prompt tokens found in the prefix cache."),
    ("vllm:external_prefix_cache_hits", "num_restored_tokens", "Tokens restored from prefix_cache_dir."),
    ("vllm:num_preemptions", "num_preemptions", "Preemptions: a sequence gave its blocks back and was computed again."),
    ("vllm:spec_decode_num_drafts", "num_drafts", "Spans with draft tokens."),
    ("vllm:spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens that were computed."),
    ("vllm:spec_decode_num_accepted_tokens", "num_accepted_tokens", "Draft tokens that were accepted."),
    ("inflight:engine_steps", "num_steps", "Forward passes."),
    ("inflight:engine_requests", "num_requests", "Requests that the engine accepted."),
)
"""Counters: name, the field of `EngineStats` that it follows, description."""
LABELS = ("model_name", "engine")


class EngineMetrics:
    """The metrics of all engines of a server.

    Args:
        model_name: the metrics' `model_name` label.
        registry: which they are in.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self._registry = registry
        self._up = self._gauge("inflight:engine_up", "Whether the engine answered the last scrape.")
        self._num_running = self._gauge("vllm:num_requests_running", "Running sequences.")
        self._num_waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting for a slot or for blocks.")
        self._cache_usage = [
            self._gauge(name, "Share of the cache's blocks that sequences hold; 1 means all.")
            for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the latter in older dashboards
        ]
        what = "Blocks of the cache: used by sequences, kept for a session's return, cached for others, or free."
        self._blocks = Gauge("inflight:cache_blocks", what, [*LABELS, "state"], registry=registry)
        self._counters = [(field, self._counter(name, what)) for name, field, what in ENGINE_COUNTERS]
        what = "Prompt tokens of admitted sequences, by where their keys and values came from."
        self._by_source = Counter("vllm:prompt_tokens_by_source", what, [*LABELS, "source"], registry=registry)
        self._step_sizes = _StepSizes(model_name)
        registry.register(self._step_sizes)
        self._num_crashes = Counter(
            "inflight:engine_crashes", "How often an engine died.", LABELS[:1], registry=registry
        ).labels(model_name)
        self._num_crashes_seen = 0
        self._cache_info: Gauge | None = None
        self._last: dict[int, EngineStats] = {}
        self._seen: set[int] = {0}
        for _, counter in self._counters:
            counter.labels(model_name, "0")  # present from the start

    def describe_cache(self, info: ModelInfo, num_engines: int) -> None:
        """Report how the cache of each engine is made; call it when one is loaded."""
        labels = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,  # vLLM's name, wherever they are
            "enable_prefix_caching": info.can_share_prefixes,
        }
        if self._cache_info is None:
            what = "How the cache is made."
            self._cache_info = Gauge("vllm:cache_config_info", what, [*LABELS, *labels], registry=self._registry)
        self._cache_info.clear()
        for number in range(num_engines):
            self._cache_info.labels(self._model_name, str(number), *map(str, labels.values())).set(1)

    def forget(self) -> None:
        """Reset the gauges: the engines have ended. New ones, which count from 0, may follow."""
        self._last.clear()
        self._seen = {0}
        for gauge in (self._up, self._num_running, self._num_waiting, *self._cache_usage, self._blocks):
            gauge.clear()
        if self._cache_info is not None:
            self._cache_info.clear()

    def take_in(self, stats: Mapping[int, EngineStats | None], num_crashes: int) -> None:
        """Report the engines' answers; see `ReadStats`."""
        self._seen.update(stats)
        for number in self._seen:
            each = stats.get(number)
            self._labelled(self._up, number).set(each is not None)
            if each is not None:
                self._report(number, each)
            elif number not in stats:
                for gauge in (self._num_running, self._num_waiting, *self._cache_usage):
                    self._labelled(gauge, number).set(0)
                self._set_blocks(number, 0, 0, 0, 0)
        if num_crashes > self._num_crashes_seen:
            self._num_crashes.inc(num_crashes - self._num_crashes_seen)
            self._num_crashes_seen = num_crashes

    def _report(self, number: int, stats: EngineStats) -> None:
        self._labelled(self._num_running, number).set(stats.num_running)
        self._labelled(self._num_waiting, number).set(stats.num_waiting)
        num_blocks = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
        for gauge in self._cache_usage:
            self._labelled(gauge, number).set(stats.num_blocks_used / max(1, num_blocks))
        kept = stats.num_blocks_kept
        self._set_blocks(number, stats.num_blocks_used, kept, stats.num_blocks_cached - kept, stats.num_blocks_free)
        before = self._last.get(number)
        if before is not None and _is_another_engine(before, stats):
            before = None
        for field, counter in self._counters:
            more = getattr(stats, field) - (getattr(before, field) if before else 0)
            counter.labels(self._model_name, str(number)).inc(more)
        self._step_sizes.add(number, stats, before)
        num_cached = stats.num_cached_tokens - (before.num_cached_tokens if before else 0)
        num_prompt = stats.num_prompt_tokens - (before.num_prompt_tokens if before else 0)
        for source, num_tokens in (("local_cache_hit", num_cached), ("local_compute", num_prompt - num_cached)):
            self._by_source.labels(self._model_name, str(number), source).inc(num_tokens)
        self._last[number] = stats

    def _set_blocks(self, number: int, *counts: int) -> None:
        for state, count in zip(("used", "kept", "cached", "free"), counts, strict=True):
            self._blocks.labels(self._model_name, str(number), state).set(count)

    def _labelled(self, gauge: Gauge, number: int) -> Gauge:
        return gauge.labels(self._model_name, str(number))

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, LABELS, registry=self._registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, LABELS, registry=self._registry)


def _is_another_engine(last: EngineStats, stats: EngineStats) -> bool:
    """Whether another engine, which counts from 0, was started in between."""
    fields = [field for _, field, _ in ENGINE_COUNTERS]
    return stats.num_crashes > last.num_crashes or any(getattr(stats, each) < getattr(last, each) for each in fields)


class _StepSizes(Collector):
    """The engines' histogram of tokens per step."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts: dict[int, list[int]] = {0: [0] * (len(STEP_SIZES) + 1)}
        self._sums: dict[int, int] = {0: 0}

    def add(self, number: int, stats: EngineStats, before: EngineStats | None) -> None:
        """Add an engine's counts since `before`, or since its start."""
        nothing = [0] * (len(STEP_SIZES) + 1)
        seen, num_seen = (before.num_steps_by_size, before.num_step_tokens) if before else (nothing, 0)
        counts = self._counts.get(number, nothing)
        changes = zip(counts, stats.num_steps_by_size, seen, strict=True)
        self._counts[number] = [count + now - then for count, now, then in changes]
        self._sums[number] = self._sums.get(number, 0) + stats.num_step_tokens - num_seen

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(float, STEP_SIZES), "+Inf"]
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
        for number, counts in self._counts.items():
            buckets = [(str(bound), float(count)) for bound, count in zip(bounds, accumulate(counts), strict=True)]
            family.add_metric([self._model_name, str(number)], buckets, float(self._sums[number]))
        yield family
