import ml_dtypes
import numpy as np
import pytest

from servax.core.errors import BundleError
from servax.targets.samples import (
    LIMIT,
    SAMPLED,
    Draw,
    Expected,
    Golden,
    Rounding,
    Sample,
    Step,
    from_bytes,
    kept,
    norm_of,
    to_bytes,
)


def golden(size, dtype=np.float32):
    draw = Draw(7, "normal", "float32", (size,))
    step = Step(
        {"x": draw},
        {"y": Expected.of(np.arange(size).astype(dtype)), "z": Expected.of(np.ones((1, 2), dtype))},
        {"seen": Expected.of(np.zeros(3, np.int32))},
        {"x": draw.array()},
    )
    sample = Sample("full", {"batch": size}, (step, step))
    return Golden("predict", f"batch={size}", (sample,), {"y": {"cpu": Rounding(2.0**-24, 1e-6)}}, 0.25)


def test_a_draw_is_numpys_frozen_stream():
    # The first numbers of RandomState(0).standard_normal, as every version of NumPy has printed them.
    np.testing.assert_allclose(
        Draw(0, "normal", "float32", (3,)).array(), [1.76405235, 0.40015721, 0.97873798], rtol=1e-6
    )


def test_integers_stay_within_their_bounds_and_reach_them():
    values = Draw(1, "integers", "int32", (1000,), low=0, high=4).array()
    assert values.dtype == np.int32
    assert sorted(set(values.tolist())) == [0, 1, 2, 3, 4]


def test_seeds_use_all_32_bits():
    values = Draw(1, "integers", "uint32", (1000,), high=2**32 - 1).array()
    assert values.dtype == np.uint32
    assert values.max() > 2**32 * 0.99
    assert values.min() < 2**32 * 0.01


def test_positive_floats_coins_and_complex_numbers():
    assert (Draw(1, "positive", "float32", (100,), high=0.1).array() >= 0).all()
    coins = Draw(1, "coin", "bool", (100,)).array()
    assert coins.dtype == bool
    assert 20 < coins.sum() < 80
    assert np.abs(Draw(1, "normal", "complex64", (100,)).array().imag).max() > 0
    assert Draw(1, "normal", "bfloat16", (4,)).array().dtype == ml_dtypes.bfloat16


def test_past_the_rows_lengths_stands_the_fill():
    draw = Draw(3, "integers", "int32", (2, 4), low=1, high=9, lengths=(3, 1), length_axis=1, fill=-7)
    values = draw.array()
    assert (values == -7).tolist() == [[False, False, False, True], [False, True, True, True]]
    across = Draw(3, "normal", "float32", (5, 4, 2), lengths=(3, 1), row_axis=2, length_axis=1, fill=0.5).array()
    assert (across[:, 3, 0] == 0.5).all()
    assert (across[:, 1:, 1] == 0.5).all()
    assert (across[:, :3, 0] != 0.5).all()
    assert (across[:, 0, 1] != 0.5).all()


def test_one_row_is_that_row_of_the_whole():
    whole = Draw(3, "normal", "float32", (4, 6))
    row = Draw(3, "normal", "float32", (4, 6), row=2)
    np.testing.assert_array_equal(row.array(), whole.array()[2:3])


def test_lengths_are_given_not_drawn():
    np.testing.assert_array_equal(Draw(0, "lengths", "int32", (3,), lengths=(5, 2, 1)).array(), [5, 2, 1])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_small_samples_come_back_whole(dtype):
    given = golden(10, dtype)
    read = from_bytes(to_bytes(given))
    assert read.function == "predict"
    assert read.bucket == "batch=10"
    assert read.rounding == given.rounding
    assert read.precision == 0.25
    (sample,) = read.samples
    assert sample.sizes == {"batch": 10}
    assert len(sample.steps) == 2
    for ours, theirs in zip(sample.steps, given.samples[0].steps, strict=True):
        assert ours.draws == theirs.draws
        np.testing.assert_array_equal(ours.inputs["x"], theirs.inputs["x"])
        assert ours.outputs["y"].indices is None
        assert ours.outputs["y"].values.dtype == dtype
        np.testing.assert_array_equal(ours.outputs["y"].values, theirs.outputs["y"].values)
        np.testing.assert_array_equal(ours.state["seen"].values, [0, 0, 0])


def test_large_samples_keep_recipes_elements_and_norms():
    size = 50_000
    data = to_bytes(golden(size), limit=100_000)
    assert len(data) < 2 * (SAMPLED * 12 + 200) + 4096
    (sample,) = from_bytes(data).samples
    step = sample.steps[1]
    np.testing.assert_array_equal(step.inputs["x"], np.random.RandomState(7).standard_normal(size).astype(np.float32))
    kept = step.outputs["y"]
    assert kept.shape == (size,)
    assert kept.indices is not None
    np.testing.assert_array_equal(kept.values, kept.indices.astype(np.float32))
    assert kept.indices.max() > 0.99 * size
    # the sum of the squares 0 to n-1
    assert kept.norm == pytest.approx(((size - 1) * size * (2 * size - 1) / 6) ** 0.5)
    assert step.outputs["z"].indices is None


def test_a_file_stays_under_16_mib():
    given = golden(3 * 2**20)
    assert (
        sum(step.inputs["x"].nbytes + step.outputs["y"].values.nbytes for step in given.samples[0].steps) > 16 * 2**20
    )
    assert len(to_bytes(given)) < 16 * 2**20


def test_damage_is_an_error_that_names_the_file():
    data = to_bytes(golden(4))
    with pytest.raises(BundleError) as caught:
        from_bytes(data[:30], "golden/predict/batch=4.safetensors")
    assert caught.value.where == "golden/predict/batch=4.safetensors"


def test_another_format_is_named():
    data = to_bytes(golden(4)).replace(b'{\\"format\\":1', b'{\\"format\\":9')
    with pytest.raises(BundleError) as caught:
        from_bytes(data, "g")
    assert caught.value.seen == "format 9"
    assert caught.value.expected == "format 1"


def test_of_a_large_state_elements_and_norms_are_kept_and_of_another_the_same_elements():
    cache = np.arange(LIMIT // 4 + 1, dtype=np.float32)
    found = kept({"cache": cache, "positions": np.array([3, 4], np.int32)})
    assert found["cache"].values.size == SAMPLED
    np.testing.assert_array_equal(found["cache"].values, cache[found["cache"].indices])
    assert found["cache"].norm == pytest.approx(float(np.linalg.norm(cache.astype(np.float64))))
    np.testing.assert_array_equal(found["positions"].values, [3, 4])
    other = found["cache"].like(2 * cache)
    np.testing.assert_array_equal(other.values, 2 * found["cache"].values)
    assert other.norm == pytest.approx(2 * found["cache"].norm)


def test_half_of_what_is_kept_of_a_cache_are_elements_that_were_written():
    cache = np.zeros(LIMIT, ml_dtypes.bfloat16)
    cache[1000:9000] = 3
    (found,) = kept({"cache": cache}).values()
    assert np.count_nonzero(found.values) >= SAMPLED // 2
    np.testing.assert_array_equal(found.values, cache[found.indices])


def test_a_small_state_is_copied_whole():
    state = np.ones(3, np.float32)
    found = kept({"s": state})
    state[0] = 7
    np.testing.assert_array_equal(found["s"].values, [1, 1, 1])


def test_the_norm_leaves_out_what_is_not_finite():
    assert norm_of(np.array([3, np.inf, 4, np.nan], np.float32)) == 5
    assert norm_of(np.array([3 + 4j, 12])) == 13
