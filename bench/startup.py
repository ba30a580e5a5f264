"""From process start to ready: `aot` against `jit` without a cache, on MiniLM with 12 buckets, side by side.

Each start is a process of its own; the two alternate, so that a machine whose speed drifts treats them alike. Printed
are medians and their ratio:

- imports: until the server's modules are there;
- restore: the parameters, onto the device;
- executables: loaded by `aot`; traced, lowered and compiled by `jit`, on all cores;
- warm: one run of every program;
- other: the manifest, the tokenizer; for `jit` the model's source, the shapes of its outputs, and its probe;
- total: from the start of the process.

Raw numbers go to bench/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from workloads import machine, minilm_bundle, write_results

PARTS = ("imports", "restore", "executables", "warm", "other", "total")


def child(bundle: str, require: str) -> None:
    """One start, measured from inside; prints JSON."""
    import jax.monitoring

    compiles: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiles.append(name) if name.startswith("/jax/core/compile") else None
    )
    from servax.api.load import load
    from servax.core.events import Event, StepFinished, listening

    started = float(os.environ["STARTED"])
    imported = time.time()
    seconds: dict[str, float] = {}

    def listener(event: Event) -> None:
        if isinstance(event, StepFinished):
            seconds[event.step] = event.seconds

    with listening(listener):
        servable = load(bundle, require=require, warm=False)
        loaded = time.time()
        servable.warm()
    ready = time.time()
    parts = {
        "imports": imported - started,
        "restore": seconds["restore"],
        "executables": seconds["load executables" if require == "aot" else "compile"],
        "warm": ready - loaded,
    }
    parts |= {"other": ready - started - sum(parts.values()), "total": ready - started}
    print(json.dumps({**parts, "compile_events": len(compiles)}))
    servable.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs=2, metavar=("BUNDLE", "REQUIRE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return

    bundle = minilm_bundle(["jit", "aot"])
    runs: dict[str, list[dict[str, float]]] = {"aot": [], "jit": []}
    for number in range(arguments.runs + 1):
        for wrapper, results in runs.items():
            command = [sys.executable, __file__, "--child", str(bundle), wrapper]
            environment = {**os.environ, "STARTED": repr(time.time())}
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            if number:  # the first of each warms the page cache
                results.append(json.loads(output.splitlines()[-1]))
    medians = {
        wrapper: {part: statistics.median(run[part] for run in results) for part in (*PARTS, "compile_events")}
        for wrapper, results in runs.items()
    }
    print(f"{'':<18}{'aot':>10}{'jit':>10}{'jit / aot':>12}")
    for part in PARTS:
        aot, jit = medians["aot"][part], medians["jit"][part]
        print(f"{part:<18}{aot:>8.3f} s{jit:>8.3f} s{jit / aot:>11.2f}x")
    print(f"{'compile events':<18}{medians['aot']['compile_events']:>10.0f}{medians['jit']['compile_events']:>10.0f}")
    write_results(Path(__file__), {"machine": machine(), "runs": runs, "medians": medians})


if __name__ == "__main__":
    main()
