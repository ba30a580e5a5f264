import functools
from dataclasses import replace

import jax
import jax.export
import numpy as np
import pytest

from servax.stages import stablehlo


@functools.partial(jax.lax.composite, name="tests.square")
def square(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * x, y * y


def scan(x: jax.Array) -> jax.Array:
    """Composites inside a body, where a walk over the top level would miss them."""
    return jax.lax.fori_loop(0, 3, lambda _, carry: sum(square(carry, jax.lax.erf(carry))), x)


def test_composites_become_calls_of_what_they_are_composed_of() -> None:
    exported = jax.export.export(jax.jit(scan))(jax.ShapeDtypeStruct((4,), np.float32))
    before = stablehlo.operations(exported.mlir_module_serialized)
    after = stablehlo.operations(stablehlo.for_version(exported.mlir_module_serialized, "1.13.7"))
    composites = before.pop("stablehlo.composite")
    calls = before.pop("func.call", 0)
    assert composites >= 1
    assert after.pop("func.call") == calls + composites
    assert after == before


@pytest.mark.parametrize("size", [1, 5])
def test_the_numbers_stay(size: int) -> None:
    x = np.linspace(-1, 1, size, dtype=np.float32)
    exported = jax.export.export(jax.jit(scan))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    older = stablehlo.for_version(exported.mlir_module_serialized, "1.13.7")
    np.testing.assert_allclose(replace(exported, mlir_module_serialized=older).call(x), scan(x), rtol=1e-6)
