"""The `saved_model` wrapper: a TensorFlow SavedModel made of a bundle's exports, without the model's source.

One signature per function where the bundle has a symbolic export, of free batch and length; else one per bucket.
`serving_default` is `predict`, or the model's only function. Parameters are variables, so the graph stays small.

A SavedModel takes tensors only. Text goes through a processor elsewhere; `lengths` inputs and inputs with a default
are ordinary inputs that every request carries; nothing pads or cuts. Functions with state are left out: a signature
is a pure function of its inputs. So are functions that call jaxlib's own kernels (`jnp.linalg`).

`python -m servax.targets.savedmodel JOB.json` is the child that answers golden samples through plain TensorFlow, in a
process where JAX cannot be imported.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.errors import ArtifactUnavailable, BuildError, ModelError, PlatformError
from servax.core.events import Notice, StepAdvanced, emit, step
from servax.core.tensors import TensorSpec
from servax.core.trees import KeyPath, Tree
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.targets.bundle import Bundle
from servax.targets.child_protocol import Answer, Answering, Job, main
from servax.targets.manifest import SYMBOLIC, ProgramRecord, SavedModelRecord
from servax.targets.samples import Sample
from servax.targets.savedmodel_signatures import (
    ConvertedFunction,
    check_names,
    convert,
    exporting_for,
    lowers,
    signature_name,
    tensor_name,
    unfit,
    variables,
)
from servax.targets.savedmodel_tensorflow import Consumer, consumer, load_tensorflow
from servax.targets.savedmodel_warmup import WarmupRequest, write_warmup

DIRECTORY = "saved_model"
"""The SavedModel's place in a bundle."""

DEFAULT = "serving_default"
"""The signature that TensorFlow Serving takes when a request names none."""


@dataclass(frozen=True, slots=True)
class _Signature:
    """One signature: its function, and the buckets it answers; `polymorphic` where it takes any size."""

    function: str
    polymorphic: bool
    buckets: tuple[Bucket, ...]
    converted: ConvertedFunction

    @property
    def name(self) -> str:
        return signature_name(self.function, None if self.polymorphic else self.buckets[0])

    @property
    def origin(self) -> str:
        """`FUNCTION`, or `FUNCTION@BUCKET`, as the manifest keeps it."""
        return self.function if self.polymorphic else f"{self.function}@{self.buckets[0].label}"


def write(
    bundle: Bundle, params: Tree, directory: str | os.PathLike[str], *, tensorflow: str | None = None
) -> SavedModelRecord:
    """Writes a bundle's functions as a SavedModel and returns its record for the manifest.

    Functions that cannot be signatures are left out, each with a notice that says why. JAX parameters in host memory
    are not copied.

    Args:
      bundle: with exports; while it is being built, `BundleWriter.draft`.
      params: the nested dictionary of the bundle's parameters.
      directory: of the SavedModel, which does not exist yet.
      tensorflow: the version that will read it, `2.21`; None: the one that is installed.

    Raises:
      UsageError: TensorFlow is not installed, or what `tensorflow` reads is not known.
      ModelError: no function is left, or names of tensors or signatures clash.
      BuildError: the bundle has no exports, or this JAX writes nothing that the TensorFlow reads.
      BundleError: an export is damaged.
    """
    target = consumer(tensorflow)
    tf = load_tensorflow()
    manifest = bundle.manifest
    if not manifest.programs:
        raise BuildError(
            "a SavedModel is made of exports, and the bundle has none",
            where=str(bundle.root),
            remedy="build the bundle with `-t export`",
        )
    signatures: list[_Signature] = []
    left_out: dict[str, str] = {}
    root = tf.Module()
    with step("saved_model", len(manifest.functions)), tf.device("CPU"), exporting_for(target):
        parameters = variables(params)
        root.params = {"/".join(path): variable for path, variable in parameters.items()}
        for name in manifest.functions:
            made = _function(bundle, name, parameters, target)
            if isinstance(made, str):
                left_out[name] = made
                emit(Notice(f"saved_model leaves out {name}: {made}", level="warning"))
            else:
                signatures += made
            emit(StepAdvanced("saved_model", name))
        if not signatures:
            raise ModelError(
                "no function of the model can be a signature of a SavedModel",
                where=str(bundle.root),
                seen="; ".join(f"{name}: {reason}" for name, reason in left_out.items()),
                expected="at least one function without state, of operations that TensorFlow has",
                remedy="serve it through aot or export",
            )
        origins = _origins(signatures)
        concrete = {each.name: each.converted.concrete for each in signatures}
        if (default := _default(signatures)) is not None:
            origins[DEFAULT] = default.origin
            concrete[DEFAULT] = default.converted.concrete
        tf.saved_model.save(root, os.fspath(directory), signatures=concrete)
    requests = [
        WarmupRequest(each.name, manifest.functions[each.function].signature(), bucket)
        for each in signatures
        for bucket in each.buckets
    ]
    write_warmup(os.fspath(directory), manifest.name, requests, tensor_name)
    return SavedModelRecord(tensorflow=target.tensorflow, stablehlo=target.stablehlo, signatures=origins)


def functions_of(record: SavedModelRecord) -> frozenset[str]:
    """The functions that a SavedModel has, which are those that parity can prove of it."""
    return frozenset(origin.partition("@")[0] for origin in record.signatures.values())


def copy_command(bundle_path: str, name: str, version: int = 1) -> str:
    """The line that copies a bundle's SavedModel to where TensorFlow Serving looks for it: MODEL/VERSION/."""
    place = f"models/{name}/{version}"
    source = f"{bundle_path.rstrip('/')}/{DIRECTORY}/."
    return f"mkdir -p {shlex.quote(place)} && cp -r {shlex.quote(source)} {shlex.quote(place + '/')}"


def _function(
    bundle: Bundle, name: str, parameters: Mapping[KeyPath, Any], target: Consumer
) -> Sequence[_Signature] | str:
    """The signatures of a function, or why it has none."""
    record = bundle.manifest.functions[name]
    if record.stateful:
        return "it keeps state from call to call, and a signature is a pure function of its inputs"
    check_names(name, record.signature())
    for processor in record.processors:
        emit(
            Notice(
                f"saved_model takes tensors only: {name} is sent {tensor_name(processor.input)}, "
                f"not {processor.name}, whose {processor.kind} processor stays with servax"
            )
        )
    try:
        return list(_signatures(bundle, name, parameters, target))
    except _Unfit as error:
        return str(error)


class _Unfit(Exception):
    """A function that cannot be a signature, and why."""


def _signatures(bundle: Bundle, name: str, parameters: Mapping[KeyPath, Any], target: Consumer) -> Iterator[_Signature]:
    manifest = bundle.manifest
    record = manifest.functions[name]
    buckets = tuple(map(Bucket.parse, record.buckets))
    program = manifest.program(name, SYMBOLIC)
    if program is not None and (free := tuple(bucket for bucket in buckets if _covers(program, bucket))):
        converted = _convert(bundle, program, name, parameters, target)
        smallest = min(free, key=Bucket.volume)
        reason = lowers(converted, record.signature(), smallest) if "cpu" in program.platforms else None
        if reason is None:
            yield _Signature(name, True, free, converted)
            buckets = tuple(bucket for bucket in buckets if bucket not in free)
        else:
            emit(Notice(f"saved_model gets a signature per bucket of {name}: TensorFlow needs fixed shapes ({reason})"))
    for bucket in buckets:
        program = manifest.program(name, bucket.label)
        if program is None:
            raise _Unfit(f"the bundle has no export of it at {bucket.label}")
        converted = _convert(bundle, program, signature_name(name, bucket), parameters, target)
        yield _Signature(name, False, (bucket,), converted)


def _covers(program: ProgramRecord, bucket: Bucket) -> bool:
    return all(bucket[dim] == size for dim, size in program.fixed.items())


def _convert(
    bundle: Bundle, program: ProgramRecord, name: str, parameters: Mapping[KeyPath, Any], target: Consumer
) -> ConvertedFunction:
    from servax.stages.stablehlo import custom_calls
    from servax.targets.lowering import read_export

    exported = read_export(bundle, program)
    if reason := unfit(exported, custom_calls(exported.mlir_module_serialized)):
        raise _Unfit(reason)
    try:
        return convert(exported, name, parameters, target)
    except BuildError as error:
        raise _Unfit(error.sentence()) from error


def _origins(signatures: Sequence[_Signature]) -> dict[str, str]:
    """Where each signature comes from, by name.

    Raises:
      ModelError: two have one name.
    """
    origins: dict[str, str] = {}
    clashes: list[str] = []
    for each in signatures:
        if each.name in origins or each.name == DEFAULT:
            clashes.append(f"{each.name}: {origins.get(each.name, 'taken by the default')} and {each.origin}")
        origins[each.name] = each.origin
    if clashes:
        raise ModelError(
            "two signatures of the SavedModel would have one name", seen="; ".join(clashes), remedy="rename a function"
        )
    return origins


def _default(signatures: Sequence[_Signature]) -> _Signature | None:
    """The one signature of `predict`, or of the only function; None, and a notice, where that has one per bucket."""
    functions = {each.function for each in signatures}
    chosen = "predict" if "predict" in functions else functions.pop() if len(functions) == 1 else None
    candidates = [each for each in signatures if each.function == chosen]
    if len(candidates) == 1:
        return candidates[0]
    polymorphic = [each for each in candidates if each.polymorphic]
    if len(polymorphic) == 1:
        return polymorphic[0]
    emit(
        Notice(
            f"saved_model has no {DEFAULT}: "
            + (f"{chosen} has a signature per bucket" if chosen else "several functions, and none is predict")
            + "; requests name their signature"
        )
    )
    return None


class SavedModelPart:
    """The SavedModel of a bundle, called through TensorFlow alone."""

    def __init__(self, job: Job) -> None:
        """Loads the SavedModel, its files checked.

        Raises:
          PlatformError: TensorFlow has no device of the job's platform here.
          ArtifactUnavailable: the bundle has no SavedModel.
          BundleError: a file of it is damaged.
        """
        self._tf = load_tensorflow(gpu=job.platform == "cuda")
        self._device = self._find_device(job.platform)
        bundle = Bundle.open(job.bundle)
        self._record = bundle.manifest.saved_model
        if self._record is None:
            raise ArtifactUnavailable("the bundle has no SavedModel", where=job.bundle, remedy="build `-t saved_model`")
        bundle.check(DIRECTORY)
        self._functions = bundle.manifest.functions
        # Signatures live as long as what was loaded.
        self._loaded = self._tf.saved_model.load(str(bundle.root / DIRECTORY))

    def load(self, function: str, bucket: Bucket) -> Answering:
        """The signature that answers a bucket; `Part.load`."""
        assert self._record is not None
        names = {origin: name for name, origin in self._record.signatures.items()}
        name = names.get(f"{function}@{bucket.label}") or names.get(function)
        if name is None:
            raise ArtifactUnavailable(
                "the SavedModel has no signature of this bucket",
                where=f"{function}@{bucket.label}",
                seen=", ".join(sorted(names)),
                remedy="serve it through aot or export",
            )
        call = self._loaded.signatures[name]
        signature = self._functions[function].signature()
        takes = call.structured_input_signature[1]
        free = {
            dim
            for spec in signature.inputs
            for dim, size in zip(spec.shape, takes[tensor_name(spec.name)].shape, strict=True)
            if isinstance(dim, str) and size is None
        }

        def answering(sample: Sample) -> Sequence[Answer]:
            answers: list[Answer] = []
            for each in sample.steps:
                checked = check(signature, each.inputs)
                sizes = {dim: checked.sizes[dim] if dim in free else size for dim, size in bucket.sizes}
                inputs = zip(_by_name(signature.inputs), pad(signature, Bucket.of(**sizes), checked), strict=True)
                with self._tf.device(self._device):
                    result = call(**{tensor_name(spec.name): self._tf.constant(array) for spec, array in inputs})
                outputs = [result[tensor_name(spec.name)].numpy() for spec in _by_name(signature.outputs)]
                answers.append(Answer(cut(signature, checked.sizes, outputs)))
            return answers

        return answering

    def device(self) -> str:
        """The device, by TensorFlow's name; `Part.device`."""
        return f"{self._device} in TensorFlow"

    def versions(self) -> dict[str, str]:
        """Versions of Python, TensorFlow and NumPy; `Part.versions`."""
        return {
            "python": platform.python_version(),
            "tensorflow": self._tf.__version__,
            "numpy": np.__version__,
        }

    def _find_device(self, name: str) -> str:
        devices: list[str] = [each.name for each in self._tf.config.list_logical_devices()]
        kind = {"cpu": "CPU", "cuda": "GPU"}.get(name)
        for device in devices:
            if kind is not None and f":{kind}:" in device:
                return device
        raise PlatformError(
            f"TensorFlow has no {name} device here",
            seen=", ".join(devices),
            expected=name,
            remedy="run servax verify where TensorFlow finds one",
        )


def _by_name(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: spec.name)


def _forbid_jax() -> None:
    """Makes every later import of JAX fail, so that what runs here runs without it.

    Raises:
      RuntimeError: one is imported already.
    """
    for name in ("jax", "jaxlib", "flax", "orbax"):
        if name in sys.modules:
            raise RuntimeError(f"{name} was imported by what the SavedModel's child imports")
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]  # None is how Python marks what may not be imported


if __name__ == "__main__":
    _forbid_jax()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.exit(main(sys.argv[1:], SavedModelPart))
