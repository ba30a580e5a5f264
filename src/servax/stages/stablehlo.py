"""StableHLO modules looked into and re-serialized: text, digest, operations, constants, versions.

A module comes as the portable artifact that `jax.export` serializes (bytes), as `jax.stages.Lowered`, or as text.
The bindings are those that JAX publishes (`jax.extend.mlir`), over MLIR and StableHLO as they were built into jaxlib.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.mlir as portable
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as dialect
from jax.interpreters.mlir import make_ir_context

from servax.core.errors import BuildError, first_line

Source = bytes | str | jax.stages.Lowered

# MLIR bytecode opens with this magic, the bytecode's version (one byte below 128) and the producer's name:
# https://mlir.llvm.org/docs/BytecodeFormat/. A portable artifact's producer is the version of StableHLO it is for.
_HEADER = re.compile(rb"ML\xefR[\x00-\xff]StableHLO_v(\d+\.\d+\.\d+)\x00")

_STRUCTURE = {"builtin.module", "func.func", "func.return", "stablehlo.return", "sdy.mesh"}


def text(source: Source) -> str:
    """The module as text, for people to read, without source locations."""
    return str(_module(source))


def digest(source: Source) -> str:
    """SHA-256 over the module's text: equal for equal programs, wherever the sources lie that they were traced from."""
    return hashlib.sha256(text(source).encode()).hexdigest()


def operations(source: Source) -> dict[str, int]:
    """How often each operation stands in the module, most frequent first.

    Names carry their dialect (`stablehlo.dot_general`), custom calls their target
    (`stablehlo.custom_call lapack_sgetrf_ffi`). A function that is called twice counts once; modules, meshes,
    functions and returns are not counted.
    """
    counter = Counter(_name(operation) for operation in _walk(source) if operation.name not in _STRUCTURE)
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))


def custom_calls(source: Source) -> tuple[str, ...]:
    """The targets of the module's custom calls, each once: LAPACK, callbacks into Python, shape assertions."""
    return tuple(
        sorted({_target(operation) for operation in _walk(source) if operation.name == "stablehlo.custom_call"})
    )


def constant_bytes(source: Source) -> int:
    """Bytes of the arrays that stand in the module; a constant of one repeated value takes no space and counts 0."""
    total = 0
    for operation in _walk(source):
        # With a limit of one element, MLIR elides the value of exactly those constants that hold several.
        if operation.name == "stablehlo.constant" and "__elided__" in operation.get_asm(large_elements_limit=1):
            shape = ir.RankedTensorType(operation.results[0].type)
            total += math.prod(shape.shape) * _element_bytes(shape.element_type)
    return total


def for_version(artifact: bytes, version: str) -> bytes:
    """A portable artifact, serialized for the consumer whose StableHLO has this version (`1.13.7`).

    Composites (`jax.lax.erf` is one) become calls of what they are composed of: TensorFlow works out the shapes inside
    a call of symbolic dimensions, but not inside a composite.

    A consumer newer than the installed jaxlib gets jaxlib's own version: StableHLO reads five years back.

    Raises:
      BuildError: the module holds an operation that the version does not know, or the version is none that jaxlib
        writes.
    """
    module = _module(artifact)
    _decompose(module)
    try:
        target = min(version, current_version(), key=_number)
        return portable.serialize_portable_artifact(module, target)
    except Exception as error:
        # MLIR reports what it found in exceptions of many kinds: each one means the version cannot express the module.
        raise BuildError(
            f"the program cannot be written for StableHLO {version}",
            seen=f"a program for {version_of(artifact)}: {first_line(error)}",
            expected=f"a version from {minimum_version()} to {current_version()} that has every operation of it",
            remedy="use a consumer with a newer StableHLO, or leave the operation out of the function",
        ) from error


def version_of(artifact: bytes) -> str:
    """The version of StableHLO that a portable artifact was serialized for, from its header.

    Raises:
      ValueError: these bytes are not a portable artifact.
    """
    match = _HEADER.match(artifact[:64])
    if match is None:
        raise ValueError("not a StableHLO portable artifact: its header names no version")
    return match[1].decode()


def current_version() -> str:
    """The version of StableHLO that the installed jaxlib was built with."""
    return str(dialect.get_current_version())


def minimum_version() -> str:
    """The oldest version of StableHLO that the installed jaxlib serializes for."""
    return str(dialect.get_minimum_version())


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _module(source: Source) -> Any:
    if isinstance(source, jax.stages.Lowered):
        return source.compiler_ir("stablehlo")
    # JAX's context knows every dialect that JAX emits, Shardy's among them.
    context = make_ir_context()
    if isinstance(source, str):
        return ir.Module.parse(source, context)
    return portable.deserialize_portable_artifact(source, context)


def _walk(source: Source) -> Iterator[Any]:
    # The module is held here: operations are views of it.
    module = _module(source)
    yield from _visit(module.operation)


def _visit(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _visit(inner.operation)


def _decompose(module: Any) -> None:
    # Collected first: operations are added and erased below.
    for composite in [each for each in _visit(module.operation) if each.name == "stablehlo.composite"]:
        with ir.InsertionPoint(composite), composite.location:
            call = ir.Operation.create(
                "func.call",
                results=[result.type for result in composite.results],
                operands=list(composite.operands),
                attributes={"callee": composite.attributes["decomposition"]},
            )
        for old, new in zip(composite.results, call.results, strict=True):
            old.replace_all_uses_with(new)
        composite.erase()


def _name(operation: Any) -> str:
    name: str = operation.name
    return f"{name} {_target(operation)}" if name == "stablehlo.custom_call" else name


def _target(operation: Any) -> str:
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def _element_bytes(kind: Any) -> int:
    if isinstance(kind, ir.ComplexType):
        return 2 * _element_bytes(ir.ComplexType(kind).element_type)
    return max(1, kind.width // 8)
