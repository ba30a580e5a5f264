import jax
import jax.numpy as jnp

from servax.targets.indexing import index_bounds


def bounds(function, *arguments):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    integers = {chr(97 + n): n for n, each in enumerate(arguments) if jnp.issubdtype(each.dtype, jnp.integer)}
    return index_bounds(jaxpr, integers)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_an_embedding_bounds_its_tokens():
    assert bounds(lambda t, e: e[t], integers(2, 7), floats(65, 8)) == {"a": 65}
    assert bounds(lambda t, e: jnp.take(e, t, axis=0), integers(2, 7), floats(65, 8)) == {"a": 65}
    assert bounds(lambda t, e: jnp.take(e, t, axis=1), integers(2, 7), floats(8, 31)) == {"a": 31}


def test_the_smallest_table_wins():
    assert bounds(lambda t, e, p: e[t] + p[t], integers(3), floats(65, 8), floats(12, 8)) == {"a": 12}


def test_each_part_of_an_index_is_bounded_by_its_own_axis():
    def pick(t, x):
        return x[jnp.arange(x.shape[0]), t]

    assert bounds(pick, integers(3), floats(3, 40, 5)) == {"a": 40}


def test_take_along_axis():
    assert bounds(lambda t, x: jnp.take_along_axis(x, t[:, None], axis=1), integers(3), floats(3, 40)) == {"a": 40}


def test_calls_and_loops_are_looked_into():
    def scanned(t, e):
        return jax.lax.scan(lambda carry, token: (carry, e[token]), 0, t)[1]

    assert bounds(scanned, integers(9), floats(33, 8)) == {"a": 33}
    assert bounds(jax.jit(lambda t, e: e[t]), integers(9), floats(33, 8)) == {"a": 33}
    mapped = jax.vmap(lambda token, e: e[token], in_axes=(0, None))
    assert bounds(mapped, integers(9), floats(33, 8)) == {"a": 33}

    def branched(flag, e):
        return jax.lax.cond(flag > 0, lambda: e[flag], lambda: e[0])

    assert bounds(branched, integers(), floats(33, 8)) == {"a": 33}


def test_a_dynamic_slice_bounds_its_start():
    def window(t, x):
        return jax.lax.dynamic_slice(x, (t, jnp.int32(0)), (4, 2))

    assert bounds(window, integers(), floats(10, 2)) == {"a": 7}


def test_numbers_that_index_nothing_are_unbounded():
    assert bounds(lambda t, x: x * t, integers(3), floats(3)) == {}
    assert bounds(lambda t, e, w: w[jnp.argmax(e[t])], integers(), floats(65, 8), floats(9)) == {"a": 65}
