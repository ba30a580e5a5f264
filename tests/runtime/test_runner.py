import jax
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import NotReady, RecompileError
from servax.runtime.guard import guarded
from servax.runtime.runner import Runner
from servax.stages.buckets import Bucket

ONE = Bucket.of(batch=1, length=8)


@pytest.fixture
def runner() -> Runner:
    return Runner(toys.table(), toys.FUNCTIONS, toys.params(), toys.STATE, jax.devices()[0])


def test_outputs_come_back_with_the_time_of_each_step(runner):
    with guarded():
        outputs, times = runner.run("predict", ONE, [np.ones((1, 8), np.float32)])
    np.testing.assert_array_equal(outputs[0], np.full((1, 8), 3))
    assert list(times) == ["transfer", "execute", "copy"]
    assert all(seconds >= 0 for seconds in times.values())


@pytest.mark.parametrize(
    ("buffer", "cause"),
    [
        (np.ones((3, 8), np.float32), "input 'x': shape (3, 8), made for (1, 8)"),
        (np.ones((1, 8), np.int32), "input 'x': dtype int32, made for float32"),
    ],
)
def test_arguments_that_would_compile_are_named(runner, buffer, cause):
    with guarded(), pytest.raises(RecompileError) as caught:
        runner.run("predict", ONE, [buffer])
    assert caught.value.where == "predict@batch=1,length=8"
    assert caught.value.seen == cause
    assert "dtypes, shapes and device" in caught.value.remedy


def test_parameters_given_as_numpy_are_copied():
    scale = np.full((), 2, np.float32)
    params = {("layer", "bias"): np.zeros((), np.float32), ("layer", "scale"): scale}
    runner = Runner(toys.table(), toys.FUNCTIONS, params, toys.STATE, jax.devices()[0])
    scale[...] = 100
    with guarded():
        outputs, _ = runner.run("predict", ONE, [np.ones((1, 8), np.float32)])
    assert outputs[0][0, 0] == 2


def test_bytes_and_leaves_are_those_of_the_parameters(runner):
    assert (runner.parameter_bytes, runner.parameter_count) == (8, 2)
    assert runner.replace(runner.fit(toys.params(7, 7))) == 8


def test_nothing_is_put_back_once_everything_was_let_go_of(runner):
    fresh = runner.fit(toys.params(7, 7))
    runner.drop()
    with pytest.raises(NotReady, match="closed before the new parameters") as caught:
        runner.replace(fresh)
    assert caught.value.remedy == "load it again"
    with pytest.raises(NotReady):
        _ = runner.params


def test_a_run_takes_other_parameters_in_place_of_the_present_ones(runner):
    with guarded():
        other, _ = runner.run("predict", ONE, [np.ones((1, 8), np.float32)], params=runner.fit(toys.params(7, 7)))
        mine, _ = runner.run("predict", ONE, [np.ones((1, 8), np.float32)])
    assert (other[0][0, 0], mine[0][0, 0]) == (14, 3)
