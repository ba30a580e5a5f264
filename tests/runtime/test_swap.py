import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import CheckpointError, ExecutionError, NotReady
from servax.core.tensors import Signature, TensorSpec
from servax.runtime.servable import State
from servax.runtime.swap import difference, is_finite, sample
from servax.stages.buckets import Bucket

NAN = float("nan")


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


@pytest.fixture
def servable():
    with toys.toy() as ready:
        yield ready.warm()


def test_leaves_that_are_not_finite_are_refused_and_all_named(servable):
    with pytest.raises(CheckpointError) as caught:
        servable.swap("nan,inf")
    assert caught.value.what == "2 of 2 new parameters hold NaN or infinity"
    assert (caught.value.where, caught.value.seen) == ("nan,inf", "layer/bias, layer/scale")
    assert "allow_nonfinite=True" in caught.value.remedy
    np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_leaves_that_are_not_finite_go_live_when_told_to(servable):
    assert servable.swap("3,nan", allow_nonfinite=True).finite is False
    assert np.isnan(servable.predict(x=row(1))["y"]).all()


def test_leaves_that_were_not_finite_before_may_stay_so():
    with toys.toy(params=toys.params(2, NAN)).warm() as servable:
        assert servable.swap("3,inf").finite is False
        with pytest.raises(CheckpointError) as caught:
            servable.swap("nan,nan")
        assert caught.value.seen == "layer/scale"
        assert servable.swap("3,1").finite is True


def test_drift_is_the_largest_difference_over_the_largest_old_answer(servable):
    """By hand: y = 2x + 1 before and 5x - 1 after, over the fixed x; the sum does not see the parameters."""
    report = servable.swap("5,-1")
    (x,) = sample(toys.PREDICT, Bucket.of(batch=1, length=8))
    assert report.finite is True
    assert set(report.drift) == {"predict", "total"}
    assert report.drift["predict"] == pytest.approx(np.abs(3 * x - 2).max() / np.abs(2 * x + 1).max(), rel=1e-5)
    assert report.drift["total"] == 0


def test_measuring_drift_leaves_state_as_it_is(servable):
    one = np.ones(4, np.float32)
    servable.count(x=one)
    servable.swap("5,-1")
    assert servable.count(x=one)["seen"][0] == 2


def test_runs_for_drift_wait_their_turn():
    servable, held = toys.held_toy()
    with servable, ThreadPoolExecutor(2) as pool:
        running = pool.submit(servable.predict, x=row(1))
        held.entered.wait()
        swapping = pool.submit(servable.swap, "5,-1")
        while servable._executor.waiting == 0:
            assert not swapping.done()
        held.release.set()
        assert running.result()["y"][0, 0] == 3
        assert swapping.result().drift["predict"] > 0


def test_parameters_that_a_program_fails_with_do_not_go_live():
    key = ("predict", Bucket.of(batch=1, length=8))
    good = toys.table()[key].program

    def refuses(params, state, inputs):
        if float(jax.device_get(params[0])) == -1:
            raise RuntimeError("not with these")
        return good(params, state, inputs)

    with toys.toy(table=toys.with_program(key, refuses)).warm() as servable:
        with pytest.raises(ExecutionError, match="failed on the device"):
            servable.swap("5,-1")
        np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_a_swap_in_flight_when_the_servable_is_closed_puts_nothing_back():
    restoring, go = threading.Event(), threading.Event()

    def slow(checkpoint, /):
        restoring.set()
        assert go.wait(60)
        return toys.params(5, -1)

    servable = toys.toy(swapper=slow).warm()
    with toys.toy("keeps the thread").warm(), ThreadPoolExecutor(1) as pool:
        swapping = pool.submit(servable.swap, "elsewhere")
        restoring.wait()
        servable.close()
        go.set()
        with pytest.raises(NotReady):
            swapping.result()
    assert servable.state is State.UNLOADED
    with pytest.raises(NotReady):
        _ = servable._runner.params


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_every_floating_kind_is_looked_at(dtype):
    leaf = np.zeros((3, 2), dtype)
    assert is_finite(jax.device_put(leaf))
    leaf[2, 1] = NAN
    assert not is_finite(jax.device_put(leaf))
    assert not is_finite(leaf)


def test_the_last_element_of_a_large_leaf_counts_and_integers_are_finite():
    leaf = np.zeros(2**20 + 1, np.float32)
    leaf[-1] = np.inf
    assert not is_finite(jax.device_put(leaf))
    assert is_finite(np.full(3, -1, np.int32))
    assert is_finite(np.zeros((0,), np.float32))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([1.0], [NAN], np.inf),
        ([0.0], [0.0], 0.0),
        ([0.0], [1.0], np.inf),
        ([3 + 4j], [3 + 3j], 0.2),
    ],
)
def test_differences_by_hand(old, new, expected):
    assert difference(np.array(old), np.array(new)) == pytest.approx(expected)


def test_samples_are_the_same_each_time_and_valid_indices():
    signature = Signature(
        (
            TensorSpec("tokens", "int32", ("batch", "length"), pad=7),
            TensorSpec("n", "int32", ("batch",)),
            TensorSpec("image", "bfloat16", ("batch", 2)),
        ),
        lengths={"n": "length"},
    )
    image, n, tokens = sample(signature, Bucket.of(batch=2, length=3))
    np.testing.assert_array_equal(n, [3, 3])
    np.testing.assert_array_equal(tokens, np.zeros((2, 3), np.int32))
    assert image.dtype == ml_dtypes.bfloat16
    assert np.std(image.astype(np.float32)) > 0
    np.testing.assert_array_equal(image, sample(signature, Bucket.of(batch=2, length=3))[0])
