"""The results of `bench/serving.py` as text: tables of medians, and the targets with what was reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from measure.peers import PEERS
from measure.policy import OURS

Results = dict[str, Any]


def text(results: Results) -> str:
    """Everything that a person wants to see."""
    lines: list[str] = []
    host = results["machine"]
    lines.append(f"{host['cpu']}, {host['cores']} cores; one for the server, one for the client; jax {host['jax']}")
    for name, why in results["unavailable"].items():
        lines.append(f"not measured: {name}: {why}")
    for model in results["options"]["models"]:
        lines += ["", *_table(results, model)]
    if results["cold"]:
        lines += ["", *_cold(results)]
    lines += ["", *_warnings(results), "", *targets(results)]
    return "\n".join(lines)


def lane(results: Results, model: str, name: str, protocol: str, *, load: str, field: str) -> float | None:
    """The median over runs of one number; None where there is none."""
    values = [
        value
        for run in results["runs"]
        if (value := run.get(model, {}).get(name, {}).get(protocol, {}).get(load, {}).get(field)) is not None
    ]
    return statistics.median(values) if values else None


def memory(results: Results, model: str, name: str) -> float | None:
    """The median over runs of peak memory, in bytes."""
    values = [run[model][name]["memory"] for run in results["runs"] if name in run.get(model, {})]
    return statistics.median(values) if values else None


def lanes(results: Results, model: str) -> list[tuple[str, str]]:
    """Each server with each protocol that it was measured with."""
    found: dict[tuple[str, str], None] = {}
    for run in results["runs"]:
        for name, protocols in run.get(model, {}).items():
            for protocol in protocols:
                if protocol in PEERS[name].wires:
                    found[name, protocol] = None
    return list(found)


def faults(results: Results, model: str, name: str, protocol: str) -> str | None:
    """Why a lane does not count: wrong answers, or none."""
    for run in results["runs"]:
        loads = run.get(model, {}).get(name, {}).get(protocol, {})
        if "failed" in loads:
            return loads["failed"]
        for load in loads.values():
            if load["wrong"]:
                return f"{load['wrong']} of {load['checked']} answers are wrong: {load['fault']}"
    return None


def _table(results: Results, model: str) -> Iterable[str]:
    loads = [str(number) for number in results["options"]["concurrency"]]
    has_open = results["options"]["open_loop"]
    head = f"{model:<24}" + "".join(f"{'c=' + load:>10}{'p50':>9}{'p99':>9}" for load in loads)
    if has_open:
        head += f"{'open':>10}{'p50':>9}{'p99':>9}"
    yield head + f"{'cpu/req':>10}{'memory':>9}{'errors':>8}"
    for name, protocol in lanes(results, model):
        row = f"{PEERS[name].title + ' ' + protocol:<24}"
        if fault := faults(results, model, name, protocol):
            yield row + "  " + fault
            continue
        for load in [*loads, *(["open"] if has_open else [])]:
            rate, p50, p99 = (
                lane(results, model, name, protocol, load=load, field=field) for field in ("rate", "p50", "p99")
            )
            row += f"{_number(rate):>10}{_milliseconds(p50):>9}{_milliseconds(p99):>9}"
        cpu = lane(results, model, name, protocol, load=loads[-1], field="cpu")
        size = memory(results, model, name)
        errors = sum(
            sum(load["errors"].values())
            for run in results["runs"]
            for load in run.get(model, {}).get(name, {}).get(protocol, {}).values()
        )
        yield row + f"{_milliseconds(cpu):>10}{'-' if size is None else f'{size / 2**20:.0f} M':>9}{errors:>8}"
    policies = [run["policy"] for run in results["runs"] if "policy" in run]
    if model == "encoder" and policies:
        for name in policies[0]:
            rate = statistics.median(policy[name] for policy in policies)
            label = name if name == OURS else f"bare loop, {name}"
            yield f"{label:<24}{'':>{28 * (len(loads) - 1)}}{_number(rate):>10}"


def _cold(results: Results) -> Iterable[str]:
    yield f"{'cold mixed traffic':<24}{'over 100 ms':>14}{'p50':>10}{'slowest':>10}{'errors':>8}"
    for name, cold in results["cold"].items():
        share = f"{cold['slow']} of {cold['requests']}"
        worst = _milliseconds(cold["worst"])
        more = f"   {cold['wrong']} wrong: {cold['fault']}" if cold["wrong"] else ""
        if "compiles_after_ready" in cold:
            more += f"   compiles after ready: {cold['compiles_after_ready']:.0f}"
        errors = sum(cold["errors"].values())
        yield f"{PEERS[name].title:<24}{share:>14}{_milliseconds(cold['p50']):>10}{worst:>10}{errors:>8}{more}"


def _warnings(results: Results) -> Iterable[str]:
    ceilings = results["ceilings"]
    yield "load generator against constant answers, requests/s: " + ", ".join(
        f"{protocol} {rate:,.0f}" for protocol, rate in ceilings.items()
    )
    busy: list[tuple[float, str]] = []
    for model in results["options"]["models"]:
        for name, protocol in lanes(results, model):
            for load in map(str, results["options"]["concurrency"]):
                client = lane(results, model, name, protocol, load=load, field="client")
                rate = lane(results, model, name, protocol, load=load, field="rate")
                others = lane(results, model, name, protocol, load=load, field="others")
                where = f"{model}, {PEERS[name].title} {protocol}, {load} callers"
                if client is not None and client > 0.9:
                    yield f"the load generator is the bottleneck ({client:.0%} of its core): {where}"
                elif rate is not None and protocol in ceilings and rate > 0.9 * ceilings[protocol]:
                    yield f"within 10 % of what the load generator reaches: {where}"
                if others is not None and others > 0.1:
                    busy.append((others, where))
    if busy:
        most, where = max(busy)
        yield f"something else kept cores busy in {len(busy)} measurements, most in {where}: {most:.2f} cores"


def targets(results: Results) -> Iterable[str]:
    """Each target that the run measured, with what was reached."""
    loads = [str(number) for number in results["options"]["concurrency"]]
    most, least = loads[-1], loads[0]

    def judged(what: str, got: float, wanted: float, *, below: bool = False) -> str:
        met = got <= wanted if below else got >= wanted
        return f"{'met ' if met else 'MISS'}  {what}: {got:.2f} ({'at most' if below else 'at least'} {wanted:g})"

    def of(model: str, name: str, protocol: str, load: str, field: str) -> float | None:
        if faults(results, model, name, protocol):
            return None
        return lane(results, model, name, protocol, load=load, field=field)

    for protocol, wanted in (("json", 2.2), ("binary", 2.8), ("grpc", 1.6)):
        ours, theirs = (of("mlp", name, protocol, most, "rate") for name in ("servax", "pytriton"))
        if ours and theirs:
            yield judged(f"MLP, {protocol}, {most} callers, against PyTriton", ours / theirs, wanted)
        ours = of("mlp", "servax", protocol, least, "p50")
        rivals = _others(results, "mlp", lambda name, p=protocol: of("mlp", name, p, least, "p50"))
        if ours and rivals:
            best = min(rivals, key=lambda name: rivals[name])
            yield judged(f"MLP, {protocol}, p50 alone, against {PEERS[best].title}", ours / rivals[best], 1, below=True)
        p50, p99 = (of("mlp", "servax", protocol, most, field) for field in ("p50", "p99"))
        if p50 and p99:
            yield judged(f"MLP, {protocol}, {most} callers, p99 over p50", p99 / p50, 2, below=True)
    ours = of("encoder", "servax", "json", most, "rate")
    rivals = _others(results, "encoder", lambda name: of("encoder", name, "json", most, "rate"))
    if ours and rivals:
        best = max(rivals, key=lambda name: rivals[name])
        yield judged(f"encoder, {most} callers, against {PEERS[best].title}", ours / rivals[best], 1.2)
    policies = [max(_bare(run["policy"]).values()) for run in results["runs"] if "policy" in run]
    if ours and policies:
        yield judged("encoder, against the best policy in a bare loop", ours / statistics.median(policies), 0.95)
        own = [run["policy"][OURS] for run in results["runs"] if OURS in run.get("policy", {})]
        if own:
            share = statistics.median(own) / statistics.median(policies)
            yield judged("encoder, in process, against the best policy in a bare loop", share, 0.95)
    alone = of("encoder", "servax", "json", least, "rate")
    if ours and alone:
        yield judged(f"encoder, {most} callers against {least}", ours / alone, 1.0)
    for model in results["options"]["models"]:
        mine = memory(results, model, "servax")
        sizes = _others(results, model, lambda name, m=model: memory(results, m, name))
        if mine and sizes:
            best = min(sizes, key=lambda name: sizes[name])
            yield judged(f"{model}, peak memory, against {PEERS[best].title}", mine / sizes[best], 1.25, below=True)
    if "servax" in results["cold"]:
        compiled = results["cold"]["servax"]["compiles_after_ready"]
        yield judged("cold mixed traffic, compiles after ready", compiled, 0, below=True)


def _others(results: Results, model: str, value: Callable[[str], float | None]) -> dict[str, float]:
    names = {name for name, _ in lanes(results, model) if name != "servax"}
    return {name: found for name in names if (found := value(name)) is not None}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _bare(rates: dict[str, float]) -> dict[str, float]:
    """Rates of the policies, without servax's own."""
    return {name: rate for name, rate in rates.items() if name != OURS}
