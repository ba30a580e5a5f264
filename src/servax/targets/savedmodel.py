"""The `saved_model` wrapper: a TensorFlow SavedModel made of a bundle's exports, without the model's source.

One signature per function where the bundle has a symbolic export, of free batch and length; else one per bucket.
`serving_default` is `predict`, or the model's only function. Parameters are variables, so the graph stays small.

A SavedModel takes tensors only. Text goes through a processor elsewhere; `lengths` inputs and inputs with a default
are ordinary inputs that every request carries; nothing pads or cuts. Functions with state are left out: a signature
is a pure function of its inputs. So are functions that call jaxlib's own kernels (`jnp.linalg`).

Its golden samples are answered by plain TensorFlow, in a process where JAX cannot be imported.
"""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import msgspec
import numpy as np
from etils import epath

from servax.core.device import Device
from servax.core.errors import ArtifactUnavailable, BuildError, PlatformError
from servax.core.events import Notice, StepAdvanced, emit, step
from servax.core.tensors import TensorSpec
from servax.stages import padding
from servax.stages.buckets import Bucket
from servax.targets.bundle import Bundle, amend
from servax.targets.child_protocol import Answer, Answering, Job
from servax.targets.expiry import saved_model_expiry
from servax.targets.manifest import FunctionRecord, Manifest, SavedModelRecord, TargetName
from servax.targets.samples import Sample
from servax.targets.savedmodel_messages import Advanced, Line, Raised, Told, WriteJob
from servax.targets.savedmodel_names import check_names, refuse_if_empty, tensor_dtype, tensor_name
from servax.targets.savedmodel_tensorflow import check_tensorflow, installed_tensorflow, load_tensorflow
from servax.targets.target import Materials, corners

NAME: TargetName = "saved_model"
FROM_EXPORTS: bool = True
PORTABLE: bool = False

DIRECTORY = "saved_model"
"""The SavedModel's place in a bundle."""

STATEFUL = "it keeps state from call to call, and a signature is a pure function of its inputs"
"""Why a stateful function is no signature."""

OUTPUT_TAIL = 2000
"""Bytes of a dead child's output that an error shows."""


def write(bundle: Bundle, directory: str | os.PathLike[str], *, tensorflow: str | None = None) -> SavedModelRecord:
    """Makes a SavedModel of a bundle's exports and parameters, in a child process, and returns its record.

    Functions that cannot be signatures are left out, each with a notice that says why.

    Args:
      bundle: with exports and parameters; while it is being built, `BundleWriter.draft`.
      directory: of the SavedModel; does not exist yet, and does not exist when this raises.
      tensorflow: the version that will read it, `2.21`; None: the one that is installed.

    Raises:
      UsageError: TensorFlow is not installed, or what the version `tensorflow` reads is not known.
      ModelError: no function can be a signature, or names of tensors or signatures clash.
      BuildError: the bundle has no exports, JAX writes nothing that this TensorFlow reads, or the child died.
      BundleError: an export or a parameter is damaged.
    """
    check_tensorflow(tensorflow)
    manifest = bundle.manifest
    if not manifest.programs:
        raise BuildError(
            "a SavedModel is made of exports, and the bundle has none",
            where=str(bundle.root),
            remedy="build the bundle with `-t export`",
        )
    left_out = _stateful(manifest)
    for name, record in manifest.functions.items():
        if name not in left_out:
            check_names(name, record.signature())
            _tell_what_requests_carry(name, record)
    refuse_if_empty(manifest, left_out)
    for name, reason in left_out.items():
        emit(Notice(f"saved_model leaves out {name}: {reason}", level="warning"))
    job = WriteJob(str(bundle.root), os.fspath(directory), left_out, tensorflow)
    with step("saved_model", len(manifest.functions) - len(left_out)):
        try:
            return _run(job)
        except BaseException:
            epath.Path(directory).rmtree(missing_ok=True)
            raise


def check(materials: Materials) -> None:
    """Refuses a TensorFlow that is missing or not known; `Target.check`."""
    check_tensorflow(materials.tensorflow)


def make(bundle: Bundle, materials: Materials) -> Bundle:
    """The bundle with a SavedModel, in place of the one it may have; `Target.make`."""
    directory = bundle.root / f".{DIRECTORY}.tmp-{secrets.token_hex(4)}"
    try:
        record = write(bundle, directory, tensorflow=materials.tensorflow)
        files = {
            f"{DIRECTORY}/{(folder / name).relative_to(directory).as_posix()}": folder / name
            for folder, _, names in directory.walk()
            for name in names
        }
        stale = {name for name in bundle.manifest.files if name.startswith(f"{DIRECTORY}/")} - files.keys()

        def change(manifest: Manifest) -> Manifest:
            return manifest.with_target(
                NAME,
                saved_model=record,
                files={name: each for name, each in manifest.files.items() if name not in stale},
                expiry=(
                    *(each for each in manifest.expiry if each.target != NAME),
                    saved_model_expiry(record.tensorflow),
                ),
            )

        bundle = amend(bundle, files, change)
        for name in stale:
            bundle.path(name).unlink(missing_ok=True)
        return bundle
    finally:
        directory.rmtree(missing_ok=True)


def buckets(bundle: Bundle, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
    """The corners of the functions that it has, since TensorFlow compiles each; `Target.buckets`."""
    record = bundle.manifest.saved_model
    chosen = corners(bundle, full=full)
    return chosen if record is None else {name: each for name, each in chosen.items() if name not in record.left_out}


def open_part(job: Job) -> SavedModelPart:
    """The SavedModel, in a process that from now on cannot import JAX; `Target.open_part`."""
    _forbid_jax()
    return SavedModelPart(job)


def obstacles(bundle: Bundle, _device: Device) -> tuple[str, ...]:
    """A TensorFlow that is missing or another one, and functions that it leaves out; `Target.obstacles`."""
    record, found = bundle.manifest.saved_model, list[str]()
    installed = installed_tensorflow()
    if installed is None:
        found.append("TensorFlow is not installed here; pip install 'servax[tensorflow]', or build it elsewhere")
    elif record is not None and installed.split(".")[:2] != record.tensorflow.split(".")[:2]:
        found.append(
            f"made for TensorFlow {record.tensorflow}, {installed} is installed; "
            f"servax build --from {bundle.root} -t saved_model --tensorflow {installed}"
        )
    left_out = _stateful(bundle.manifest) if record is None else record.left_out
    found += [f"it leaves out {name}: {reason}" for name, reason in left_out.items()]
    return tuple(found)


def copy_command(bundle_path: str, name: str, version: int = 1) -> str:
    """The line that copies a bundle's SavedModel to where TensorFlow Serving looks for it: MODEL/VERSION/."""
    place = f"models/{name}/{version}"
    source = f"{bundle_path.rstrip('/')}/{DIRECTORY}/."
    return f"mkdir -p {shlex.quote(place)} && cp -r {shlex.quote(source)} {shlex.quote(place + '/')}"


def _stateful(manifest: Manifest) -> dict[str, str]:
    return {name: STATEFUL for name, record in manifest.functions.items() if record.stateful}


def _tell_what_requests_carry(name: str, record: FunctionRecord) -> None:
    """A notice of what servax does for its own clients and a SavedModel leaves to them."""
    signature = record.signature()
    filled = [
        spec.name
        for spec in signature.inputs
        if spec.default is not None or spec.name in signature.lengths or spec.name == padding.SEED
    ]
    if filled:
        names = ", ".join(map(tensor_name, filled))
        emit(
            Notice(f"saved_model: every request to {name} carries {names}, which servax fills in where it is left out")
        )
    for processor in record.processors:
        emit(
            Notice(
                f"saved_model takes tensors only: requests to {name} carry {tensor_name(processor.input)}; "
                f"{processor.name} and its {processor.kind} processor stay with servax"
            )
        )


def _run(job: WriteJob) -> SavedModelRecord:
    """Runs the child that makes a SavedModel and tells what it tells."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",  # dtypes stay as the exports and the parameters have them
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, "-m", "servax.targets.savedmodel_writing"]
    written: SavedModelRecord | None = None
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(msgspec.json.encode(job))
        given.seek(0)
        child = subprocess.Popen(command, env=environment, stdin=given, stdout=subprocess.PIPE, stderr=output)
        assert child.stdout is not None
        try:
            for text in child.stdout:
                if not text.endswith(b"\n"):
                    break  # cut short by the child's death
                line: Line = msgspec.json.decode(text, type=Line)  # pyright: ignore[reportArgumentType]  # a union
                if isinstance(line, Told):
                    emit(Notice(line.message, line.level))
                elif isinstance(line, Advanced):
                    emit(StepAdvanced("saved_model", line.function, line.seconds))
                elif isinstance(line, Raised):
                    raise line.error()
                else:
                    written = SavedModelRecord.model_validate_json(line.record)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
        if status == 0 and written is not None:
            return written
        output.seek(0)
        tail = output.read()[-OUTPUT_TAIL:].decode(errors="replace").strip()
    raise BuildError(
        "the process that makes the SavedModel ended without one",
        where=job.bundle,
        seen=f"status {status}; its output ends: {tail}",
        remedy="build without `-t saved_model`, and report this",
    )


class SavedModelPart:
    """The SavedModel of a bundle, called through TensorFlow alone."""

    def __init__(self, job: Job) -> None:
        """Loads the SavedModel, its files checked.

        Raises:
          PlatformError: TensorFlow has no device of the job's platform here.
          ArtifactUnavailable: the bundle has no SavedModel.
          BundleError: a file of it is damaged.
        """
        if job.platform == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._tf = load_tensorflow()
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
                checked = padding.check(signature, each.inputs)
                sizes = {dim: checked.sizes[dim] if dim in free else size for dim, size in bucket.sizes}
                inputs = zip(
                    _by_name(signature.inputs), padding.pad(signature, Bucket.of(**sizes), checked), strict=True
                )
                with self._tf.device(self._device):
                    tensors = {
                        tensor_name(spec.name): array.astype(tensor_dtype(array.dtype)) for spec, array in inputs
                    }
                    result = call(**{name: self._tf.constant(array) for name, array in tensors.items()})
                outputs = [
                    result[tensor_name(spec.name)].numpy().astype(spec.numpy_dtype, copy=False)
                    for spec in _by_name(signature.outputs)
                ]
                answers.append(Answer(padding.cut(signature, checked.sizes, outputs)))
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
