"""An export read back from a bundle and lowered for one device, in the flat calling form of a `Program`.

The `export` wrapper runs what comes out; the `aot` wrapper serializes it. Nothing of the model's source is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.export

from servax.core.device import Device, platform_of
from servax.core.errors import ArtifactUnavailable, PlatformError, first_line
from servax.stages import pipeline
from servax.stages.buckets import Bucket
from servax.targets.bundle import Bundle
from servax.targets.manifest import SYMBOLIC, ExpiryRecord, FunctionRecord, ProgramRecord
from servax.targets.target import FlatArrays

FlatCall = Callable[[FlatArrays, FlatArrays, FlatArrays], tuple[FlatArrays, FlatArrays]]


@dataclass(frozen=True, slots=True)
class LoweredExport:
    """An export lowered for one device.

    Attributes:
      record: what the manifest says of the export.
      lowered: JAX's stage, ready to compile; state is donated.
      seconds: durations of `load` (read and deserialize), `trace` and `lower`.
    """

    record: ProgramRecord
    lowered: jax.stages.Lowered
    seconds: Mapping[str, float]


def find_program(bundle: Bundle, function: str, bucket: Bucket, device: Device) -> ProgramRecord:
    """The record of the export that serves a bucket on a device: the bucket's own, else a symbolic one that takes it.

    Raises:
      ArtifactUnavailable: there is none, it was not made for the device's platform, or this JAX is too new for it.
    """
    manifest = bundle.manifest
    record = manifest.program(function, bucket.label) or _symbolic(manifest.program(function, SYMBOLIC), bucket)
    where = f"{function}@{bucket.label} in {bundle.root}"
    if record is None:
        raise ArtifactUnavailable(
            "the bundle has no export of this bucket",
            where=where,
            seen=", ".join(each.bucket for each in manifest.programs if each.function == function) or "no export",
            remedy="build the bundle with `-t export`, and with this bucket",
        )
    platform = platform_of(device)
    if platform not in record.platforms:
        raise ArtifactUnavailable(
            f"the export was not made for {platform}",
            where=where,
            seen=f"platforms {', '.join(record.platforms)}",
            expected=platform,
            remedy=f"build the bundle with `--platform {platform}`, or serve it on {' or '.join(record.platforms)}",
        )
    oldest = jax.export.minimum_supported_calling_convention_version
    if record.calling_convention < oldest:
        raise _too_old(bundle, where, f"calling convention {record.calling_convention}", f"{oldest} or higher")
    return record


def read_export(bundle: Bundle, record: ProgramRecord) -> jax.export.Exported:
    """The export of a record, its bytes checked.

    Raises:
      BundleError: the file is missing or damaged.
      ArtifactUnavailable: this JAX does not read it.
    """
    data = bundle.read(record.file)
    try:
        return jax.export.deserialize(bytearray(data))
    except Exception as error:
        # The bytes are those that were written, so whatever the deserializer says, it is about versions.
        raise _too_old(bundle, record.file, first_line(error), "an export that this JAX reads") from error


def lower_export(bundle: Bundle, function: str, bucket: Bucket, device: Device) -> LoweredExport:
    """The export of a bucket, lowered for `device` with committed arguments and donated state.

    Raises:
      BundleError: the file is missing or damaged.
      ArtifactUnavailable: there is no such export, or this machine or this JAX cannot use it.
      PlatformError: the function has 64-bit tensors and JAX's 64-bit mode is off.
    """
    record = find_program(bundle, function, bucket, device)
    start = time.perf_counter()
    exported = read_export(bundle, record)
    loaded = time.perf_counter()
    arguments = flat_avals(bundle, function, bucket, device)
    call = flat_export(exported, bundle.manifest.functions[function], name=function)
    try:
        traced = jax.jit(call, donate_argnums=(1,), keep_unused=True).trace(*arguments)
        traced_at = time.perf_counter()
        lowered = traced.lower()
    except Exception as error:
        # The same bytes were traced and lowered when the bundle was built: what differs is the JAX that reads them.
        raise _too_old(bundle, record.file, first_line(error), "an export that this JAX lowers") from error
    seconds = {
        "load": loaded - start,
        "trace": traced_at - loaded,
        "lower": time.perf_counter() - traced_at,
    }
    return LoweredExport(record, lowered, seconds)


def compile_export(prepared: LoweredExport) -> jax.stages.Compiled:
    """The lowered export compiled.

    Raises:
      ArtifactUnavailable: XLA does not compile it here.
    """
    try:
        return prepared.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise ArtifactUnavailable(
            "XLA does not compile the export on this machine", where=prepared.record.file, seen=first_line(error)
        ) from error


def flat_export(exported: jax.export.Exported, record: FunctionRecord, *, name: str) -> FlatCall:
    """The call of an export on flat tuples instead of dictionaries."""
    stateful = record.stateful

    def call(params: FlatArrays, state: FlatArrays, inputs: FlatArrays) -> tuple[FlatArrays, FlatArrays]:
        arguments, _ = jax.tree.unflatten(exported.in_tree, (*params, *state, *inputs))
        result: Any = exported.call(*arguments)
        after, outputs = result if stateful else ((), result)
        return tuple(jax.tree.leaves(after)), tuple(jax.tree.leaves(outputs))

    call.__name__ = call.__qualname__ = name
    return call


def flat_avals(
    bundle: Bundle, function: str, bucket: Bucket, device: Device
) -> tuple[FlatArrays, FlatArrays, FlatArrays]:
    """Abstract parameters, state and inputs of a program, committed to `device`.

    Raises:
      PlatformError: there are 64-bit tensors and JAX's 64-bit mode is off.
    """
    manifest = bundle.manifest
    record = manifest.functions[function]
    state = tuple(each.spec() for each in manifest.state) if record.stateful else ()
    inputs = record.signature().inputs
    dtypes = {each.path: each.dtype for each in manifest.parameters} | {
        each.name: each.dtype for each in (*state, *inputs)
    }
    if wide := pipeline.too_wide(dtypes):
        raise PlatformError(
            "the program has 64-bit tensors, and JAX's 64-bit mode is off",
            where=f"{function}@{bucket.label} in {bundle.root}",
            seen="jax_enable_x64=False",
            expected=f"jax_enable_x64=True, for {', '.join(sorted({dtypes[name] for name in wide}))}",
            remedy="start with JAX_ENABLE_X64=1",
        )
    return pipeline.committed_avals(manifest.abstract_params(), state, inputs, bucket, device)


def _symbolic(record: ProgramRecord | None, bucket: Bucket) -> ProgramRecord | None:
    if record is None:
        return None
    sizes = bucket.mapping()
    return record if all(sizes.get(name) == size for name, size in record.fixed.items()) else None


def _too_old(bundle: Bundle, where: str, seen: str, expected: str) -> ArtifactUnavailable:
    built = bundle.manifest.versions.get("jax", "an unknown version")
    expiry: ExpiryRecord | None = next((each for each in bundle.manifest.expiry if each.target == "export"), None)
    until = f", good for a jaxlib built until {expiry.until}" if expiry and expiry.until else ""
    return ArtifactUnavailable(
        f"this JAX does not read the export: it was written by jax {built}{until}, and this is jax {jax.__version__}",
        where=where,
        seen=seen,
        expected=expected,
        remedy="build the bundle again with a current JAX, or serve it with the version that wrote it",
    )
