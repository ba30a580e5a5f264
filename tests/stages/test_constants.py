from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core.errors import ModelError
from servax.stages.constants import callbacks, check_constants, check_exportable, closed_over

KERNEL = np.arange(200 * 100, dtype=np.float32).reshape(200, 100)  # 80 kB, over the limit of 64 KiB
PARAMS = {"layer": {"kernel": KERNEL, "bias": np.zeros(100, np.float32)}}


def traced(call: Callable[[Any], Any], shape: tuple[int, ...] = (3, 200)) -> jax.stages.Traced:
    return jax.jit(call).trace(jax.ShapeDtypeStruct(shape, jnp.float32))


def refused(trace: jax.stages.Traced, params: Any = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_constants(trace, {} if params is None else params, where="predict@batch=3")
    assert caught.value.where == "predict@batch=3"
    return caught.value


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_weight_that_is_closed_over(kind: Callable[[Any], Any]) -> None:
    kernel = kind(KERNEL)
    error = refused(traced(lambda x: x @ kernel), PARAMS)
    assert error.what == "the function closes over its weights"
    assert "float32[200, 100] of 78.1 KiB, equal to parameter layer/kernel" in str(error.seen)
    assert "test_constants.py" in str(error.seen)
    assert error.expected == "no floating array over 64.0 KiB"
    assert "instead of closing over them" in str(error.remedy)


def test_a_weight_in_a_nested_function_a_loop_or_a_branch() -> None:
    kernel = jnp.asarray(KERNEL)

    def nested(x: Any) -> Any:
        return jax.jit(lambda y: y @ kernel)(x)

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry + x @ kernel, None), jnp.zeros((3, 100)), None, length=2)[0]

    def branch(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ kernel, lambda: jnp.zeros((3, 100)))

    def derived(x: Any) -> Any:
        return jax.checkpoint(lambda y: jax.nn.relu(y @ kernel))(x)

    for call in (nested, loop, branch, derived):
        (constant,) = closed_over(traced(call), PARAMS)
        assert constant.parameter == "layer/kernel"
        assert constant.shape == (200, 100)
        assert constant.bytes == 80_000


def test_only_equal_bytes_are_equal() -> None:
    changed = KERNEL.copy()
    changed[0, 0] += 1
    error = refused(traced(lambda x: x @ changed), PARAMS)
    assert error.what == "the function closes over large arrays"
    assert "equal to parameter" not in str(error.seen)
    assert "attributes of the module" in str(error.remedy)


def test_abstract_parameters_are_not_compared() -> None:
    abstract = {"layer": {"kernel": jax.ShapeDtypeStruct((200, 100), jnp.float32)}}
    assert refused(traced(lambda x: x @ KERNEL), abstract).what == "the function closes over large arrays"


def test_every_large_array_is_listed_largest_first() -> None:
    tables = [np.arange(n, dtype=np.float32) for n in (20_000, 30_000, 10)]
    seen = str(refused(traced(lambda x: [x[0, 0] + table for table in tables])).seen)
    assert seen.index("float32[30000]") < seen.index("float32[20000]")
    assert "float32[10]" not in seen


def test_small_arrays_are_reported_and_pass() -> None:
    table = np.arange(16_384, dtype=np.float32)  # exactly 64 KiB
    (constant,) = check_constants(traced(lambda x: x[0, 0] + table), {"table": table}, where="predict@static")
    assert constant.bytes == 64 << 10
    assert constant.parameter == "table"
    assert str(constant).startswith("float32[16384] of 64.0 KiB, equal to parameter table, used at test_constants.py:")


def test_tables_of_numbers_and_masks_count_towards_the_total_alone() -> None:
    mask = np.tri(1000, dtype=bool)  # 1 MB
    assert len(check_constants(traced(lambda x: jnp.where(mask, x[0, 0], 0)), {}, where="predict@static")) == 1
    table = np.arange(3 << 20, dtype=np.int32)  # 12 MiB
    error = refused(traced(lambda x: x[0, 0] + table))
    assert str(error.seen).startswith("12.0 MiB in 1 arrays: int32[3145728]")
    assert error.expected == "at most 8.0 MiB in all"


def test_an_array_that_is_used_twice_counts_once() -> None:
    table = jnp.arange(7.0)
    assert len(closed_over(traced(lambda x: (x[0, :7] + table, jax.jit(lambda y: y * table)(x[0, :7]))))) == 1


def test_numbers_and_keys() -> None:
    key = jax.random.key(0)
    found = closed_over(traced(lambda x: x * 2.0 + jax.random.uniform(key)))
    assert [constant.dtype for constant in found] == ["key<fry>"]
    assert closed_over(traced(lambda x: x * 2.0)) == ()


def lookup(x: Any) -> Any:
    return x


def calls_back(x: Any) -> Any:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        return jax.pure_callback(lookup, jax.ShapeDtypeStruct((3, 200), jnp.float32), carry), None

    jax.debug.print("{}", x[0, 0])
    return jax.lax.scan(body, x, None, length=2)[0]


def test_callbacks_are_named_with_their_place() -> None:
    found = callbacks(traced(calls_back))
    assert len(found) == 2
    printed, looked_up = sorted(found)
    assert printed.startswith("jax.debug.print, used at test_constants.py:")
    assert looked_up.startswith("jax.pure_callback of lookup, used at test_constants.py:")
    assert looked_up.endswith("(body)") or "body" in looked_up


def test_a_callback_cannot_be_exported() -> None:
    trace = traced(calls_back)
    with pytest.raises(ModelError) as caught:
        check_exportable(trace, where="predict@static")
    error = caught.value
    assert error.where == "predict@static"
    assert "jax.pure_callback of lookup" in str(error.seen)
    assert "jax.debug.print" in str(error.seen)
    assert "remove the callback" in str(error.remedy)
    with pytest.raises(Exception, match=r"."):  # JAX agrees
        jax.export.export(jax.jit(calls_back))(jax.ShapeDtypeStruct((3, 200), jnp.float32)).serialize()


def test_a_function_without_callbacks_passes() -> None:
    trace = traced(jax.nn.gelu)
    assert callbacks(trace) == ()
    check_exportable(trace, where="predict@static")
