"""The results of `bench/generation.py` as tables in Markdown, and its targets with what was reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from measure.generators import KINDS

Results = dict[str, Any]

OURS = tuple(name for name, kind in KINDS.items() if kind.script == "servax_generator")
LLAMA = ("q4_1", "f16")
WIDEST = 40
"""Characters of the longest bar."""


def text(results: Results) -> str:
    """Everything that a person wants to see."""
    return "\n".join([*tables(results), "", *(f"{verdict}  {what}" for verdict, what in targets(results))])


def median(results: Results, name: str, *path: str) -> float | None:
    """The median over runs of one number; None where there is none."""
    values: list[float] = []
    for run in results["runs"]:
        found: Any = run.get(name, {})
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        if found is not None:
            values.append(found)
    return statistics.median(values) if values else None


def decode(results: Results, name: str, context: int, batch: int) -> float | None:
    """Tokens/s of a batch."""
    return median(results, name, "decode", str(context), str(batch), "rate")


def first(results: Results, name: str, tokens: int) -> float | None:
    """Seconds to the first token of a prompt of so many."""
    return median(results, name, "first", str(tokens))


def prefill(results: Results, name: str, context: int) -> float | None:
    """Tokens/s of a prompt: all but one of its tokens, by the time beyond that of a prompt of one."""
    whole, one = first(results, name, context), first(results, name, 1)
    return None if whole is None or one is None or whole <= one else (context - 1) / (whole - one)


def best(values: list[float | None]) -> float | None:
    """The largest that there is."""
    known = [value for value in values if value is not None]
    return max(known) if known else None


def targets(results: Results) -> Iterator[tuple[str, str]]:
    """A verdict (`met`, `missed`, or empty where none was set) with what was reached, as far as it was measured."""
    for context in results["options"]["contexts"]:
        asked = context <= 128
        better = best([prefill(results, name, context) for name in LLAMA])
        for name in ("bfloat16", "int8"):
            yield from _judged(
                f"prefill of {context}, {name} to llama.cpp's better",
                prefill(results, name, context),
                better,
                3.0 if asked else None,
            )
        better = best([decode(results, name, context, 16) for name in LLAMA])
        for name, wanted in (("bfloat16", 1.5), ("int8", 2.0)):
            yield from _judged(
                f"decode of 16 at context {context}, {name} to llama.cpp's better",
                decode(results, name, context, 16),
                better,
                wanted if asked else None,
            )
        for name, peer, wanted in (("int8", "q4_1", 0.95), ("bfloat16", "f16", 0.9)):
            yield from _judged(
                f"decode of 1 at context {context}, {name} to {KINDS[peer].title}",
                decode(results, name, context, 1),
                decode(results, peer, context, 1),
                wanted if asked else None,
            )
    api = results["api"]
    if api["streams"] and api["engine"]:
        yield from _judged(
            "16 streams through the API, to the engine alone",
            statistics.median(api["streams"]),
            statistics.median(api["engine"]),
            0.85,
        )


def _judged(what: str, got: float | None, other: float | None, wanted: float | None) -> Iterator[tuple[str, str]]:
    if got is None or other is None:
        return
    ratio = got / other
    verdict = "" if wanted is None else "met" if ratio >= wanted else "missed"
    yield f"{verdict:<6}", f"{what}: {ratio:.2f}" + ("" if wanted is None else f" (at least {wanted:g})")


def tables(results: Results) -> Iterator[str]:
    """All tables, in Markdown."""
    host, runs = results["machine"], len(results["runs"])
    yield (
        f"{host['date']}, {host['cpu']}, {host['cores']} cores, jax {host['jax']}, SmolLM2-135M-Instruct, "
        f"{'one run' if runs == 1 else f'medians of {runs} runs'}; load average when it began "
        f"{host['load average at start']:.1f}."
    )
    for name, why in results["unavailable"].items():
        yield f"- not measured: {KINDS[name].title if name in KINDS else name}: {' '.join(why.split())[-300:]}"
    for context in results["options"]["contexts"]:
        yield ""
        yield from _context(results, context)
    for part in (_sweep, _wrappers, _windows, _quality, _api):
        yield ""
        yield from part(results)
    others = [
        found["others"]
        for run in results["runs"]
        for measured in run.values()
        for batches in measured["decode"].values()
        for found in batches.values()
    ]
    if others:
        yield ""
        yield (
            f"Something else kept {statistics.median(others):.2f} cores busy at the median of the measurements, "
            f"{max(others):.2f} at most."
        )


def _context(results: Results, context: int) -> Iterator[str]:
    yield f"| contexts up to {context} | prefill, tokens/s | first token, ms | decode of 1 | of 4 | of 16, tokens/s |"
    yield "|---|---|---|---|---|---|"
    for name, kind in KINDS.items():
        if any(decode(results, name, context, batch) is not None for batch in (1, 4, 16)):
            cells = [_number(prefill(results, name, context)), _milliseconds(first(results, name, context))]
            cells += [_number(decode(results, name, context, batch)) for batch in (1, 4, 16)]
            yield f"| {kind.title} | {' | '.join(cells)} |"


def _sweep(results: Results) -> Iterator[str]:
    context = results["options"]["contexts"][0]
    found = {
        (name, int(batch)): decode(results, name, context, int(batch))
        for name in OURS
        for run in results["runs"]
        for batch in run.get(name, {}).get("decode", {}).get(str(context), {})
    }
    rates = {key: rate for key, rate in found.items() if rate is not None}
    if not rates:
        return
    yield f"| servax by batch, contexts up to {context} | tokens/s | ms a token | |"
    yield "|---|---|---|---|"
    most = max(rates.values())
    for (name, batch), rate in sorted(rates.items(), key=lambda each: (OURS.index(each[0][0]), each[0][1])):
        yield f"| {name}, {batch} | {rate:,.0f} | {batch / rate * 1e3:.1f} | `{bar(rate, most)}` |"


def bar(value: float, most: float) -> str:
    """A bar as long as a value is large, `WIDEST` for the largest."""
    return "█" * max(1, round(WIDEST * value / most))


def _wrappers(results: Results) -> Iterator[str]:
    if not results["wrappers"]:
        return
    yield "| wrapper, float32 | s to ready | first token, ms | decode of 1 | of 16, tokens/s |"
    yield "|---|---|---|---|---|"
    for name, found in results["wrappers"].items():
        middle = {key: statistics.median(found[key]) for key in ("first", "1", "16")}
        yield (
            f"| {name} | {found['ready']:.1f} | {middle['first'] * 1e3:.0f} | {middle['1']:.0f} | {middle['16']:.0f} |"
        )


def _windows(results: Results) -> Iterator[str]:
    windows = results["windows"]
    if not windows:
        return
    used = sorted({int(each) for found in windows.values() for each in found})
    yield f"| ms a step of 16, int8, context in use | {' | '.join(map(str, used))} |"
    yield "|---|" + "---|" * len(used)
    for window, found in windows.items():
        cells = [f"{found[str(each)] * 1e3:.1f}" if str(each) in found else "" for each in used]
        yield f"| window of {window} allocated | {' | '.join(cells)} |"


def _quality(results: Results) -> Iterator[str]:
    quality = results["quality"]
    if not quality:
        return
    count = quality["tokens"]
    yield f"| against float32, {count:,} tokens of text | same likeliest token | KL divergence, nats | perplexity |"
    yield "|---|---|---|---|"
    for name in ("bfloat16", "int8"):
        found = quality[name]
        perplexity, exact = math.exp(found["surprise"]), math.exp(found["surprise exact"])
        yield (
            f"| {name} | {found['agreement']:.1%} | {found['divergence']:.4f} "
            f"| {perplexity:.2f} ({exact:.2f} in float32) |"
        )


def _api(results: Results) -> Iterator[str]:
    api, load, whole = results["api"], results["poisson"], results["aiperf"]
    if api["streams"]:
        yield "| through the OpenAI API, int8 | tokens/s | first token, ms, p50 / p99 | ms a token, p50 / p99 |"
        yield "|---|---|---|---|"
        yield f"| the engine alone, 16 sequences | {statistics.median(api['engine']):,.0f} | | |"
        yield f"| 16 streams | {statistics.median(api['streams']):,.0f} | | |"
    if load:
        yield (
            f"| Poisson, {load['requests']} requests at {load['requests/s']:.1f} a second, {load['errors']} errors "
            f"| {load['tokens/s']:,.0f} | {_pair(load['first'])} | {_pair(load['token'])} |"
        )
    if whole:
        token, begun = whole["inter_token_latency"], whole["time_to_first_token"]
        yield (
            f"| aiperf, 8 streams, {whole['request_count']['avg']:.0f} requests "
            f"| {whole['output_token_throughput']['avg']:,.0f} | {begun['p50']:.0f} / {begun['p99']:.0f} "
            f"| {token['p50']:.1f} / {token['p99']:.1f} |"
        )


def _pair(values: list[float]) -> str:
    return " / ".join(f"{value * 1e3:.0f}" for value in values)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:,.0f}"
