"""The `export` wrapper: portable `jax.export` artifacts, one per bucket, and a symbolic one where it traces.

An artifact holds `f(params, inputs)`, or `f(params, state, inputs)`, over plain dictionaries: a script with JAX alone
calls it by `jax.export.deserialize(data).call(params, {"tokens": tokens})`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export

from servax.core.device import PLATFORMS, Device, platform_of
from servax.core.errors import ModelError, first_line
from servax.core.events import Notice, emit
from servax.core.tensors import TensorSpec
from servax.core.trees import Tree, flatten, unflatten
from servax.model.function import Function
from servax.stages import cost, pipeline, stablehlo
from servax.stages.buckets import Bucket
from servax.stages.constants import Constant, check_constants, check_exportable
from servax.stages.pipeline import run_parallel
from servax.targets.bundle import Bundle, amend
from servax.targets.child_protocol import Job
from servax.targets.expiry import export_expiry
from servax.targets.jaxpart import JaxPart
from servax.targets.lowering import compile_export, lower_export, read_export
from servax.targets.manifest import SYMBOLIC, ProgramRecord, TargetName
from servax.targets.target import LoadedProgram, Materials, corners

NAME: TargetName = "export"
FROM_EXPORTS: bool = False
PORTABLE: bool = True

_REPORTED_CONSTANT = 1024
"""Bytes from which a closed-over array is worth a line."""


@dataclass(frozen=True, slots=True)
class ExportedProgram:
    """A serialized export.

    Attributes:
      data: its bytes.
      record: of the manifest; `record.file` says where in the bundle it belongs.
      constants: arrays that the function closes over and that are small enough to stay in the program.
    """

    data: bytes
    record: ProgramRecord
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True, slots=True)
class NotSymbolic:
    """Why a function has no symbolic export; no fault of the function, its buckets serve as before."""

    reason: str


def export(function: Function, bucket: Bucket, params: Tree, platforms: Sequence[str] = PLATFORMS) -> ExportedProgram:
    """A function exported at one bucket.

    Args:
      function: what to export; `state` and `signature` say its other arguments.
      bucket: the sizes of its dimensions.
      params: the nested dictionary of parameters; arrays are compared with what the function closes over.
      platforms: of `cpu`, `cuda`, `rocm`, `tpu`, those that it shall run on.

    Raises:
      ModelError: the function closes over weights or large arrays, calls back into Python, or uses an operation that
        has no portable form.
    """
    jitted = _jitted(function)
    arguments = pipeline.nested_avals(function, bucket, params)
    stages = pipeline.trace(jitted, arguments, function=function.name, bucket=bucket)
    check_exportable(stages.traced, where=stages.where)
    constants = check_constants(stages.traced, params, where=stages.where)
    start = time.perf_counter()
    try:
        exported = jax.export.export(jitted, platforms=tuple(platforms))(*arguments)
        data = bytes(exported.serialize())
    except Exception as error:
        # The function traced; what remains are lowering rules and checks of portability, and they raise what they like.
        raise ModelError(
            "the function cannot be exported",
            where=stages.where,
            seen=first_line(error),
            expected=f"operations that have a portable form on {', '.join(platforms)}",
            remedy="replace the operation named above (attention: implementation='xla'), or drop the platform",
        ) from error
    seconds = {**stages.seconds, "lower": time.perf_counter() - start}
    return replace(_exported(function, bucket.label, exported, data, seconds=seconds), constants=constants)


def export_symbolic(
    function: Function, largest: Bucket, params: Tree, platforms: Sequence[str] = PLATFORMS
) -> ExportedProgram | NotSymbolic:
    """A function exported with symbols for its dimensions: for all of them, else for the batch dimension alone.

    Dimensions that must keep a size get that of `largest`, and are listed in the record's `fixed`. Constraints
    between symbols do not survive serialization: whoever calls the artifact keeps to the signature.
    """
    dims = function.signature.dims
    if not dims:
        return NotSymbolic("the function has no named dimension")
    attempts = [dims]
    if function.signature.batch in dims and len(dims) > 1:
        attempts.append((function.signature.batch,))
    reasons: list[str] = []
    for free in attempts:
        fixed = {name: size for name, size in largest.sizes if name not in free}
        try:
            start = time.perf_counter()
            jitted = _jitted(function)
            arguments = _symbolic_avals(function, params, free, fixed)
            traced = jitted.trace(*arguments)
            check_exportable(traced, where=f"{function.name}@{SYMBOLIC}")
            seconds = {"trace": time.perf_counter() - start}
            exported = jax.export.export(jitted, platforms=tuple(platforms))(*arguments)
            data = bytes(exported.serialize())
        except Exception as error:
            # Many kinds of error say "this needs a number here"; each is a reason, and none stops the build.
            reasons.append(f"with {', '.join(free)} symbolic: {first_line(error)}")
            continue
        seconds["lower"] = time.perf_counter() - start - seconds["trace"]
        return _exported(function, SYMBOLIC, exported, data, seconds=seconds, fixed=fixed)
    return NotSymbolic("; ".join(reasons))


def load(bundle: Bundle, function: str, bucket: Bucket, device: Device) -> LoadedProgram:
    """The program of a bucket, deserialized from its export and compiled here for `device`.

    Raises:
      BundleError: the file is missing or damaged.
      ArtifactUnavailable: there is no such export, or this machine or this JAX cannot use it.
      PlatformError: the function has 64-bit tensors and JAX's 64-bit mode is off.
    """
    prepared = lower_export(bundle, function, bucket, device)
    start = time.perf_counter()
    compiled = compile_export(prepared)
    return LoadedProgram(
        program=compiled,
        target=NAME,
        seconds={**prepared.seconds, "compile": time.perf_counter() - start},
        cost=cost.cost(compiled),
        memory=cost.memory(compiled),
        stablehlo=lambda: read_export(bundle, prepared.record).mlir_module(),
    )


def check(_materials: Materials) -> None:
    """Nothing to refuse: every platform can be lowered for on any machine; `Target.check`."""


def make(bundle: Bundle, materials: Materials) -> Bundle:
    """The bundle with every function at every bucket, and at symbolic dimensions where it traces; `Target.make`.

    Raises:
      ModelError: as `export` does.
    """
    functions, params, platforms = materials.functions, materials.params, materials.platforms
    grid = bundle.manifest.grid()

    def job(name: str, bucket: Bucket) -> Callable[[], ExportedProgram | NotSymbolic]:
        return lambda: export(functions[name], bucket, params, platforms)

    def symbolic(name: str) -> Callable[[], ExportedProgram | NotSymbolic]:
        largest = max(grid[name], key=Bucket.volume)
        return lambda: export_symbolic(functions[name], largest, params, platforms)

    jobs = {f"{name}@{bucket.label}": job(name, bucket) for name, bucket in grid}
    jobs |= {f"{name}@{SYMBOLIC}": symbolic(name) for name, function in functions.items() if function.signature.dims}
    programs: list[ExportedProgram] = []
    for label, result in zip(jobs, run_parallel(jobs, "trace and export"), strict=True):
        if isinstance(result, NotSymbolic):
            emit(Notice(f"no symbolic export of {label.partition('@')[0]}: {result.reason}"))
        else:
            programs.append(result)
    _report_constants(programs)
    records = tuple(program.record for program in programs)
    return amend(
        bundle,
        {program.record.file: program.data for program in programs},
        lambda manifest: manifest.with_target(NAME, programs=records, expiry=(*manifest.expiry, export_expiry())),
    )


def buckets(bundle: Bundle, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
    """The corners, since each is compiled; `Target.buckets`."""
    return corners(bundle, full=full)


def open_part(job: Job) -> JaxPart:
    """The exports; `Target.open_part`."""
    return JaxPart(job, load)


def obstacles(bundle: Bundle, device: Device) -> tuple[str, ...]:
    """Exports that are missing, or for other platforms; `Target.obstacles`."""
    manifest = bundle.manifest
    if not manifest.programs:
        return ("the bundle has no exports (built with --no-fallback); build with -t export",)
    if (here := platform_of(device)) not in manifest.platforms:
        return (f"exported for {', '.join(manifest.platforms)}, not for {here}; build with --platform {here}",)
    return ()


def stablehlo_text(data: bytes) -> str:
    """The StableHLO of a serialized export, for people to read."""
    return jax.export.deserialize(bytearray(data)).mlir_module()


def _report_constants(programs: Sequence[ExportedProgram]) -> None:
    """Says which arrays stay in the programs: they keep their values when weights are swapped."""
    for name in dict.fromkeys(program.record.function for program in programs):
        largest = max((p for p in programs if p.record.function == name), key=lambda p: p.record.constant_bytes)
        shown = [each for each in largest.constants if each.bytes >= _REPORTED_CONSTANT or each.parameter]
        if shown:
            level = "warning" if any(each.parameter for each in shown) else "info"
            listed = "; ".join(map(str, shown))
            emit(Notice(f"{name} has constants in its program, which no new checkpoint changes: {listed}", level))


def _jitted(function: Function) -> jax.stages.Wrapped:
    """The function over dictionaries. Donation is written into the module; callers of the artifact declare it again."""
    donated = () if function.state is None else (1,)
    return jax.jit(pipeline.nested_callable(function), donate_argnums=donated, keep_unused=True)


def _symbolic_avals(
    function: Function, params: Tree, free: Sequence[str], fixed: Mapping[str, int]
) -> tuple[dict[str, Any], ...]:
    scope = jax.export.SymbolicScope()
    sizes: dict[str, Any] = {**fixed, **{name: jax.export.symbolic_shape(name, scope=scope)[0] for name in free}}

    def avals(specs: Sequence[TensorSpec]) -> dict[str, Any]:
        return {
            spec.name: jax.ShapeDtypeStruct(
                tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape), spec.numpy_dtype
            )
            for spec in specs
        }

    tree = unflatten({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flatten(params).items()})
    inputs = avals(function.signature.inputs)
    return (tree, inputs) if function.state is None else (tree, avals(function.state), inputs)


def _exported(
    function: Function,
    label: str,
    exported: jax.export.Exported,
    data: bytes,
    *,
    seconds: Mapping[str, float],
    fixed: Mapping[str, int] | None = None,
) -> ExportedProgram:
    module = exported.mlir_module_serialized
    record = ProgramRecord(
        function=function.name,
        bucket=label,
        fixed=dict(fixed or {}),
        file=f"programs/{function.name}/{label}.jaxexport",
        platforms=tuple(exported.platforms),
        calling_convention=exported.calling_convention_version,
        stablehlo_digest=stablehlo.digest(module),
        seconds=dict(seconds),
        constant_bytes=stablehlo.constant_bytes(module),
        operations=stablehlo.operations(module),
    )
    return ExportedProgram(data, record)
