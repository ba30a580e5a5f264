"""A checkpoint becomes a bundle: trace and export, golden outputs, compile, write, prove, rename."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from servax.checkpoint.saving import save
from servax.checkpoint.steps import Step
from servax.core import trees
from servax.core.device import Device, platform_of
from servax.core.errors import UsageError
from servax.core.events import Notice, emit
from servax.core.events import step as named_step
from servax.core.tensors import dtype_of
from servax.core.trees import Tree
from servax.model.digest import source_digest
from servax.model.model import Model
from servax.model.reference import find_reference, load_model
from servax.stages.buckets import Bucket
from servax.targets import golden, samples
from servax.targets import parity as proofs
from servax.targets.bundle import PARAMETERS, README, Bundle, BundleWriter
from servax.targets.manifest import (
    FunctionRecord,
    Manifest,
    ParameterRecord,
    ProcessorRecord,
    TargetName,
    TensorRecord,
)
from servax.targets.readme import readme_text
from servax.targets.table import target
from servax.targets.target import Materials, corners
from servax.workflow.device import check_platform, pick_device
from servax.workflow.language import write_language
from servax.workflow.load import resolved
from servax.workflow.source import Buckets, CheckpointChoice, Source, bucket_texts, is_int8, prepare
from servax.workflow.verify import PARITY, check_targets, is_full, prove, refuse_failures, with_verdicts
from servax.workflow.versions import versions


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is to be built.

    Attributes:
      targets: the wrappers.
      materials: what the wrappers are made of; functions and parameters are filled in later.
      device: where golden outputs are computed and executables compiled for.
      full: whether parity covers every bucket of every target.
      max_precision_error: largest accepted difference to float32; None: it is reported only.
    """

    targets: tuple[TargetName, ...]
    materials: Materials
    device: Device
    full: bool
    max_precision_error: float | None


def build(
    model: Model | str,
    *,
    output: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    params: Any = None,
    select: str | None = None,
    step: Step | None = None,
    item: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    targets: Sequence[str] = ("aot",),
    platforms: Sequence[str] | None = None,
    buckets: Buckets = (),
    bucket_file: str | os.PathLike[str] | None = None,
    tensorflow: str | None = None,
    parity: str = "corners",
    max_precision_error: float | None = None,
    fallback: bool = True,
    overwrite: bool = False,
) -> Bundle:
    """Builds a bundle and proves every wrapper in it; a build that fails leaves nothing behind.

    Args:
      model: a `servax.Model`, or `MODEL.py:NAME`.
      output: directory of the bundle.
      checkpoint: an Orbax directory, a safetensors or GGUF file; local path or URL.
      params: a live module or tree of arrays in place of a checkpoint.
      select: subtree of the checkpoint with the parameters.
      step: step of a CheckpointManager directory: `latest`, `best` or a number.
      item: item of a CheckpointManager checkpoint.
      dtype: what floating parameters are cast to, e.g. `bfloat16`.
      weights: of a language model: `float32`, `bfloat16` or `int8`, in place of `dtype`.
      targets: of `jit`, `aot`, `export`, `saved_model`.
      platforms: of `cpu`, `cuda`, `tpu`, what the exports are for; None: this machine's.
      buckets: overrides: sizes by dimension, `{"batch": [1, 8]}`, or texts as `--bucket` takes them.
      bucket_file: JSON with the buckets of each function.
      tensorflow: version of TensorFlow that will read the SavedModel; None: the installed one.
      parity: `corners`, or `full` for every bucket of every target.
      max_precision_error: largest accepted difference to float32, relative to the output's scale.
      fallback: whether `aot` keeps the exports beside the executables.
      overwrite: whether a bundle at `output` may be replaced.

    Returns:
      The bundle; `bundle.parity` says what was proved.

    Raises:
      UsageError: the arguments contradict one another, or the output exists.
      ModelError: the model does not fit: a closed-over weight, a dependence on padding or on other rows, a callback.
      CheckpointError: the checkpoint cannot be read or does not match.
      ParityError: a wrapper does not give the source's numbers.
    """
    if isinstance(model, str):
        model = load_model(model)
    reference = find_reference(model)
    plan = _plan(
        targets,
        platforms=platforms,
        parity=parity,
        max_precision_error=max_precision_error,
        fallback=fallback,
        tensorflow=tensorflow,
    )
    buckets = bucket_texts(buckets)
    choice = CheckpointChoice(checkpoint, select, step, item, dtype, weights)
    with BundleWriter(output, overwrite=overwrite) as writer:
        # A function of its own, so that the parameters leave the device before the children come to it.
        bundle = _make(
            writer,
            plan,
            lambda: prepare(model, choice, params=params, device=plan.device, buckets=buckets, bucket_file=bucket_file),
            choice,
            reference,
        )
        manifest = _prove(writer, bundle, plan, reference)
        if "export" not in plan.targets:
            (writer.root / "programs").rmtree()
            manifest = _without_exports(manifest)
        writer.write(README, readme_text(manifest))
        return writer.finish(manifest)


def _make(
    writer: BundleWriter,
    plan: BuildPlan,
    prepared: Callable[[], Source],
    choice: CheckpointChoice,
    reference: str | None,
) -> Bundle:
    """Every part of the bundle, unproved, in the writer's temporary place.

    Exports come first, wanted or not: what is wrong with a model shows there, before minutes of golden samples.
    """
    source = prepared()
    materials = replace(plan.materials, functions=source.functions, params=source.params)
    processors = _processors(writer, source)
    manifest = _manifest(
        source,
        plan,
        processors=processors,
        reference=reference,
        dtype=choice.dtype or (None if is_int8(source.model) else choice.weights),
    )
    manifest = manifest.model_copy(update={"language": write_language(writer, source.model)})
    bundle = target("export").make(writer.draft(manifest), materials)
    golden_files = _golden(bundle, source, plan, _float32(source, choice, plan.device))
    for file, data in golden_files.values():
        writer.write(file, data)
    with named_step("write parameters"):
        save(writer.root / PARAMETERS, source.params)
    files = {key: file for key, (file, _) in golden_files.items()}
    bundle = writer.draft(bundle.manifest.model_copy(update={"golden": files}))
    for name in plan.targets:
        if name != "export":
            bundle = target(name).make(bundle, materials)
    return bundle


def _plan(
    targets: Sequence[str],
    *,
    platforms: Sequence[str] | None,
    parity: str,
    max_precision_error: float | None,
    fallback: bool,
    tensorflow: str | None,
) -> BuildPlan:
    full = is_full(parity)
    chosen = check_targets(targets)
    if not chosen:
        raise UsageError("no target to build", remedy='name one, e.g. targets=["aot"]')
    if fallback:
        chosen = check_targets([*chosen, "export"])
    for platform in platforms or ():
        check_platform(platform)
    device = pick_device()
    wanted = tuple(dict.fromkeys(platforms or (platform_of(device),)))
    materials = Materials(lambda: device, wanted, tensorflow)
    for name in chosen:
        target(name).check(materials)
    return BuildPlan(chosen, materials, device, full, max_precision_error)


def _golden(bundle: Bundle, source: Source, plan: BuildPlan, float32: Tree | None) -> dict[str, tuple[str, bytes]]:
    """Golden samples of every bucket that some target is proved at: `FUNCTION@BUCKET` -> file and bytes."""
    proved = [target(name).buckets(bundle, full=plan.full) for name in plan.targets]
    wanted = {name: tuple(sorted({bucket for each in proved for bucket in each[name]})) for name in source.functions}

    def written(made: samples.Golden) -> tuple[str, tuple[str, bytes]]:
        bucket = Bucket.parse(made.bucket)
        return f"{made.function}@{made.bucket}", (golden.golden_file(made.function, bucket), samples.to_bytes(made))

    thorough = corners(bundle, full=plan.full)
    if bundle.manifest.language is not None and not plan.full:
        # Each unpadded size costs the compilation of every operation again, tens of seconds for a deep network.
        thorough = dict.fromkeys(thorough, ())
    return dict(golden.make_all(source.functions, wanted, source.params, written, float32=float32, thorough=thorough))


def _float32(source: Source, choice: CheckpointChoice, device: Device) -> Tree | None:
    """The parameters in float32 where the bundle's are narrower and the checkpoint has more; None otherwise."""
    if choice.path is None or choice.dtype is None or dtype_of(choice.dtype).itemsize >= 4:
        return None
    with_float32 = replace(choice, dtype="float32")
    return prepare(source.model, with_float32, device=device, grid=source.grid).params


def _processors(writer: BundleWriter, source: Source) -> dict[str, tuple[ProcessorRecord, ...]]:
    """The functions' tokenizers, written into the temporary directory."""
    records: dict[str, tuple[ProcessorRecord, ...]] = {}
    for name, function in source.functions.items():
        of_function: list[ProcessorRecord] = []
        for input_name, processor in resolved(source.model, function.processors).items():
            path = Path(processor.tokenizer)
            if not path.is_file():
                raise UsageError(
                    "the tokenizer's file is not there", where=f"{name}, input {input_name}", seen=str(path)
                )
            file = f"processors/{name}/{input_name}/tokenizer.json"
            writer.write(file, path.read_bytes())
            of_function.append(
                ProcessorRecord(
                    kind="text", input=input_name, name=processor.name, file=file, max_length=processor.max_length
                )
            )
        records[name] = tuple(of_function)
    return records


def _manifest(
    source: Source,
    plan: BuildPlan,
    *,
    processors: Mapping[str, tuple[ProcessorRecord, ...]],
    reference: str | None,
    dtype: str | None,
) -> Manifest:
    states = [function.state for function in source.functions.values() if function.state is not None]
    return Manifest(
        name=source.model.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        platforms=plan.materials.platforms,
        targets=(),
        dtype=dtype,
        provenance=source.provenance.model_copy(
            update={"source": reference, "source_digest": source_digest(source.model)}
        ),
        parameters=tuple(
            ParameterRecord(
                path=trees.path_text(path),
                dtype=leaf.dtype.name,
                shape=tuple(leaf.shape),
                origin=source.origins[path],
            )
            for path, leaf in trees.flatten(source.params).items()
        ),
        state=tuple(map(TensorRecord.of, sorted(states[0], key=lambda spec: spec.name))) if states else (),
        functions={
            name: FunctionRecord.of(
                function.signature,
                stateful=function.state is not None,
                buckets=tuple(bucket.label for bucket in source.grid[name]),
                processors=processors[name],
            )
            for name, function in source.functions.items()
        },
    )


def _without_exports(manifest: Manifest) -> Manifest:
    return manifest.model_copy(
        update={
            "programs": (),
            "targets": tuple(name for name in manifest.targets if name != "export"),
            "expiry": tuple(record for record in manifest.expiry if record.target != "export"),
        }
    )


def _prove(writer: BundleWriter, bundle: Bundle, plan: BuildPlan, reference: str | None) -> Manifest:
    """Every target proved in a child; the verdicts in the manifest, the numbers in parity.json."""
    here = platform_of(plan.device)
    found = prove(
        bundle,
        [name for name in plan.targets if name in bundle.manifest.targets],
        plan.materials.platforms,
        here,
        full=plan.full,
        max_precision_error=plan.max_precision_error,
        unavailable="failed",
        model=reference,
    )
    manifest = with_verdicts(bundle.manifest, found)
    refuse_failures(manifest)
    _tell_if_nothing_is_proved(manifest, here, str(writer.path))
    writer.write(PARITY, proofs.report(found))
    return manifest


def _tell_if_nothing_is_proved(manifest: Manifest, here: str, path: str) -> None:
    """A warning where no child came to the device: on a TPU, because this process holds it."""
    verdicts = [verdict for verdict in manifest.verdicts if verdict.platform == here]
    if verdicts and all(verdict.verdict == "unproven" for verdict in verdicts):
        emit(
            Notice(
                f"NOTHING IN THIS BUNDLE IS PROVED on {here}: no child could use the device. "
                f"If this process holds it, end it and run servax verify {path}. {verdicts[0].reason}",
                "warning",
            )
        )
