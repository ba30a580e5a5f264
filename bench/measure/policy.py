"""How many rows a second the encoder computes in a bare loop, without any server: what a policy of batching can reach.

64 requests wait all the time, as under 64 callers: of those, a policy picks what runs in the next call, and as many new
ones come in their place. Executables are compiled ahead, for the buckets that servax has.

    python -m measure.policy FOLDER SECONDS
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from measure import models, processes

WAITING = 64
Rows = list[np.ndarray]
Bucket = tuple[int, int]


def measure(folder: Path, core: int, seconds: float, nice: int) -> dict[str, float]:
    """Rows/s by policy, measured in a process of its own on one core."""
    done = subprocess.run(
        processes.pinned(core, [sys.executable, "-m", "measure.policy", str(folder), str(seconds)], nice),
        start_new_session=True,
        env=processes.environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def smallest(buckets: list[Bucket], rows: int, length: int) -> Bucket:
    """The bucket with the fewest tokens that holds so many rows of such a length."""
    return min((each for each in buckets if each[0] >= rows and each[1] >= length), key=lambda each: each[0] * each[1])


def one_by_one(waiting: Rows, buckets: list[Bucket]) -> tuple[Rows, Bucket]:
    """The oldest request alone."""
    return waiting[:1], smallest(buckets, 1, len(waiting[0]))


def by_length(waiting: Rows, buckets: list[Bucket]) -> tuple[Rows, Bucket]:
    """The oldest request with the others of its step of 16, up to 256 tokens a call; alone where there are none."""
    length = -(-len(waiting[0]) // 16) * 16
    fitting = [row for row in waiting if length - 16 < len(row) <= length]
    full = max(
        batch for batch, size in buckets if size == length and batch <= len(fitting) and batch * size <= models.TOKENS
    )
    if full == 1:
        return one_by_one(waiting, buckets)
    return fitting[:full], (full, length)


def main() -> None:
    import jax

    from network import encoder

    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax_cache" / "policy"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with np.load(models.parameters_file("encoder", folder)) as arrays:
        params = {name: jax.device_put(array) for name, array in arrays.items()}
    buckets = [(bucket["batch"], bucket["length"]) for bucket in models.grid()]
    programs: dict[Bucket, Any] = {}
    for batch, length in buckets:
        shapes = (jax.ShapeDtypeStruct((batch, length), np.int32), jax.ShapeDtypeStruct((batch,), np.int32))
        programs[batch, length] = jax.jit(encoder).lower(params, *shapes).compile()
    rows = [row[0] for row in models.requests("encoder", 256)]
    policies = {"one by one": one_by_one, "by length": by_length}
    rates: dict[str, float] = {}
    for name, policy in policies.items():
        rates[name] = _rate(programs, params, rows, policy, seconds)
    print(json.dumps(rates))


def _rate(
    programs: Mapping[Bucket, Any],
    params: Mapping[str, Any],
    rows: Rows,
    policy: Callable[[Rows, list[Bucket]], tuple[Rows, Bucket]],
    seconds: float,
) -> float:
    buckets = list(programs)
    order = np.random.default_rng(2).permutation(len(rows))
    waiting = [rows[number] for number in order[:WAITING]]
    taken, done = WAITING, 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        chosen, (batch, length) = policy(waiting, buckets)
        tokens = np.zeros((batch, length), np.int32)
        n = np.zeros(batch, np.int32)
        for number, row in enumerate(chosen):
            tokens[number, : len(row)] = row
            n[number] = len(row)
        np.asarray(programs[batch, length](params, tokens, n)["output"])
        gone = {id(row) for row in chosen}
        waiting = [row for row in waiting if id(row) not in gone]
        while len(waiting) < WAITING:
            waiting.append(rows[order[taken % len(order)]])
            taken += 1
        done += len(chosen)
    return done / spent


if __name__ == "__main__":
    main()
