"""The `aot` wrapper: executables compiled from a bundle's exports, keyed by fingerprint, loaded without a compile.

An executable is native code. It is loaded only where the fingerprint is the one it was compiled for, and only after
its digest was checked: on another CPU, jaxlib or setting it could end the process instead of raising.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable

from servax.core.device import Device, platform_of
from servax.core.errors import ArtifactUnavailable, BundleError, UsageError
from servax.stages import cost, fingerprint, stablehlo
from servax.stages.buckets import Bucket
from servax.stages.fingerprint import Fingerprint
from servax.stages.pipeline import run_parallel
from servax.targets.bundle import Bundle, amend
from servax.targets.child_protocol import Job
from servax.targets.compilation_cache import suspended_cache
from servax.targets.expiry import executable_expiry
from servax.targets.jaxpart import JaxPart
from servax.targets.lowering import compile_export, lower_export, read_export
from servax.targets.manifest import ExecutableRecord, FingerprintRecord, FunctionRecord, Manifest, TargetName
from servax.targets.target import LoadedProgram, Materials, corners

NAME: TargetName = "aot"
FROM_EXPORTS: bool = True
PORTABLE: bool = False


@dataclass(frozen=True, slots=True)
class CompiledExecutable:
    """A serialized executable, its record, and what XLA says of its cost and memory."""

    data: bytes
    record: ExecutableRecord
    fingerprint: Fingerprint
    cost: Mapping[str, float]
    memory: Mapping[str, int]


def compile_executable(
    bundle: Bundle, function: str, bucket: Bucket, device: Device, *, mark: Fingerprint | None = None
) -> CompiledExecutable:
    """The export of a bucket compiled for this machine and `device`, and serialized.

    The persistent compilation cache is not asked: what comes out of it cannot be serialized again. `mark` is the
    fingerprint of `device`, if already known.

    Raises:
      BundleError: the export is missing or damaged.
      ArtifactUnavailable: there is no such export, or it cannot be used on this machine.
    """
    prepared = lower_export(bundle, function, bucket, device)
    start = time.perf_counter()
    with suspended_cache():
        compiled = compile_export(prepared)
    seconds = time.perf_counter() - start
    data, _, _ = serialize_executable.serialize(compiled)
    mark = mark or fingerprint.current([device])
    return CompiledExecutable(
        data=data,
        record=ExecutableRecord(
            fingerprint=mark.id,
            function=function,
            bucket=bucket.label,
            file=f"executables/{mark.id}/{function}/{bucket.label}",
            stablehlo_digest=prepared.record.stablehlo_digest,
            donated_state=bundle.manifest.functions[function].stateful,
            custom_calls=stablehlo.custom_calls(prepared.lowered),
            seconds=seconds,
        ),
        fingerprint=mark,
        cost=cost.cost(compiled),
        memory=cost.memory(compiled),
    )


def add(bundle: Bundle, executables: Sequence[CompiledExecutable]) -> Bundle:
    """The bundle with these executables in it, in place of those with the same fingerprint, function and bucket."""

    def change(manifest: Manifest) -> Manifest:
        records = {(each.fingerprint, each.function, each.bucket): each for each in manifest.executables}
        marks = {each.id: each for each in manifest.fingerprints}
        measured = {(each.record.function, each.record.bucket): each for each in executables}
        expiry = {(each.target, each.bound_to): each for each in manifest.expiry}
        for each in executables:
            record, mark = each.record, each.fingerprint
            records[record.fingerprint, record.function, record.bucket] = record
            marks[mark.id] = FingerprintRecord(id=mark.id, fields=dict(mark.fields))
            expiry["aot", mark.id] = executable_expiry(mark.id)
        programs = tuple(
            program.model_copy(update={"cost": dict(found.cost), "memory": dict(found.memory)})
            if (found := measured.get((program.function, program.bucket))) and not program.cost
            else program
            for program in manifest.programs
        )
        return manifest.with_target(
            NAME,
            executables=tuple(records.values()),
            fingerprints=tuple(marks.values()),
            expiry=tuple(expiry.values()),
            programs=programs,
        )

    return amend(bundle, {each.record.file: each.data for each in executables}, change)


def compile_missing(bundle: Bundle, device: Device, mark: Fingerprint) -> tuple[Bundle, int]:
    """The bundle with every executable for `device`, whose fingerprint is `mark`, and how many had to be compiled.

    A damaged executable counts as missing.

    Raises:
      BundleError: an export is missing or damaged.
      ArtifactUnavailable: an export cannot be used on this machine.
    """

    def job(function: str, bucket: Bucket) -> Callable[[], CompiledExecutable]:
        return lambda: compile_executable(bundle, function, bucket, device, mark=mark)

    missing = [key for key in bundle.manifest.grid() if not is_usable(bundle, *key, mark)]
    jobs = {f"{function}@{bucket.label}": job(function, bucket) for function, bucket in missing}
    executables = run_parallel(jobs, "compile")
    return (add(bundle, executables) if executables else bundle), len(executables)


def check(materials: Materials) -> None:
    """Refuses to compile for a machine that the exports are not for; `Target.check`."""
    here = platform_of(materials.open_device())
    if here not in materials.platforms:
        raise UsageError(
            f"aot compiles for this machine's {here}, which is not among the platforms",
            seen=", ".join(materials.platforms),
            remedy=f"add --platform {here}, or build -t export here and run servax compile there",
        )


def make(bundle: Bundle, materials: Materials) -> Bundle:
    """The bundle with this machine's executables; `Target.make`."""
    device = materials.open_device()
    return compile_missing(bundle, device, fingerprint.current([device]))[0]


def buckets(bundle: Bundle, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
    """Every bucket, since none of them costs a compile; `Target.buckets`.

    Of a language model the corners: op by op, its layers and steps run one after another for every sample.
    """
    return corners(bundle, full=full or bundle.manifest.language is None)


def open_part(job: Job) -> JaxPart:
    """The executables; `Target.open_part`."""
    return JaxPart(job, load)


def obstacles(bundle: Bundle, device: Device) -> tuple[str, ...]:
    """Executables that are missing, or of another machine; `Target.obstacles`."""
    if not bundle.manifest.executables:
        return (f"the bundle has no executables; {_compile(bundle)}",)
    here = fingerprint.current([device])
    known = [Fingerprint(record.fields) for record in bundle.manifest.fingerprints]
    if any(each.fields == here.fields for each in known):
        return ()
    fewest = min((fingerprint.differences(each, here) for each in known), key=len)
    fields = ", ".join(f"{field}: {theirs} in the bundle, {ours} here" for field, theirs, ours in fewest)
    return (f"executables are for another machine ({fields}); {_compile(bundle)}",)


def is_usable(bundle: Bundle, function: str, bucket: Bucket, mark: Fingerprint) -> bool:
    """Whether the bundle has an executable of this bucket for the fingerprint `mark`, current and undamaged."""
    try:
        _read(bundle, _find(bundle, function, bucket, mark))
    except ArtifactUnavailable:
        return False
    return True


def load(
    bundle: Bundle, function: str, bucket: Bucket, device: Device, *, mark: Fingerprint | None = None
) -> LoadedProgram:
    """The executable of a bucket, loaded for `device`: nothing is traced, lowered or compiled.

    Args:
      bundle: where it is.
      function: name of the function.
      bucket: the sizes it was compiled for.
      device: the device it shall run on; its id is part of the fingerprint.
      mark: the fingerprint of `device`, if already known.

    Raises:
      ArtifactUnavailable: the bundle has no such executable for this fingerprint (every field that differs is
        named), the file is missing or damaged, or it does not load.
    """
    start = time.perf_counter()
    mark = mark or fingerprint.current([device])
    record = _find(bundle, function, bucket, mark)
    data = _read(bundle, record)
    in_tree, out_tree = _trees(bundle.manifest, bundle.manifest.functions[function])
    try:
        _prepare_libraries(record.custom_calls)
        compiled = serialize_executable.deserialize_and_load(
            data, in_tree, out_tree, backend=device.client, execution_devices=[device]
        )
    except Exception as error:
        # Whatever an import, the unpickler or the runtime raises, the answer is the same: compile it again, here.
        raise ArtifactUnavailable(
            "an executable does not load, although its fingerprint and its digest are right",
            where=str(bundle.path(record.file)),
            seen=f"{type(error).__name__}: {error}",
            remedy=_compile(bundle),
        ) from error
    program = bundle.manifest.program(function, bucket.label)
    return LoadedProgram(
        program=compiled,
        target=NAME,
        seconds={"load": time.perf_counter() - start},
        cost=program.cost if program and program.cost else cost.cost(compiled),
        memory=program.memory if program and program.memory else cost.memory(compiled),
        stablehlo=(lambda: read_export(bundle, program).mlir_module()) if program else None,
    )


def _read(bundle: Bundle, record: ExecutableRecord) -> bytes:
    try:
        return bundle.read(record.file)
    except BundleError as error:
        raise ArtifactUnavailable(
            f"an executable cannot be used: {error.what}",
            where=error.where,
            seen=error.seen,
            expected=error.expected,
            remedy=_compile(bundle),
        ) from error


def _find(bundle: Bundle, function: str, bucket: Bucket, mark: Fingerprint) -> ExecutableRecord:
    manifest = bundle.manifest
    where = f"{function}@{bucket.label}"
    compiled = [
        (Fingerprint(each.fields), record)
        for each in manifest.fingerprints
        if (record := manifest.executable(each.id, function, bucket.label)) is not None
    ]
    # Fields are compared, not ids: an id says nothing about fields that were edited.
    record = next((record for known, record in compiled if known.fields == mark.fields), None)
    if record is not None:
        program = manifest.program(function, bucket.label)
        if program is not None and program.stablehlo_digest != record.stablehlo_digest:
            raise ArtifactUnavailable(
                "an executable was compiled from another program than the bundle has",
                where=f"{where} in {bundle.root}",
                seen=f"StableHLO {record.stablehlo_digest}",
                expected=f"StableHLO {program.stablehlo_digest}",
                remedy=_compile(bundle),
            )
        return record
    if not compiled:
        raise ArtifactUnavailable(
            "the bundle has no executable of this bucket",
            where=f"{where} in {bundle.root}",
            seen="no executable",
            expected=f"one for fingerprint {mark.id}",
            remedy=_compile(bundle),
        )
    nearest, fields = min(
        ((known, fingerprint.differences(known, mark)) for known, _ in compiled), key=lambda pair: len(pair[1])
    )
    raise ArtifactUnavailable(
        f"the executables were compiled for fingerprint {nearest.id}, and here it is {mark.id}",
        where=f"{where}: {', '.join(field for field, _, _ in fields)}",
        seen="; ".join(f"{field}={there}" for field, there, _ in fields),
        expected="; ".join(f"{field}={here}" for field, _, here in fields),
        remedy=_compile(bundle),
    )


def _compile(bundle: Bundle) -> str:
    return f"run `servax compile {bundle.root}` on this machine"


def _trees(manifest: Manifest, record: FunctionRecord) -> tuple[Any, Any]:
    """Structures of arguments and results: flat tuples, so that counts are all there is to know."""
    state = (0,) * (len(manifest.state) if record.stateful else 0)
    arguments = ((0,) * len(manifest.parameters), state, (0,) * len(record.inputs))
    return jax.tree.structure((arguments, {})), jax.tree.structure((state, (0,) * len(record.outputs)))


def _prepare_libraries(custom_calls: Sequence[str]) -> None:
    """Fills in jaxlib's pointers to LAPACK and BLAS, which tracing would have done and without which a call crashes.

    It imports `scipy.linalg` (0.2 s), so only programs that need it pay (jax#28908).
    """
    if any(name.startswith(("lapack_", "blas_")) for name in custom_calls):
        from jaxlib.cpu import _lapack  # pyright: ignore[reportAttributeAccessIssue]  # a native module without stubs

        _lapack.initialize()
