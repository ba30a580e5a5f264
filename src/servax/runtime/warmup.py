"""Warm means run: every program has run with arrays like those of real traffic before the servable is ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from servax.core.errors import ServaxError, StartupError
from servax.core.events import StepAdvanced, emit, step
from servax.core.tensors import Signature
from servax.runtime.costs import Key
from servax.runtime.executor import Executor
from servax.runtime.runner import Buffers, Runner, ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import ProgramTable

RUNS = 3
"""Measured runs of each program, at most; on anything but a CPU also at least."""

ENOUGH = 0.05
"""Seconds of runs of one program after which a CPU's start goes on with what it has."""


def runs_enough(platform: str, seconds: Sequence[float]) -> bool:
    """Whether a program has run often enough before ready, given the seconds of its runs so far.

    The first run pays for what is lazy in the runtime. It is measured only where it takes so long that this is little
    beside it; what real batches take corrects it soon.
    """
    if platform == "cpu" and sum(seconds) >= ENOUGH:
        return True
    return len(seconds) > RUNS


def cost_of(seconds: Sequence[float]) -> float:
    """The median of a program's runs, without the first where there is another."""
    return statistics.median(seconds[1:] or seconds)


def label(key: Key) -> str:
    """`function@bucket`."""
    return f"{key[0]}@{key[1].label}"


def require_all(table: ProgramTable, grid: BucketGrid) -> None:
    """Raises StartupError, listing them all, when the grid has buckets that the table lacks programs for."""
    if missing := [label(key) for key in grid if key not in set(table)]:
        raise StartupError(
            "there is no program for some buckets",
            where=", ".join(missing),
            seen=f"{len(table)} programs",
            expected=f"{len(grid)}, one for each bucket of the grid",
            remedy="build the bundle again with these buckets",
        )


def warm_up(
    executor: Executor,
    runner: Runner,
    functions: Mapping[str, ServedFunction],
    grid: BucketGrid,
    on_done: Callable[[Key], None],
) -> dict[Key, float]:
    """Runs every program on the device's thread; gives its seconds, medians of blocked runs on an idle device.

    The state of stateful functions starts anew afterwards.

    Raises:
      StartupError: a program failed, or would have compiled; names it.
    """
    costs: dict[Key, float] = {}
    with step("warm", len(grid)):
        for key in grid:
            served = functions[key[0]]
            buffers = _buffers(served.signature, key)
            began = time.perf_counter()
            try:
                seconds = [executor.call(partial(_check, runner, key, buffers, served.signature))]
                while not runs_enough(executor.device.platform, seconds):
                    seconds.append(executor.call(partial(_run, runner, key, buffers)))
            except ServaxError as error:
                raise StartupError(
                    f"{label(key)} failed while it was warmed: {error.what}",
                    where=label(key),
                    seen=error.seen,
                    expected=error.expected,
                    remedy=error.remedy,
                ) from error
            costs[key] = cost_of(seconds)
            on_done(key)
            emit(StepAdvanced("warm", label(key), time.perf_counter() - began))
        executor.call(runner.reset_state)
    return costs


def filled(signature: Signature, bucket: Bucket) -> Buffers:
    """Inputs of a bucket's full size: pad values, and true lengths that fill the bucket; in order of name."""
    sizes = bucket.mapping()
    return tuple(
        np.full(
            spec.concrete(sizes),
            sizes[signature.lengths[spec.name]] if spec.name in signature.lengths else spec.pad,
            spec.numpy_dtype,
        )
        for spec in sorted(signature.inputs, key=lambda spec: spec.name)
    )


def _buffers(signature: Signature, key: Key) -> Buffers:
    try:
        return filled(signature, key[1])
    except (MemoryError, ValueError, OverflowError) as error:
        raise StartupError(
            "the inputs of a bucket do not fit into memory",
            where=label(key),
            seen=f"{type(error).__name__}: {error}",
            remedy="build the bundle with smaller buckets",
        ) from error


def _check(runner: Runner, key: Key, buffers: Buffers, signature: Signature) -> float:
    """The first run of a program, whose outputs must be those of the signature; gives its seconds.

    Raises:
      StartupError: they are not; every difference is listed.
    """
    outputs, times = runner.run(*key, buffers)
    sizes = key[1].mapping()
    specs = sorted(signature.outputs, key=lambda spec: spec.name)
    expected = [f"{spec.name}: {spec.dtype}{list(spec.concrete(sizes))}" for spec in specs]
    seen = [f"{array.dtype.name}{list(array.shape)}" for array in outputs]
    if [text.partition(": ")[2] for text in expected] != seen:
        raise StartupError(
            "a program does not give the outputs that its signature says",
            where=label(key),
            seen=", ".join(seen),
            expected=", ".join(expected),
            remedy="build the bundle again: its manifest and its programs do not belong together",
        )
    return sum(times.values())


def _run(runner: Runner, key: Key, buffers: Buffers) -> float:
    _, times = runner.run(*key, buffers)
    return sum(times.values())
