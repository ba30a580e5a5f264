import contextlib

import jax
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import ExecutionError, NotReady, RecompileError
from servax.protocols.dataplane import DataPlane
from servax.runtime.runner import ServedFunction
from servax.runtime.servable import State
from servax.runtime.watch import FAILURES, Watch
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import LoadedProgram, ProgramTable

LARGE = Bucket.of(batch=4, length=16)


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


class Breakable:
    """The toy's programs; those of `broken` raise as JAX does when a device is lost."""

    def __init__(self) -> None:
        self.broken: set[tuple[str, Bucket]] = set()
        whole = toys.table()
        self.table = ProgramTable({key: LoadedProgram(self._program(key, whole[key].program), "jit") for key in whole})

    def _program(self, key, program):
        def call(params, state, inputs):
            if key in self.broken:
                raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")
            return program(params, state, inputs)

        return call


def test_a_device_that_runs_nothing_any_more_fails_the_servable():
    programs = Breakable()
    with toys.toy(table=programs.table).warm() as servable:
        plane = DataPlane([servable])
        programs.broken = set(toys.GRID)
        for _ in range(FAILURES):
            assert (servable.state, plane.ready, plane.live) == (State.READY, True, True)
            with pytest.raises(ExecutionError, match="the program failed on the device"):
                servable.predict(x=row(1))
        assert (servable.state, plane.ready, plane.live) == (State.FAILED, False, False)
        assert "runs nothing any more" in servable.reason
        assert "INTERNAL: the device is lost" in servable.reason
        with pytest.raises(NotReady) as caught:
            servable.predict(x=row(1))
        assert caught.value.seen.startswith("FAILED: the device runs nothing any more")


def test_one_program_that_fails_says_nothing_about_the_device():
    programs = Breakable()
    with toys.toy(table=programs.table).warm() as servable:
        programs.broken = {("predict", LARGE)}
        for _ in range(3 * FAILURES):
            with pytest.raises(ExecutionError):
                servable.predict(x=np.ones((4, 16), np.float32))
        assert servable.state is State.READY
        assert servable.predict(x=row(1))["y"][0, 0] == 3


class Scripted:
    """A runner whose runs end as told, one after another."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.ran = []
        self.resets = 0

    def run(self, function, bucket, buffers, meanwhile=None):
        self.ran.append((function, bucket))
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome
        return (), {}

    def reset_state(self) -> None:
        self.resets += 1


def told_by(runner: Scripted, requests: int, functions=toys.FUNCTIONS, grid=toys.GRID) -> list[str]:
    told: list[str] = []
    watch = Watch(runner, functions, grid, told.append)
    for _ in range(requests):
        with contextlib.suppress(RuntimeError, RecompileError):
            watch.run("predict", LARGE, ())
    assert runner.outcomes == []
    return told


def test_only_failures_in_a_row_are_looked_into():
    lost = RuntimeError("lost")
    runner = Scripted(lost, lost, None, lost, lost, None)
    assert told_by(runner, 6) == []
    assert runner.ran == [("predict", LARGE)] * 6


def test_the_smallest_program_without_a_state_is_run_and_failing_it_is_told_once():
    runner = Scripted(*[RuntimeError("lost")] * 8)
    (reason,) = told_by(runner, 7)
    assert reason.endswith("RuntimeError: lost")
    assert [run for run in runner.ran if run != ("predict", LARGE)] == [("predict", Bucket.of(batch=1, length=8))]
    assert runner.resets == 0


def test_calls_that_would_have_compiled_do_not_count():
    assert told_by(Scripted(*[RecompileError("stopped")] * 9), 9) == []


def test_where_all_have_a_state_it_starts_anew_after_the_look():
    functions = {"predict": ServedFunction(toys.PREDICT, stateful=True)}
    grid = BucketGrid({"predict": (Bucket.of(batch=1, length=8), LARGE)})
    runner = Scripted(*[RuntimeError("lost")] * 3, None)
    assert told_by(runner, 3, functions, grid) == []
    assert runner.resets == 1
