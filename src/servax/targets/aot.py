"""The `aot` wrapper: executables compiled from a bundle's exports, keyed by fingerprint, loaded without a compile.

An executable is native code. It is loaded only where the fingerprint is the one it was compiled for, and only after
its digest was checked: on another CPU, jaxlib or setting it could end the process instead of raising.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import serialize_executable

from servax.core.device import Device
from servax.core.errors import ArtifactUnavailable, BundleError
from servax.stages import cost, fingerprint
from servax.stages.buckets import Bucket
from servax.stages.fingerprint import Fingerprint
from servax.targets.bundle import Bundle, amend
from servax.targets.compilation_cache import suspended_cache
from servax.targets.expiry import executable_expiry
from servax.targets.lowering import compile_export, lower_export, read_export
from servax.targets.manifest import TARGETS, ExecutableRecord, FingerprintRecord, FunctionRecord, Manifest
from servax.targets.target import LoadedProgram

_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')


@dataclass(frozen=True, slots=True)
class CompiledExecutable:
    """A serialized executable, its record, and what XLA says of its cost and memory."""

    data: bytes
    record: ExecutableRecord
    fingerprint: Fingerprint
    cost: Mapping[str, float]
    memory: Mapping[str, int]


def compile_executable(
    bundle: Bundle,
    function: str,
    bucket: Bucket,
    device: Device,
    *,
    compile_options: Mapping[str, str | bool] | None = None,
) -> CompiledExecutable:
    """The export of a bucket compiled for this machine and `device`, and serialized.

    The persistent compilation cache is not asked: what comes out of it cannot be serialized again.

    Raises:
      BundleError: the export is missing or damaged.
      ArtifactUnavailable: there is no such export, or it cannot be used on this machine.
    """
    prepared = lower_export(bundle, function, bucket, device)
    options = dict(compile_options or {})
    start = time.perf_counter()
    with suspended_cache():
        compiled = compile_export(prepared, options)
    seconds = time.perf_counter() - start
    data, _, _ = serialize_executable.serialize(compiled)
    mark = fingerprint.current([device])
    return CompiledExecutable(
        data=data,
        record=ExecutableRecord(
            fingerprint=mark.id,
            function=function,
            bucket=bucket.label,
            file=f"executables/{mark.id}/{function}/{bucket.label}",
            stablehlo_digest=prepared.record.stablehlo_digest,
            compile_options={name: str(value) for name, value in options.items()},
            donated_state=bundle.manifest.functions[function].stateful,
            custom_calls=tuple(sorted(set(_CUSTOM_CALL.findall(compiled.as_text() or "")))),
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
        return manifest.model_copy(
            update={
                "executables": tuple(records.values()),
                "fingerprints": tuple(marks.values()),
                "expiry": tuple(expiry.values()),
                "programs": programs,
                "targets": tuple(name for name in TARGETS if name == "aot" or name in manifest.targets),
            }
        )

    return amend(bundle, {each.record.file: each.data for each in executables}, change)


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
    _prepare_libraries(record.custom_calls)
    in_tree, out_tree = _trees(bundle.manifest, bundle.manifest.functions[function])
    try:
        compiled = serialize_executable.deserialize_and_load(
            data, in_tree, out_tree, backend=device.client, execution_devices=[device]
        )
    except Exception as error:
        # Whatever the unpickler or the runtime raises, the answer is the same: compile it again, here.
        raise ArtifactUnavailable(
            "an executable does not load, although its fingerprint and its digest are right",
            where=str(bundle.path(record.file)),
            seen=f"{type(error).__name__}: {error}",
            remedy=_compile(bundle),
        ) from error
    program = bundle.manifest.program(function, bucket.label)
    return LoadedProgram(
        program=compiled,
        target="aot",
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
