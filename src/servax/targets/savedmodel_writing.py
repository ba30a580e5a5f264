"""The making of a SavedModel, in a process of its own: `python -m servax.targets.savedmodel_writing`.

TensorFlow takes seconds to import, writes to the terminal past every log level, and may end the process on a module
that it does not like; none of that may happen to a build or to a notebook. The job comes by standard input; lines of
`savedmodel_messages` go out by standard output as the work goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from servax.core import trees
from servax.core.errors import BuildError, ModelError, ServaxError
from servax.core.events import Event, Notice, StepAdvanced, emit, subscribe
from servax.core.trees import KeyPath, Tree
from servax.stages.buckets import Bucket
from servax.targets.bundle import PARAMETERS, Bundle
from servax.targets.manifest import SYMBOLIC, ProgramRecord, SavedModelRecord
from servax.targets.savedmodel_messages import Advanced, Line, Raised, Told, WriteJob, Written
from servax.targets.savedmodel_names import refuse_if_empty, signature_name
from servax.targets.savedmodel_signatures import (
    ConvertedFunction,
    convert,
    lowers,
    set_calling_convention,
    unfit,
    variables,
)
from servax.targets.savedmodel_tensorflow import Consumer, consumer, load_tensorflow
from servax.targets.savedmodel_warmup import WarmupRequest, write_warmup

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


def make(
    bundle: Bundle, params: Tree, directory: str, left_out: Mapping[str, str], tensorflow: str | None
) -> SavedModelRecord:
    """Writes the SavedModel; `savedmodel.write` says what it raises. Parameters in host memory are not copied."""
    target = consumer(tensorflow)
    tf = load_tensorflow()
    set_calling_convention(target)
    manifest = bundle.manifest
    reasons = dict(left_out)
    signatures: list[_Signature] = []
    root = tf.Module()
    parameters = variables(params)
    root.params = {trees.path_text(path): variable for path, variable in parameters.items()}
    for name in manifest.functions:
        if name in left_out:
            continue
        start = time.perf_counter()
        try:
            signatures += list(_signatures(bundle, name, parameters, target))
        except _Unfit as error:
            reasons[name] = str(error)
            emit(Notice(f"saved_model leaves out {name}: {error}", level="warning"))
        emit(StepAdvanced("saved_model", name, time.perf_counter() - start))
    refuse_if_empty(manifest, reasons)
    origins = _origins(signatures)
    concrete = {each.name: each.converted.concrete for each in signatures}
    if (default := _default(signatures)) is not None:
        origins[DEFAULT] = default.origin
        concrete[DEFAULT] = default.converted.concrete
    tf.saved_model.save(root, directory, signatures=concrete)
    requests = [
        WarmupRequest(each.name, manifest.functions[each.function].signature(), bucket)
        for each in signatures
        for bucket in each.buckets
    ]
    write_warmup(directory, manifest.name, requests)
    return SavedModelRecord(
        tensorflow=target.tensorflow, stablehlo=target.stablehlo, signatures=origins, left_out=reasons
    )


class _Unfit(Exception):
    """A function that cannot be a signature, and why."""


def _signatures(bundle: Bundle, name: str, parameters: Mapping[KeyPath, Any], target: Consumer) -> Iterator[_Signature]:
    manifest = bundle.manifest
    buckets = tuple(map(Bucket.parse, manifest.functions[name].buckets))
    program = manifest.program(name, SYMBOLIC)
    obstacle: _Unfit | None = None
    if program is not None and (free := tuple(bucket for bucket in buckets if _covers(program, bucket))):
        try:
            converted = _convert(bundle, program, name, parameters, target, try_at=min(free, key=Bucket.volume))
        except _Unfit as error:
            obstacle = error
        else:
            yield _Signature(name, True, free, converted)
            buckets = tuple(bucket for bucket in buckets if bucket not in free)
    for number, bucket in enumerate(sorted(buckets, key=Bucket.volume)):
        program = manifest.program(name, bucket.label)
        if program is None:
            raise _Unfit(f"the bundle has no export of it at {bucket.label}")
        # Buckets differ in sizes only: what TensorFlow makes of the first, it makes of all.
        try_at = bucket if number == 0 else None
        converted = _convert(bundle, program, signature_name(name, bucket), parameters, target, try_at=try_at)
        yield _Signature(name, False, (bucket,), converted)
    if obstacle is not None:
        emit(Notice(f"saved_model has a signature per bucket of {name}: of free sizes, {obstacle}"))


def _covers(program: ProgramRecord, bucket: Bucket) -> bool:
    return all(bucket[dim] == size for dim, size in program.fixed.items())


def _convert(
    bundle: Bundle,
    program: ProgramRecord,
    name: str,
    parameters: Mapping[KeyPath, Any],
    target: Consumer,
    *,
    try_at: Bucket | None,
) -> ConvertedFunction:
    """An export as a TensorFlow function, tried at a bucket if one is given and TensorFlow has the program's platform.

    Raises:
      _Unfit: TensorFlow cannot run it.
    """
    from servax.stages.stablehlo import custom_calls
    from servax.targets.lowering import read_export

    exported = read_export(bundle, program)
    if reason := unfit(exported, custom_calls(exported.mlir_module_serialized)):
        raise _Unfit(reason)
    try:
        converted = convert(exported, name, parameters, target)
    except BuildError as error:
        raise _Unfit(error.sentence()) from error
    if try_at is not None and "cpu" in program.platforms:
        signature = bundle.manifest.functions[program.function].signature()
        if reason := lowers(converted, signature, try_at):
            raise _Unfit(f"TensorFlow does not take its program ({reason})")
    return converted


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


def restore_params(bundle: Bundle) -> Tree:
    """The parameters of a bundle in host memory, in their own dtypes, their files checked."""
    import jax

    from servax.checkpoint.restoring import restore

    if not bundle.manifest.parameters:
        return {}
    bundle.check(PARAMETERS)
    like = bundle.manifest.abstract_params()
    return restore(bundle.path(PARAMETERS), like=like, placement=jax.devices("cpu")[0]).params


def main() -> int:
    """Does the job on standard input and returns the exit status."""
    # Whatever libraries print goes to standard error; standard output is for the lines alone.
    with os.fdopen(os.dup(1), "wb", buffering=0) as output:
        os.dup2(2, 1)
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=WriteJob)

        def send(line: Line) -> None:
            output.write(msgspec.json.encode(line) + b"\n")

        def relay(event: Event) -> None:
            if isinstance(event, Notice):
                send(Told(event.message, event.level))
            elif isinstance(event, StepAdvanced):
                send(Advanced(event.detail, event.seconds))

        try:
            bundle = Bundle.open(job.bundle)
            params = restore_params(bundle)
            subscribe(relay)
            record = make(bundle, params, job.directory, job.left_out, job.tensorflow)
        except ServaxError as error:
            send(Raised.of(error))
            return 1
        send(Written(record.model_dump_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
