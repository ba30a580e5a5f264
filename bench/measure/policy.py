"""How many rows a second the encoder computes in a bare loop, without any server: what a policy of batching can reach.

64 requests wait all the time, as under 64 callers: of those, a policy picks what runs in the next call, and as many new
ones come in their place. Executables are compiled ahead, for the buckets that servax has. Beside the policies, what 64
tasks of this process get from servax itself: its batching, without a server around it.

    python -m measure.policy FOLDER SECONDS CORE
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measure import models, processes

WAITING = 64
OURS = "servax, in process"
Rows = list[np.ndarray]
Bucket = tuple[int, int]


def measure(folder: Path, core: int, seconds: float, nice: int) -> dict[str, float]:
    """Rows/s by policy, measured in a process of its own on one core."""
    done = subprocess.run(
        processes.pinned(core, [sys.executable, "-m", "measure.policy", str(folder), str(seconds), str(core)], nice),
        start_new_session=True,
        env=processes.environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def smallest(buckets: list[Bucket], rows: int, length: int) -> Bucket:
    """The bucket with the fewest tokens that holds so many rows of such a length."""
    return min((each for each in buckets if each[0] >= rows and each[1] >= length), key=lambda each: each[0] * each[1])


@dataclass(frozen=True, slots=True)
class Table:
    """Programs by bucket, with the seconds that each takes."""

    programs: Mapping[Bucket, Callable[[np.ndarray, np.ndarray], np.ndarray]]
    costs: Mapping[Bucket, float]


def one_by_one(waiting: Rows, table: Table) -> tuple[Rows, Bucket]:
    """The oldest request alone."""
    return waiting[:1], smallest(list(table.costs), 1, len(waiting[0]))


def by_length(waiting: Rows, table: Table) -> tuple[Rows, Bucket]:
    """The oldest request with the others of its step of 16, up to 256 tokens a call; alone where there are none."""
    length = -(-len(waiting[0]) // 16) * 16
    fitting = [row for row in waiting if length - 16 < len(row) <= length]
    full = max(
        batch
        for batch, size in table.costs
        if size == length and batch <= len(fitting) and batch * size <= models.TOKENS
    )
    if full == 1:
        return one_by_one(waiting, table)
    return fitting[:full], (full, length)


def by_cost(waiting: Rows, table: Table) -> tuple[Rows, Bucket]:
    """The oldest request, in the bucket where a true token costs least, filled with the longest that fit."""
    oldest, *others = waiting
    others.sort(key=len, reverse=True)
    best: tuple[float, Rows, Bucket] | None = None
    for (batch, length), cost in table.costs.items():
        if length >= len(oldest) and batch * length <= models.TOKENS:
            chosen = [oldest, *[row for row in others if len(row) <= length][: batch - 1]]
            price = cost / sum(map(len, chosen))
            if best is None or price < best[0]:
                best = price, chosen, (batch, length)
    assert best is not None
    return best[1:]


def main() -> None:
    import jax

    from network import encoder

    folder, seconds, core = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax_cache" / "policy"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    with np.load(models.parameters_file("encoder", folder)) as arrays:
        params = {name: jax.device_put(array) for name, array in arrays.items()}
    buckets = [(bucket["batch"], bucket["length"]) for bucket in models.grid()]
    programs: dict[Bucket, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {}
    costs: dict[Bucket, float] = {}
    for batch, length in buckets:
        shapes = (jax.ShapeDtypeStruct((batch, length), np.int32), jax.ShapeDtypeStruct((batch,), np.int32))
        compiled = jax.jit(encoder).lower(params, *shapes).compile()
        programs[batch, length] = lambda tokens, n, compiled=compiled: np.asarray(compiled(params, tokens, n)["output"])
        costs[batch, length] = _cost(programs[batch, length], batch, length)
    table = Table(programs, costs)
    rows = [row[0] for row in models.requests("encoder", 256)]
    policies = {"one by one": one_by_one, "by length": by_length, "by measured cost": by_cost}
    rates = {name: _rate(table, rows, policy, seconds) for name, policy in policies.items()}
    rates[OURS] = asyncio.run(_ours(models.bundle("encoder", folder, ["aot"], core), rows, seconds))
    print(json.dumps(rates))


def _cost(program: Callable[[np.ndarray, np.ndarray], np.ndarray], batch: int, length: int) -> float:
    tokens, n = np.zeros((batch, length), np.int32), np.full(batch, length, np.int32)
    seconds: list[float] = []
    for _ in range(7):
        began = time.perf_counter()
        program(tokens, n)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[3]


def _rate(table: Table, rows: Rows, policy: Callable[[Rows, Table], tuple[Rows, Bucket]], seconds: float) -> float:
    order = np.random.default_rng(2).permutation(len(rows))
    waiting = [rows[number] for number in order[:WAITING]]
    taken, done = WAITING, 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        chosen, (batch, length) = policy(waiting, table)
        tokens = np.zeros((batch, length), np.int32)
        n = np.zeros(batch, np.int32)
        for number, row in enumerate(chosen):
            tokens[number, : len(row)] = row
            n[number] = len(row)
        table.programs[batch, length](tokens, n)
        gone = {id(row) for row in chosen}
        waiting = [row for row in waiting if id(row) not in gone]
        while len(waiting) < WAITING:
            waiting.append(rows[order[taken % len(order)]])
            taken += 1
        done += len(chosen)
    return done / spent


async def _ours(bundle: Path, rows: Rows, seconds: float) -> float:
    """Rows/s of a servable in this process, asked by as many tasks as requests wait in the bare loop."""
    import servax

    servable = servax.load(bundle)
    order = np.random.default_rng(2).permutation(len(rows))
    taken = done = 0
    ends = float("inf")

    async def ask() -> None:
        nonlocal taken, done
        while time.perf_counter() < ends:
            taken += 1
            await servable.predict_async(tokens=rows[order[taken % len(order)]][None])
            done += 1

    try:
        for window in (seconds / 2, seconds):  # the first is not counted: costs are still corrected by it
            done, began = 0, time.perf_counter()
            ends = began + window
            await asyncio.gather(*(ask() for _ in range(WAITING)))
            spent = time.perf_counter() - began
        return done / spent
    finally:
        servable.close()


if __name__ == "__main__":
    main()
