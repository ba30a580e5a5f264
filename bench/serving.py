"""servax against the servers that one would otherwise pick, side by side in one run, on one core each.

The server is kept on one core, the load generator on another. Every server is measured once a run, in turn, and runs
follow one another (A B C A B C), so that a machine whose speed drifts treats all alike; printed are medians of runs.

- Models: an MLP 784-512-512-10, one row a request; an encoder of 4 layers and width 256, lengths uniform in 5..128.
- Closed loop at 1, 16 and 64 callers; open loop at 0.7 of what 64 callers reached, latency from the scheduled time.
- Processor time a request and peak memory, of all the server's processes.
- Cold: 30 s of mixed traffic for the encoder (batches 1 to 8, all lengths) from the moment a server says it is ready.
- Every measurement keeps a sample of answers and compares it with NumPy; a server that answers wrongly is out.
- The load generator's own limit is measured against a server that answers with constant bytes.

    python bench/serving.py [--quick] [--peers servax,pytriton] [--protocols json,binary,grpc] [--models mlp,encoder]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from measure import models, policy, processes, report
from measure.load import Outcome, Plan, measure
from measure.models import MODELS
from measure.peers import PEERS, Server, Unavailable, install, source
from measure.wires import Wire
from workloads import ROOT, machine, write_results

SERVER_CORE, CLIENT_CORE = 0, 1
FRACTION = 0.7
"""Rate of the open loop, of what the closed loop with most callers reached."""
COLD_SECONDS, COLD_REQUESTS = 30.0, 307
TOLERANCE = 2e-3
"""Largest difference to NumPy in float64, of answers between -5 and 5."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a model and NumPy's answers to them."""

    model: str
    given: list[np.ndarray]
    answers: list[np.ndarray | None]
    """Computed when a kept answer is compared with it."""
    encoded: dict[str, tuple[list[dict[str, str]], list[bytes]]] = dataclasses.field(default_factory=dict)
    """Headers and bodies by the name of their encoder, written once."""

    @classmethod
    def of(cls, model: str, count: int, rows: Sequence[int] = (1,)) -> Traffic:
        return cls(model, models.requests(model, count, rows=rows), [None] * count)

    def plan(self, server: Server, protocol: str, **more: Any) -> Plan:
        wire: Wire = server.peer.wires[protocol]
        model = MODELS[self.model]
        key = wire.encode.__name__
        if key not in self.encoded:
            heads = [dict(wire.headers(model, each)) for each in self.given]
            self.encoded[key] = heads, [wire.encode(model, each) for each in self.given]
        heads, bodies = self.encoded[key]
        return Plan(
            wire=wire.transport,
            port=server.port if wire.transport == "http" else server.grpc_port,
            path=wire.path.format(model=self.model),
            heads=heads,
            bodies=bodies,
            order=np.random.default_rng(2).permutation(len(self.given)).tolist(),
            core=CLIENT_CORE,
            nice=server.nice,
            pids=server.pids(),
            **more,
        )

    def wrong(self, wire: Wire, outcome: Outcome) -> list[str]:
        """What is wrong with the answers that were kept."""
        faults: list[str] = []
        for number, body in outcome.kept:
            expected = self.answers[number]
            if expected is None:
                expected = models.answer(self.model, models.parameters(self.model), self.given[number])
                self.answers[number] = expected
            try:
                got = wire.decode(body)
            except (ValueError, KeyError, IndexError) as error:
                faults.append(f"unreadable: {error!r}")
                continue
            if got.shape != expected.shape:
                faults.append(f"shape {got.shape}, not {expected.shape}")
            elif not (np.abs(got - expected) <= TOLERANCE).all():
                faults.append(f"off by {float(np.abs(got - expected).max()):.1e}")
        return faults


def summary(outcome: Outcome, wire: Wire, traffic: Traffic) -> dict[str, Any]:
    """The numbers of one measurement."""
    latencies = np.array(outcome.latencies or [np.nan])
    p50, p99 = np.percentile(latencies, [50, 99])
    faults = traffic.wrong(wire, outcome)
    count = len(outcome.latencies)
    return {
        "rate": count / outcome.seconds,
        "answered": count,
        "p50": float(p50),
        "p99": float(p99),
        "cpu": outcome.server / count if count else None,
        "client": outcome.client,
        "others": outcome.others,
        "late": outcome.late,
        "errors": outcome.errors,
        "checked": len(outcome.kept),
        "wrong": len(faults),
        "fault": faults[0] if faults else None,
    }


def measure_server(
    server: Server, traffic: Traffic, protocols: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Every protocol at every load, on one start of a server."""
    lanes: dict[str, Any] = {}
    for protocol in protocols:
        wire = server.peer.wires[protocol]
        probe = measure(traffic.plan(server, protocol, arrivals=[0.0]))
        if not probe.latencies:
            lanes[protocol] = {"failed": f"no answer: {probe.errors or 'none in time'}"}
            continue
        loads: dict[str, Any] = {}
        for callers in arguments.concurrency:
            plan = traffic.plan(
                server, protocol, seconds=arguments.seconds, warm=arguments.warm, concurrency=callers, keep=37
            )
            loads[str(callers)] = summary(measure(plan), wire, traffic)
        if arguments.open_loop:
            rate = max(load["rate"] for load in loads.values()) * FRACTION
            gaps = np.random.default_rng(3).exponential(1 / rate, max(20, int(rate * arguments.seconds)))
            plan = traffic.plan(server, protocol, arrivals=np.cumsum(gaps).tolist(), concurrency=64, keep=37)
            loads["open"] = summary(measure(plan), wire, traffic) | {"offered": rate}
        lanes[protocol] = loads
    lanes["memory"] = processes.peak_bytes(server.pids())
    lanes["seconds_to_ready"] = server.seconds_to_ready
    if server.peer.script is None:
        lanes["compiles_after_ready"] = server.metric("servax_compiles_after_ready_total")
    return lanes


def measure_cold(server: Server, traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Mixed traffic from the moment the server says it is ready."""
    random = np.random.default_rng(4)
    arrivals = np.sort(random.random(int(COLD_REQUESTS * seconds / COLD_SECONDS)) * seconds).tolist()
    wire = server.peer.wires["json"]
    outcome = measure(traffic.plan(server, "json", arrivals=arrivals, concurrency=64, keep=7))
    result = summary(outcome, wire, traffic)
    result |= {"requests": len(arrivals), "slow": sum(latency > 0.1 for latency in outcome.latencies)}
    result["slow"] += sum(outcome.errors.values())
    result["worst"] = max(outcome.latencies, default=None)
    if server.peer.script is None:
        result["compiles_after_ready"] = server.metric("servax_compiles_after_ready_total")
    return result


def ceilings(traffic: dict[str, Traffic], arguments: argparse.Namespace) -> dict[str, float]:
    """Requests/s of the load generator against a server that answers each request with the same bytes."""
    found: dict[str, float] = {}
    for protocol in arguments.protocols:
        one = traffic.get("mlp") or next(iter(traffic.values()))
        wire = PEERS["servax"].wires[protocol]
        port = processes.free_port()
        command = [sys.executable, "-m", "measure.constant", wire.transport, str(port)]
        child = subprocess.Popen(
            processes.pinned(SERVER_CORE, command, arguments.nice),
            start_new_session=True,
            env=processes.environment(),
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()
            server = Server(
                "servax", Path(), one.model, Path(), 0, Path(), port=port, grpc_port=port, nice=arguments.nice
            )
            seconds = min(2.0, arguments.seconds)
            outcome = measure(one.plan(server, protocol, seconds=seconds, warm=0.3, concurrency=64, keep=10**9))
            found[protocol] = len(outcome.latencies) / outcome.seconds
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    return found


def main() -> None:
    arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the blocks they are in
    folder: Path = arguments.folder
    results: dict[str, Any] = {
        "machine": {**machine(), "load average at start": os.getloadavg()[0]},
        "options": {name: value for name, value in vars(arguments).items() if name != "folder"},
        "unavailable": {},
        "versions": {},
        "runs": [],
        "cold": {},
    }
    began = time.perf_counter()
    pythons: dict[str, Path] = {}
    sources: dict[tuple[str, str], Path] = {}
    for name in arguments.peers:
        try:
            python = install(name, folder.parent.parent / "venvs")
            for model in arguments.models:
                sources[name, model] = source(PEERS[name], model, folder, SERVER_CORE)
        except (Unavailable, subprocess.CalledProcessError) as error:
            results["unavailable"][name] = str(error)
            say(f"{name}: {error}")
        else:
            pythons[name] = python
            results["versions"][name] = versions(python)
    processes.prioritise(arguments.nice)
    traffic = {model: Traffic.of(model, 64 if model == "mlp" else 256) for model in arguments.models}

    def server(name: str, model: str, *, warm: bool) -> Server:
        cache = folder / "jax_cache" / name if warm else None
        log = folder / "logs" / f"{name}-{model}.log"
        return Server(name, pythons[name], model, sources[name, model], SERVER_CORE, log, warm, cache, arguments.nice)

    results["ceilings"] = ceilings(traffic, arguments)
    for number in range(arguments.runs):
        run: dict[str, Any] = {}
        for model in arguments.models:
            run[model] = {}
            for name in pythons:
                protocols = [each for each in arguments.protocols if each in PEERS[name].wires]
                if model == "encoder":
                    protocols = protocols[:1]
                if not protocols or name in results["unavailable"]:
                    continue
                say(f"run {number + 1} of {arguments.runs}: {model}, {name}")
                with ExitStack() as stack:
                    try:
                        started = stack.enter_context(server(name, model, warm=True))
                    except Unavailable as error:
                        results["unavailable"][name] = str(error)
                        say(f"{name}: {error}")
                        continue
                    run[model][name] = measure_server(started, traffic[model], protocols, arguments)
            if model == "encoder" and arguments.policy:
                run["policy"] = policy.measure(folder, SERVER_CORE, arguments.seconds, arguments.nice)
        results["runs"].append(run)
    if arguments.cold and "encoder" in arguments.models and "json" in arguments.protocols:
        mixed = Traffic.of("encoder", COLD_REQUESTS, rows=range(1, 9))
        for name in pythons:
            if name not in results["unavailable"]:
                say(f"cold: {name}")
                with server(name, "encoder", warm=False) as started:
                    results["cold"][name] = measure_cold(started, mixed, arguments.cold)
    results["seconds"] = time.perf_counter() - began
    print(report.text(results))
    if arguments.write:
        write_results(Path(__file__), results, suffix=f"-{time.strftime('%Y-%m-%d')}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(PEERS)
    parser.add_argument("--peers", type=_list, default=list(PEERS), metavar="LIST", help=f"of {names}")
    parser.add_argument("--protocols", type=_list, default=["json", "binary", "grpc"], metavar="LIST")
    parser.add_argument("--models", type=_list, default=["mlp", "encoder"], metavar="LIST", help="of mlp,encoder")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 16, 64], metavar="LIST", help="closed loops")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--warm", type=float, default=0.7, help="seconds of the same load before each measurement")
    parser.add_argument("--cold", type=float, default=COLD_SECONDS, help="seconds of cold mixed traffic; 0: none")
    parser.add_argument("--no-open-loop", dest="open_loop", action="store_false")
    parser.add_argument("--no-policy", dest="policy", action="store_false", help="without the in-process policies")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    parser.add_argument("--nice", type=int, default=0, help="priority; below 0 disturbs less on a busy machine (root)")
    parser.add_argument("--quick", action="store_true", help="one run of short measurements, no cold traffic")
    parser.add_argument("--folder", type=Path, default=ROOT / ".servax" / "bench" / "serving")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.seconds, arguments.warm, arguments.cold = 1, 1.0, 0.4, 0.0
        arguments.concurrency, arguments.open_loop = [1, 64], False
    for given, known in ((arguments.peers, PEERS), (arguments.models, MODELS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return arguments


def versions(python: Path) -> dict[str, str]:
    """Versions of the packages that the numbers depend on, as installed for an interpreter."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions() if d.name"
        " in ('jax','numpy','nvidia-pytriton','fastapi','uvicorn','litserve','bentoml','kserve','ray','tensorflow_cpu',"
        "'tensorflow-cpu','servax')}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
