"""Metrics of language models, under servax's names and under those that dashboards made for vLLM read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from servax.core.errors import ServaxError
from servax.generation.servable import LanguageServable
from servax.protocols.dataplane import DataPlane
from servax.protocols.generation_statistics import Classes, GenerationCounts

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from servax.generation.engine import EngineStatus

_HISTOGRAMS = {
    "first": (
        "servax_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
        "From a request's arrival to its first token.",
    ),
    "gap": (
        "servax_inter_token_seconds",
        "vllm:inter_token_latency_seconds",
        "Between two tokens of an answer; those that come together share the time since the ones before.",
    ),
    "whole": (
        "servax_generation_seconds",
        "vllm:e2e_request_latency_seconds",
        "From a request's arrival to the end of its answer.",
    ),
    "queue": ("servax_slot_wait_seconds", "vllm:request_queue_time_seconds", "What a prompt waited for a slot."),
    "prefill": (
        "servax_prefill_seconds",
        "vllm:request_prefill_time_seconds",
        "From a slot until the prompt was in the cache.",
    ),
    "decode": (
        "servax_decode_seconds",
        "vllm:request_decode_time_seconds",
        "From there until the last token of the answer.",
    ),
    "prompt": ("servax_prompt_length_tokens", "vllm:request_prompt_tokens", "Lengths of prompts."),
    "answer": ("servax_answer_length_tokens", "vllm:request_generation_tokens", "Lengths of answers."),
}
"""By attribute of `GenerationCounts`: servax's name, vLLM's, and what it says."""

_COUNTERS = {
    "prompt_tokens": (
        "servax_prompt_tokens",
        "vllm:prompt_tokens",
        "Tokens of prompts, those that were in the cache included.",
    ),
    "answer_tokens": ("servax_answer_tokens", "vllm:generation_tokens", "Tokens drawn."),
    "reused_tokens": (
        "servax_prefix_hit_tokens",
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were in the cache already.",
    ),
    "bursts": ("servax_bursts", None, "Calls of decode."),
    "steps": ("servax_decode_steps", None, "Steps that they ran."),
}

_FINISHED = ("stop", "length", "abort")
"""Statuses that are reasons in vLLM's words too."""


def families(plane: DataPlane) -> Iterator[Metric]:
    """Servax's by model and version; vLLM's by `model_name` and `engine`, where there is a language model."""
    statuses = dict(_statuses(plane))
    counted = plane.generation.versions()
    for family in _families(statuses, counted):
        if statuses or counted or not family.name.startswith("vllm:"):
            yield family


def _families(
    statuses: Mapping[tuple[str, str], EngineStatus], counted: Mapping[tuple[str, str], GenerationCounts]
) -> Iterator[Metric]:
    yield from _counters(counted)
    for name, (own, theirs, text) in _HISTOGRAMS.items():
        yield from _histograms(own, theirs, text, {key: getattr(counts, name) for key, counts in counted.items()})
    yield from _gauges(statuses)


def _statuses(plane: DataPlane) -> Iterator[tuple[tuple[str, str], EngineStatus]]:
    for status in plane.list():
        try:
            servable = plane.get(status.name, status.version)
        except ServaxError:
            continue  # known, and not loaded
        if isinstance(servable, LanguageServable):
            yield (status.name, status.version), servable.engine.status


def _counters(counted: Mapping[tuple[str, str], GenerationCounts]) -> Iterator[Metric]:
    for name, (own, theirs, text) in _COUNTERS.items():
        family = CounterMetricFamily(own, text, labels=("model", "version"))
        for key, counts in counted.items():
            family.add_metric(key, getattr(counts, name))
        yield family
        if theirs is not None:
            yield _by_name(CounterMetricFamily(theirs, text, labels=_THEIRS), counted, name)
    yield _by_name(
        CounterMetricFamily("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.", labels=_THEIRS),
        counted,
        "prompt_tokens",
    )
    ended = CounterMetricFamily(
        "servax_sequences", "Sequences by what became of them.", labels=("model", "version", "status")
    )
    success = CounterMetricFamily(
        "vllm:request_success", "Requests that ended, by the reason.", labels=(*_THEIRS, "finished_reason")
    )
    reasons: dict[tuple[str, str], int] = {}
    for key, counts in counted.items():
        for status, count in sorted(counts.statuses.items()):
            ended.add_metric((*key, status), count)
            if status in _FINISHED:
                reasons[key[0], status] = reasons.get((key[0], status), 0) + count
    for (name, reason), count in reasons.items():
        success.add_metric((name, "0", reason), count)
    yield from (ended, success)


_THEIRS = ("model_name", "engine")


def _by_name(
    family: CounterMetricFamily, counted: Mapping[tuple[str, str], GenerationCounts], attribute: str
) -> CounterMetricFamily:
    """All versions of a model as one, since vLLM knows no versions."""
    sums: dict[str, int] = {}
    for (name, _), counts in counted.items():
        sums[name] = sums.get(name, 0) + getattr(counts, attribute)
    for name, value in sums.items():
        family.add_metric((name, "0"), value)
    return family


def _histograms(own: str, theirs: str, text: str, values: Mapping[tuple[str, str], Classes]) -> Iterator[Metric]:
    family = HistogramMetricFamily(own, text, labels=("model", "version"))
    merged: dict[str, Classes] = {}
    for key, classes in values.items():
        _add(family, key, classes)
        whole = merged.setdefault(key[0], Classes(classes.bounds))
        whole.counts = [left + right for left, right in zip(whole.counts, classes.counts, strict=True)]
        whole.total += classes.total
    yield family
    family = HistogramMetricFamily(theirs, text, labels=_THEIRS)
    for name, classes in merged.items():
        _add(family, (name, "0"), classes)
    yield family


def _add(family: HistogramMetricFamily, labels: tuple[str, ...], classes: Classes) -> None:
    below, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip(classes.bounds, classes.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == classes.bounds[-1] else str(float(bound)), below))
    family.add_metric(labels, buckets=buckets, sum_value=classes.total)


def _gauges(statuses: Mapping[tuple[str, str], EngineStatus]) -> Iterator[Metric]:
    slots = GaugeMetricFamily("servax_slots", "Sequences that the cache holds.", labels=("model", "version"))
    used = GaugeMetricFamily(
        "servax_cache_usage", "Share of the cache that holds keys and values.", labels=("model", "version")
    )
    running = GaugeMetricFamily("vllm:num_requests_running", "Sequences with a slot.", labels=_THEIRS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences without one.", labels=_THEIRS)
    usage = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of the cache that holds keys and values, 1 being all.", labels=_THEIRS
    )
    by_name: dict[str, list[EngineStatus]] = {}
    for key, status in statuses.items():
        slots.add_metric(key, status.slots)
        used.add_metric(key, status.held / status.capacity)
        by_name.setdefault(key[0], []).append(status)
    for name, each in by_name.items():
        running.add_metric((name, "0"), sum(status.running for status in each))
        waiting.add_metric((name, "0"), sum(status.waiting for status in each))
        usage.add_metric((name, "0"), sum(s.held for s in each) / sum(s.capacity for s in each))
    yield from (slots, used, running, waiting, usage)
