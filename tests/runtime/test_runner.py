import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import NotReady, RecompileError
from servax.core.tensors import Signature, TensorSpec
from servax.runtime.guard import guarded
from servax.runtime.runner import Runner, ServedFunction
from servax.stages.buckets import Bucket
from servax.targets.target import ProgramTable

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


def test_buffers_may_be_written_to_once_their_outputs_are_copied():
    """On a 64-byte boundary, where JAX takes NumPy's memory as it is: neither state nor outputs may be views of it."""
    keep = toys.compiled(
        lambda params, state, inputs: ((inputs[0],), (state[0], inputs[0])),
        toys.COUNT,
        Bucket(()),
        jax.devices()[0],
        stateful=True,
    )
    table = toys.with_program(("count", Bucket(())), keep.program)
    runner = Runner(table, toys.FUNCTIONS, toys.params(), toys.STATE, jax.devices()[0])
    memory = np.zeros(80, np.uint8)
    buffer = memory[-memory.ctypes.data % 64 :][:16].view(np.float32)
    for value in range(1, 6):
        buffer[...] = value
        with guarded():
            outputs, _ = runner.run("count", Bucket(()), [buffer])
        kept = [np.array(each) for each in outputs]
        buffer[...] = -1
        np.testing.assert_array_equal(kept[0], np.full(4, value - 1))
        np.testing.assert_array_equal(kept[1], np.full(4, value))


def test_inputs_go_to_the_device_of_the_program_whichever_it_is():
    """In a process of its own, with four devices, under the guard: a program of the last one takes NumPy arrays."""
    code = """
import jax, numpy as np
import serving_toys as toys
from servax.runtime.guard import guarded
from servax.runtime.runner import Runner
from servax.stages.buckets import Bucket
device = jax.devices()[3]
runner = Runner(toys.table(device), toys.FUNCTIONS, toys.params(), toys.STATE, device)
with guarded():
    outputs, _ = runner.run("predict", Bucket.of(batch=1, length=8), [np.ones((1, 8), np.float32)])
assert outputs[0].tolist() == [[3.0] * 8]
"""
    path = os.pathsep.join([str(Path(toys.__file__).parent), os.environ.get("PYTHONPATH", "")])
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=os.environ | settings, check=True)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_wide_inputs_are_narrowed_as_jax_does_it(dtype):
    """x64 is off: a program for `int64` is compiled for int32, and takes the request's own arrays."""
    spec = TensorSpec("x", dtype, ("batch", 2))
    signature = Signature((spec,), (TensorSpec("y", dtype, ("batch", 2)),))
    bucket = Bucket.of(batch=1)
    program = toys.compiled(lambda params, state, inputs: ((), (inputs[0] + 1,)), signature, bucket, jax.devices()[0])
    table = ProgramTable({("predict", bucket): program})
    runner = Runner(table, {"predict": ServedFunction(signature)}, toys.params(), (), jax.devices()[0])
    with guarded():
        outputs, _ = runner.run("predict", bucket, [np.ones((1, 2), dtype)])
    assert outputs[0].tolist() == [[2, 2]]
    assert outputs[0].dtype.itemsize == 4


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
