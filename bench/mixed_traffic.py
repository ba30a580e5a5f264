"""300 requests over every batch size and length up to the limits: servax against plain `jax.jit`, the same traffic.

Both run in this process, one request at a time, so that every compilation is counted by one `jax.monitoring` listener
of this script's own. Printed are compilations, the median and the slowest request of each bucket, and both sides'
requests over 100 ms. Raw numbers go to bench/results/mixed_traffic.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import jax.monitoring
import numpy as np

import servax
from servax.bench.naive import naive
from servax.runtime.local import LocalServable
from servax.runtime.request import InferRequest
from workloads import machine, minilm_bundle, minilm_checkpoint, write_results

LARGEST = {"batch": 8, "length": 128}


def traffic(count: int, seed: int = 0) -> list[np.ndarray]:
    """Token ids `[batch, length]`: every batch size, lengths spread over 2..128, in random order."""
    random = np.random.default_rng(seed)
    lengths = np.linspace(2, LARGEST["length"], count).round().astype(int)
    random.shuffle(lengths)
    batches = np.resize(np.arange(1, LARGEST["batch"] + 1), count)
    random.shuffle(batches)
    return [
        random.integers(1000, 30000, (batch, length), dtype=np.int32)
        for batch, length in zip(batches, lengths, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiled.append(name) if "backend_compile" in name else None
    )
    requests = traffic(arguments.requests)
    servable = servax.load(minilm_bundle(["aot"]), require="aot")
    plain = naive("servax.zoo.minilm:model", str(minilm_checkpoint()))

    results: dict[str, dict[str, list[float]]] = {}
    compiles: dict[str, int] = {}
    answers: dict[str, list[np.ndarray]] = {}
    for name, side in (("servax", servable), ("plain jax.jit", plain)):
        before = len(compiled)
        by_bucket: dict[str, list[float]] = {}
        answers[name] = []
        for tokens in requests:
            request = InferRequest("predict", {"tokens": tokens})
            began = time.perf_counter()
            result = side.infer(request)
            seconds = time.perf_counter() - began
            bucket = _bucket(servable, tokens.shape)
            by_bucket.setdefault(bucket, []).append(seconds)
            answers[name].append(np.asarray(result.tensors["embedding"]))
        results[name] = by_bucket
        compiles[name] = len(compiled) - before
    worst = max(
        float(np.abs(ours - theirs).max())
        for ours, theirs in zip(answers["servax"], answers["plain jax.jit"], strict=True)
    )

    print(f"{'bucket':<24}{'requests':>9}" + "".join(f"{name + ' median':>22}{'slowest':>12}" for name in results))
    for bucket in sorted(results["servax"], key=lambda label: [int(p.split("=")[1]) for p in label.split(",")]):
        cells = "".join(
            f"{statistics.median(times) * 1e3:>19.1f} ms{max(times) * 1e3:>9.1f} ms"
            for times in (by_bucket[bucket] for by_bucket in results.values())
        )
        print(f"{bucket:<24}{len(results['servax'][bucket]):>9}{cells}")
    for name, by_bucket in results.items():
        every = [seconds for times in by_bucket.values() for seconds in times]
        late = sum(seconds > 0.1 for seconds in every)
        print(f"{name}: {compiles[name]} compilations, total {sum(every):.1f} s, {late} of {len(every)} over 100 ms")
    print(f"largest difference between the answers: {worst:.1e}")
    write_results(Path(__file__), {"machine": machine(), "compiles": compiles, "seconds": results, "difference": worst})
    servable.close()


def _bucket(servable: LocalServable, shape: tuple[int, ...]) -> str:
    from servax.stages.buckets import choose

    return choose(servable.grid["predict"], {"batch": shape[0], "length": shape[1]}).label


if __name__ == "__main__":
    main()
