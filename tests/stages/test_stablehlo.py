from __future__ import annotations

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir.dialects import stablehlo as dialect

from servax.core.errors import BuildError
from servax.stages import stablehlo

F32 = jnp.float32


def lowered(call: Any, *shapes: tuple[int, ...]) -> jax.stages.Lowered:
    return jax.jit(call).trace(*(jax.ShapeDtypeStruct(shape, F32) for shape in shapes)).lower()


def exported(call: Any, *shapes: str) -> bytes:
    arguments = [
        jax.ShapeDtypeStruct(shape, F32)
        for shape in (jax.export.symbolic_shape(text) if text else () for text in shapes)
    ]
    return jax.export.export(jax.jit(call))(*arguments).mlir_module_serialized


@pytest.fixture(scope="module")
def symbolic() -> bytes:
    """A module with a shape assertion: the constraint that the second dimension is divisible by 4."""
    scope = jax.export.SymbolicScope()
    batch, length = jax.export.symbolic_shape("batch, 4*length", scope=scope)
    return jax.export.export(jax.jit(lambda x: x.reshape(-1, 4)))(
        jax.ShapeDtypeStruct((batch, length), F32)
    ).mlir_module_serialized


def test_the_version_is_in_the_header(symbolic: bytes) -> None:
    version = stablehlo.version_of(symbolic)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"StableHLO_v{version}".encode() in symbolic[:40]


@pytest.mark.parametrize("data", [b"", b"ML\xefR", b"not an artifact", b"ML\xefR\x0dMLIR20\x00"])
def test_bytes_without_a_version(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a StableHLO portable artifact"):
        stablehlo.version_of(data)


def test_versions_of_the_installed_jaxlib() -> None:
    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    assert number(stablehlo.minimum_version()) < (1, 13, 7) < number(stablehlo.current_version())


@pytest.mark.parametrize("version", ["1.13.0", "1.13.7"])
def test_for_version_changes_the_version_and_nothing_else(symbolic: bytes, version: str) -> None:
    assert stablehlo.custom_calls(symbolic) == ("shape_assertion",)
    older = stablehlo.for_version(symbolic, version)
    assert stablehlo.version_of(older) == version
    assert stablehlo.version_of(symbolic) != version
    assert stablehlo.text(older) == stablehlo.text(symbolic)


def test_an_older_consumer_knows_every_operation_of_what_is_written_for_it(symbolic: bytes) -> None:
    # What fails in TensorFlow: JAX writes custom calls in a form that is newer than the oldest version.
    assert b"custom_call" in stablehlo.for_version(symbolic, "1.13.0")


def test_a_version_that_lacks_an_operation() -> None:
    module = exported(lambda x: x.astype(jnp.float8_e8m0fnu).astype(F32), "2")
    with pytest.raises(BuildError) as caught:
        stablehlo.for_version(module, "1.0.0")
    error = caught.value
    assert error.what == "the program cannot be written for StableHLO 1.0.0"
    assert stablehlo.version_of(module) in str(error.seen)
    assert stablehlo.minimum_version() in str(error.expected)
    assert error.remedy


@pytest.mark.parametrize("version", ["0.1.0", "newest", ""])
def test_a_version_that_jaxlib_does_not_write(symbolic: bytes, version: str) -> None:
    with pytest.raises(BuildError, match=f"StableHLO {version}") as caught:
        stablehlo.for_version(symbolic, version)
    assert stablehlo.current_version() in str(caught.value.expected)


def test_a_consumer_newer_than_jaxlib_gets_jaxlibs_own_version(symbolic: bytes) -> None:
    assert stablehlo.version_of(stablehlo.for_version(symbolic, "99.0.0")) == stablehlo.current_version()


def test_text_of_bytes_of_a_stage_and_of_text() -> None:
    stage = lowered(lambda x: x + 1, (2,))
    text = stablehlo.text(stage)
    assert "stablehlo.add" in text
    assert "loc(" not in text
    assert text == stage.as_text()
    assert stablehlo.text(text) == text
    assert "stablehlo.add" in stablehlo.text(exported(lambda x: x + 1, "2"))


def test_the_digest_is_of_the_program_and_not_of_its_source() -> None:
    def first(x: jax.Array) -> jax.Array:
        return x + 1

    original = first

    def first(x: jax.Array) -> jax.Array:  # the same program from other lines
        return x + 1

    assert stablehlo.digest(exported(original, "2")) == stablehlo.digest(exported(first, "2"))
    assert stablehlo.digest(exported(first, "2")) != stablehlo.digest(exported(first, "3"))
    assert re.fullmatch(r"[0-9a-f]{64}", stablehlo.digest(exported(first, "2")))


def test_operations_are_counted_in_nested_functions_and_bodies() -> None:
    def call(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(carry) @ carry, None

        return jax.lax.scan(body, x, None, length=3)[0] + jax.jit(jnp.sin)(x)

    for source in (lowered(call, (4, 4)), exported(call, "4, 4")):
        operations = stablehlo.operations(source)
        assert operations["stablehlo.tanh"] == 1
        assert operations["stablehlo.sine"] == 1
        assert operations["stablehlo.dot_general"] == 1
        assert operations["stablehlo.while"] == 1
        assert not {"builtin.module", "func.func", "func.return", "stablehlo.return"} & set(operations)
        counts = list(operations.values())
        assert counts == sorted(counts, reverse=True)


def test_custom_calls_are_counted_by_target() -> None:
    stage = lowered(jnp.linalg.cholesky, (3, 3))
    (target,) = stablehlo.custom_calls(stage)
    assert "potrf" in target  # LAPACK's name of the Cholesky factorisation
    assert stablehlo.operations(stage)[f"stablehlo.custom_call {target}"] == 1


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (np.arange(6, dtype=np.float32), 24),
        (np.arange(6, dtype=np.int8), 6),
        (np.arange(6).astype(jnp.bfloat16), 12),
        (np.array([True, False, True]), 3),
        (np.arange(3, dtype=np.complex64), 24),
        (np.zeros((100, 100), np.float32), 0),
    ],
)
def test_constant_bytes(array: np.ndarray[Any, Any], size: int) -> None:
    def call(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * 2, jnp.negative(array) if array.dtype != bool else jnp.logical_not(array)

    assert stablehlo.constant_bytes(lowered(call, (5,))) == size
    assert stablehlo.constant_bytes(exported(call, "5")) == size


def test_the_versions_are_those_of_the_dialect() -> None:
    assert stablehlo.current_version() == dialect.get_current_version()
