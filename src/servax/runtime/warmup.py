"""Warm means run: every program has run with arrays like those of real traffic before the servable is ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from servax.core.errors import ServaxError, StartupError
from servax.core.events import StepAdvanced, emit, step
from servax.core.tensors import Signature
from servax.runtime.executor import Executor
from servax.runtime.runner import Buffers, Runner, ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import ProgramTable

Key = tuple[str, Bucket]

RUNS_ELSEWHERE = 3
"""Runs of each program on anything but a CPU."""


def runs_of(platform: str, *, stateful: bool) -> int:
    """How often a program runs before ready; the first run pays for what is lazy in the runtime and is not measured.

    On a CPU once, since the second run is as fast as any later one. It costs a start its time and serves only for
    costs, which `measure` finds when somebody asks for them. Not so with a state: a later run of ours would change it.
    """
    if platform == "cpu":
        return 2 if stateful else 1
    return RUNS_ELSEWHERE


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
    """Runs every program on the device's thread; gives the median seconds of those that ran more than once.

    The state of stateful functions starts anew afterwards.

    Raises:
      StartupError: a program failed, or would have compiled; names it.
    """
    costs: dict[Key, float] = {}
    with step("warm", len(grid)):
        for key in grid:
            served = functions[key[0]]
            buffers = _buffers(served.signature, key)
            runs = runs_of(executor.device.platform, stateful=served.stateful)
            began = time.perf_counter()
            try:
                executor.call(lambda: _check(runner, key, buffers, served.signature))  # noqa: B023 (called at once)
                seconds = [executor.call(lambda: _run(runner, key, buffers)) for _ in range(runs - 1)]  # noqa: B023
            except ServaxError as error:
                raise StartupError(
                    f"{label(key)} failed while it was warmed: {error.what}",
                    where=label(key),
                    seen=error.seen,
                    expected=error.expected,
                    remedy=error.remedy,
                ) from error
            if seconds:
                costs[key] = statistics.median(seconds)
            on_done(key)
            emit(StepAdvanced("warm", label(key), time.perf_counter() - began))
        executor.call(runner.reset_state)
    return costs


def measure(executor: Executor, runner: Runner, functions: Mapping[str, ServedFunction], key: Key) -> float:
    """Seconds of one run of a warm, stateless program, when its turn has come.

    Raises:
      ExecutionError: it failed.
      NotReady: the device's thread has ended.
    """
    buffers = filled(functions[key[0]].signature, key[1])
    return executor.call(lambda: _run(runner, key, buffers))


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


def _check(runner: Runner, key: Key, buffers: Buffers, signature: Signature) -> None:
    """The first run of a program, whose outputs must be those of the signature.

    Raises:
      StartupError: they are not; every difference is listed.
    """
    outputs, _ = runner.run(*key, buffers)
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


def _run(runner: Runner, key: Key, buffers: Buffers) -> float:
    _, times = runner.run(*key, buffers)
    return sum(times.values())
