import jax
import jax.numpy as jnp
import pytest

from servax.targets.rounding import LOOP, estimate
from servax.targets.samples import Rounding

F32 = 2.0**-24
BF16 = 2.0**-8


def rounding(function, *arguments, platform="cpu"):
    (found,) = estimate(jax.make_jaxpr(function)(*arguments), ["y"]).values()
    return found[platform]


def ones(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_dot_rounds_once_per_term():
    assert rounding(lambda a, b: a @ b, ones(3, 1024), ones(1024, 2)).error == pytest.approx(F32 * 32)


def test_dots_in_a_row_add_in_quadrature():
    def twice(a, b):
        return a @ b @ b

    assert rounding(twice, ones(8, 100), ones(100, 100)).error == pytest.approx(F32 * 200**0.5)


def test_the_longest_path_counts_not_their_sum():
    def wide(a, b):
        return jnp.concatenate([a @ b] * 8)

    assert rounding(wide, ones(8, 100), ones(100, 100)).error == pytest.approx(F32 * 10)


def test_moving_data_rounds_nothing_but_is_compared_within_one_unit():
    found = rounding(lambda a: a.T.reshape(-1)[:4], ones(3, 4))
    assert found.error == F32
    assert found.unit == F32


def test_integers_of_integers_and_of_what_was_given_are_exact():
    assert rounding(lambda a: a * 2 + 1, ones(8, dtype=jnp.int32)) == Rounding(0.0, 0.0)
    assert rounding(lambda a: jnp.argmax(a.T), ones(8, 8)).unit == 0
    assert rounding(lambda a: a > 0.5, ones(8)).unit == 0


def test_integers_that_rounded_values_decide_have_their_rounding():
    assert rounding(lambda a: jnp.argmax(a @ a), ones(8, 64, 64)).error == pytest.approx(F32 * 8)
    assert rounding(lambda a: (a @ a > 0).sum() + 1, ones(64, 64)).error == pytest.approx(F32 * 8)
    assert rounding(lambda a, b: jnp.where((a @ a)[0] > 0, b, 1), ones(64, 64), ones(64, dtype=jnp.int32)).unit == F32
    assert rounding(lambda a: jax.lax.cond(a.sum() > 1, lambda: 1, lambda: 2), ones(64)).unit == F32


def test_what_a_loop_counts_is_exact_unless_rounded_values_end_it():
    def fixed(a):
        return jax.lax.scan(lambda carry, _: ((carry[0] * 2.0, carry[1] + 1), None), (a, 0), length=9)[0][1]

    def ended(a):
        return jax.lax.while_loop(lambda y: y[0].sum() < 1, lambda y: (y[0] * 2.0, y[1] + 1), (a, 0))[1]

    def decided(a):
        def body(carry, _):
            return (carry[0] * 2.0, carry[2], (carry[0] > 1).sum()), None

        return jax.lax.scan(body, (a, 0, 0), length=9)[0][1]

    assert rounding(fixed, ones(4)) == Rounding(0.0, 0.0)
    assert rounding(ended, ones(4)).unit == F32
    assert rounding(decided, ones(4)).unit == F32


def test_bfloat16_rounds_each_result_and_sums_in_float32():
    found = rounding(lambda a, b: a @ b, ones(8, 64, dtype=jnp.bfloat16), ones(64, 8, dtype=jnp.bfloat16))
    assert found.unit == BF16
    assert found.error == pytest.approx((BF16**2 + 63 * F32**2) ** 0.5)


def test_a_narrow_step_on_the_way_sets_the_unit():
    def narrow(a):
        return (a.astype(jnp.bfloat16) * 2).astype(jnp.float32)

    assert rounding(narrow, ones(4)).unit == BF16


def test_widening_is_exact():
    assert rounding(lambda a: a.astype(jnp.float32), ones(4, dtype=jnp.bfloat16)).error == F32


def test_a_gpu_multiplies_float32_in_tf32_unless_told_otherwise():
    def dot(a, b):
        return a @ b

    def exact(a, b):
        return jnp.matmul(a, b, precision="highest")

    assert rounding(dot, ones(8, 8), ones(8, 8), platform="cuda").unit == 2.0**-11
    assert rounding(dot, ones(8, 8), ones(8, 8), platform="tpu").unit == BF16
    assert rounding(exact, ones(8, 8), ones(8, 8), platform="cuda").unit == F32
    with jax.default_matmul_precision("highest"):
        assert rounding(lambda a, b: a @ b, ones(8, 8), ones(8, 8), platform="cuda").unit == F32


def test_loops_count_their_trips():
    def loop(a):
        return jax.lax.fori_loop(0, 9, lambda _, y: y * 2.0, a)

    def scan(a):
        return jax.lax.scan(lambda carry, _: (carry * 2.0, None), a, length=9)[0]

    def until(a):
        return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y * 2.0, a)

    assert rounding(loop, ones(4)).error == pytest.approx(F32 * 3)
    assert rounding(scan, ones(4)).error == pytest.approx(F32 * 3)
    assert rounding(until, ones(4)).error == pytest.approx(F32 * LOOP**0.5)


def test_branches_count_by_the_longer_one():
    def branch(flag, a):
        return jax.lax.cond(flag, lambda y: y * 2.0, lambda y: y * 2.0 * 3.0 * 4.0 * 5.0, a)

    assert rounding(branch, ones(dtype=bool), ones(4)).error == pytest.approx(F32 * 2)


def test_calls_are_looked_into():
    @jax.jit
    def inner(a, b):
        return a @ b

    assert rounding(lambda a: inner(a, a), ones(16, 16)).error == pytest.approx(F32 * 4)
    assert rounding(jax.checkpoint(lambda a: a @ a), ones(16, 16)).error == pytest.approx(F32 * 4)


def test_reductions_convolutions_and_scatters_count_their_terms():
    assert rounding(lambda a: a.sum(axis=1), ones(2, 49)).error == pytest.approx(F32 * 7)
    assert rounding(jnp.cumsum, ones(25)).error == pytest.approx(F32 * 5)

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert rounding(convolve, ones(1, 8, 8, 4), ones(3, 3, 4, 16)).error == pytest.approx(F32 * 6)


def test_factorizations_get_room_for_their_condition():
    assert rounding(jnp.linalg.inv, ones(8, 8)).error > F32 * 80


def test_random_keys_and_seeds_pass_through():
    def noise(seed):
        keys = jax.vmap(jax.random.key)(seed)
        return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)

    assert rounding(noise, ones(3, dtype=jnp.uint32)).unit == F32
