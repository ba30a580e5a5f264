import dataclasses

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import StartupError
from servax.core.events import StepAdvanced, StepFinished, StepStarted, listening
from servax.core.tensors import Signature, TensorSpec
from servax.runtime.warmup import ENOUGH, _buffers, cost_of, filled, runs_enough
from servax.stages.buckets import Bucket


def kind(leaf):
    """What JAX would compile anew for, were it another."""
    if isinstance(leaf, np.ndarray):
        return ("on the host", leaf.dtype, leaf.shape)
    return (str(leaf.sharding), leaf.committed, leaf.shape)


def test_every_program_runs_before_ready_with_arrays_like_those_of_real_traffic():
    calls = {}

    def watched(key):
        program = toys.table()[key].program

        def call(params, state, inputs):
            calls.setdefault(key, []).append(
                ({kind(leaf) for leaf in (*params, *state)}, {kind(leaf) for leaf in inputs})
            )
            return program(params, state, inputs)

        return call

    table = toys.table()
    for key in table:
        table = type(table)({**table.programs, key: type(table[key])(watched(key), "jit")})
    with toys.toy(table=table) as servable:
        servable.warm()
        assert set(calls) == set(toys.GRID)
        servable.predict(x=np.ones((1, 3), np.float32))
        first, *rest = calls["predict", Bucket.of(batch=1, length=8)]
        assert all(run == first for run in rest), "real traffic differs from what was warmed"


def test_a_program_runs_until_its_cost_is_known_and_a_cpu_s_start_does_not_wait_for_slow_ones():
    fast = ENOUGH / 100
    assert [runs_enough("cpu", [fast] * runs) for runs in range(1, 5)] == [False, False, False, True]
    assert [runs_enough("cpu", [ENOUGH / 2] * runs) for runs in range(1, 4)] == [False, True, True]
    assert runs_enough("cpu", [ENOUGH])
    assert [runs_enough("gpu", [ENOUGH] * runs) for runs in range(1, 5)] == [False, False, False, True]


def test_a_cost_is_the_median_and_the_first_run_counts_only_where_it_is_the_only_one():
    assert cost_of([9.0, 1.0, 5.0, 2.0]) == 2.0
    assert cost_of([9.0, 1.0]) == 1.0
    assert cost_of([9.0]) == 9.0


def test_progress_is_told_program_by_program():
    told = []
    with toys.toy() as servable, listening(told.append):
        servable.warm()
    steps = [event for event in told if isinstance(event, StepStarted | StepAdvanced | StepFinished)]
    assert (steps[0].step, steps[0].total) == ("warm", len(toys.GRID))
    assert [event.detail for event in steps[1:-1]] == [f"{name}@{bucket.label}" for name, bucket in toys.GRID]
    assert isinstance(steps[-1], StepFinished)


def test_a_program_that_fails_is_named():
    key = ("total", Bucket.of(batch=4, length=16))

    def broken(params, state, inputs):
        raise ValueError("no good")

    with toys.toy(table=toys.with_program(key, broken)) as servable:
        with pytest.raises(StartupError) as caught:
            servable.warm()
        assert caught.value.where == "total@batch=4,length=16"
        assert "no good" in caught.value.seen
        assert len(servable.progress.left) == 2


def test_buffers_hold_pad_values_and_full_lengths():
    signature = Signature(
        (
            TensorSpec("tokens", "int32", ("batch", "length"), pad=7),
            TensorSpec("n", "int32", ("batch",)),
            TensorSpec("mask", "bool", ("batch", 2)),
        ),
        lengths={"n": "length"},
    )
    mask, n, tokens = filled(signature, Bucket.of(batch=2, length=3))
    np.testing.assert_array_equal(mask, np.zeros((2, 2), bool))
    np.testing.assert_array_equal(n, [3, 3])
    np.testing.assert_array_equal(tokens, np.full((2, 3), 7))
    assert [array.dtype.name for array in (mask, n, tokens)] == ["bool", "int32", "int32"]


def test_costs_are_there_once_it_is_warm():
    with toys.toy() as servable:
        assert servable.costs == {}
        servable.warm()
        assert set(servable.costs) == set(toys.GRID)
        assert all(seconds > 0 for seconds in servable.costs.values())
        assert servable.count(x=np.ones(4, np.float32))["seen"][0] == 1, "warming left something in the state"


def test_a_program_with_other_outputs_than_its_signature_does_not_become_ready():
    """As after a manifest was edited, or put beside programs of another bundle."""
    wrong = dataclasses.replace(toys.TOTAL, outputs=(TensorSpec.parse("sum", "float32[batch, 2]"),))
    functions = {**toys.FUNCTIONS, "total": dataclasses.replace(toys.FUNCTIONS["total"], signature=wrong)}
    with toys.toy(functions=functions) as servable, pytest.raises(StartupError) as caught:
        servable.warm()
    assert caught.value.where == "total@batch=1,length=16"
    assert caught.value.seen == "float32[1]"
    assert caught.value.expected == "sum: float32[1, 2]"


def test_inputs_that_do_not_fit_into_memory_are_named():
    huge = Bucket.of(batch=2**31 - 1, length=2**31 - 1)
    with pytest.raises(StartupError) as caught:
        _buffers(toys.TOTAL, ("total", huge))
    assert caught.value.where == f"total@{huge.label}"
