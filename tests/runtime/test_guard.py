import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core import monitoring
from servax.core.errors import ExecutionError, RecompileError
from servax.runtime.guard import Aval, differences, explain, guarded

DEVICE = jax.devices()[0]
PUT = jax.device_put(np.ones((2, 3), np.float32), DEVICE)


def test_the_guard_stops_tracing_and_implicit_transfers_and_lets_puts_through():
    compiled = jax.jit(lambda x: x + 1).lower(PUT).compile()
    with guarded():
        assert jax.device_get(compiled(jax.device_put(np.zeros((2, 3), np.float32), PUT.sharding)))[0, 0] == 1
        with pytest.raises(RuntimeError, match="no_tracing"):
            jnp.zeros(3)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            compiled(np.zeros((2, 3), np.float32))
    assert float(jnp.ones(())) == 1, "outside the block nothing is forbidden"


def test_the_guard_marks_its_thread_as_serving():
    monitoring.register()
    before = monitoring.counts(monitoring.SERVING)
    with guarded(), jax.no_tracing(False):
        jax.jit(lambda x: x * 41.5)(PUT)
    assert (monitoring.counts(monitoring.SERVING) - before).compiled >= 1


@pytest.mark.parametrize(
    ("array", "cause"),
    [
        (jax.device_put(np.ones((2, 4), np.float32), DEVICE), "input 'x': shape (2, 4), made for (2, 3)"),
        (jax.device_put(np.ones((2, 3), np.int32), DEVICE), "input 'x': dtype int32, made for float32"),
        (jnp.ones((2, 3)), "input 'x': placement uncommitted, made for committed to cpu:0"),
        (np.ones((2, 3), np.float32), "input 'x': placement on the host, made for committed to cpu:0"),
        (1.0, "input 'x': weak type True, made for False"),
    ],
)
def test_every_cause_of_a_recompilation_is_named(array, cause):
    assert cause in differences([Aval.of("input 'x'", PUT)], [Aval.of("input 'x'", array)])


def test_weak_types_and_structure_are_causes():
    weak = jax.device_put(jnp.asarray(1.0), DEVICE)
    strong = jax.device_put(np.float32(1.0), DEVICE)
    assert "p: weak type True, made for False" in differences([Aval.of("p", strong)], [Aval.of("p", weak)])
    assert differences([Aval.of("p", strong)], []) == ("structure: 0 arguments, made for 1",)
    assert differences([Aval.of("p", strong)], [Aval.of("p", strong)]) == ()


def test_an_error_with_differing_arguments_is_a_recompilation():
    error = explain(TypeError("x"), "f@batch=1", [Aval.of("input 'x'", PUT)], [Aval.of("input 'x'", np.ones(3))])
    assert isinstance(error, RecompileError)
    assert error.where == "f@batch=1"
    assert "shape (3,), made for (2, 3)" in error.seen
    assert "dtype float64, made for float32" in error.seen


def test_other_errors_are_the_device_s():
    same = [Aval.of("input 'x'", PUT)]
    error = explain(RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), "f@batch=1", same, same)
    assert type(error) is ExecutionError
    assert "out of memory" in error.remedy
    assert explain(RuntimeError("boom"), "f@batch=1", same, same).seen == "RuntimeError: boom"


def test_avals_read_as_jax_writes_them():
    assert Aval.of("x", PUT).text() == "float32[2, 3], committed to cpu:0"
