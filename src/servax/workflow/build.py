"""A checkpoint becomes a bundle: trace and export, golden outputs, compile, write, prove, rename."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

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
from servax.stages.pipeline import run_parallel
from servax.targets import aot, exported, golden, samples
from servax.targets import parity as proofs
from servax.targets.bundle import PARAMETERS, README, Bundle, BundleWriter, amend
from servax.targets.expiry import export_expiry
from servax.targets.exported import ExportedProgram, NotSymbolic
from servax.targets.manifest import (
    FunctionRecord,
    Manifest,
    ParameterRecord,
    ProcessorRecord,
    TargetName,
    TensorRecord,
)
from servax.targets.readme import readme_text
from servax.workflow.device import check_platform, pick_device
from servax.workflow.extend import with_saved_model
from servax.workflow.load import resolved
from servax.workflow.source import Buckets, CheckpointChoice, Source, bucket_texts, prepare
from servax.workflow.verify import PARITY, check_targets, prove, refuse_failures, with_verdicts
from servax.workflow.versions import versions

_REPORTED_CONSTANT = 1024
"""Bytes from which a closed-over array is worth a line."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is to be built.

    Attributes:
      targets: the wrappers, the exports among them wherever `aot` or `saved_model` is.
      platforms: what the exports are for.
      device: where golden outputs are computed and executables compiled for.
      full: whether parity covers every bucket of every target.
      max_precision_error: largest accepted difference to float32; None: it is reported only.
      keep_exports: whether the exports stay in the bundle.
      tensorflow: version of TensorFlow the SavedModel is for; None: the installed one.
    """

    targets: tuple[TargetName, ...]
    platforms: tuple[str, ...]
    device: Device
    full: bool
    max_precision_error: float | None
    keep_exports: bool
    tensorflow: str | None


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
        reference=reference,
    )
    buckets = bucket_texts(buckets)
    choice = CheckpointChoice(checkpoint, select, step, item, dtype)
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
        if not plan.keep_exports:
            (writer.root / "programs").rmtree()
            manifest = manifest.model_copy(update={"programs": ()})
        writer.write(README, readme_text(manifest))
        return writer.finish(manifest)


def _make(
    writer: BundleWriter,
    plan: BuildPlan,
    prepared: Callable[[], Source],
    choice: CheckpointChoice,
    reference: str | None,
) -> Bundle:
    """Every part of the bundle, unproved, in the writer's temporary place."""
    source = prepared()
    programs = _export(source, plan)
    samples_files = _golden(source, plan, _float32(source, choice))
    processors = _write(writer, source, programs, samples_files)
    manifest = _manifest(
        source,
        plan,
        programs=programs,
        samples_files=samples_files,
        processors=processors,
        reference=reference,
        dtype=choice.dtype,
    )
    bundle = writer.draft(manifest)
    if "aot" in plan.targets:
        bundle = _compile(bundle, source, plan)
    if "saved_model" in plan.targets:
        bundle = _saved_model(bundle, plan)
    return bundle


def _plan(
    targets: Sequence[str],
    *,
    platforms: Sequence[str] | None,
    parity: str,
    max_precision_error: float | None,
    fallback: bool,
    tensorflow: str | None,
    reference: str | None,
) -> BuildPlan:
    if parity not in ("corners", "full"):
        raise UsageError("parity is neither corners nor full", seen=parity)
    chosen = check_targets(targets)
    if not chosen:
        raise UsageError("no target to build", remedy='name one, e.g. targets=["aot"]')
    if "jit" in chosen and reference is None:
        emit(
            Notice(
                "no jit part is written: the model is defined in a notebook or script, which a server cannot import; "
                "move it into a file to get one",
                "warning",
            )
        )
        chosen = check_targets([target for target in chosen if target != "jit"])
    keep_exports = fallback or "export" in chosen
    if keep_exports and "export" not in chosen and ("aot" in chosen or "saved_model" in chosen):
        chosen = check_targets([*chosen, "export"])
    for platform in platforms or ():
        check_platform(platform)
    device = pick_device()
    here = platform_of(device)
    wanted = tuple(dict.fromkeys(platforms or (here,)))
    if "aot" in chosen and here not in wanted:
        raise UsageError(
            f"aot compiles for this machine's {here}, which is not among the platforms",
            seen=", ".join(wanted),
            remedy=f"add --platform {here}, or build -t export here and run servax compile there",
        )
    return BuildPlan(chosen, wanted, device, parity == "full", max_precision_error, keep_exports, tensorflow)


def _export(source: Source, plan: BuildPlan) -> list[ExportedProgram]:
    """Every function at every bucket, and at symbolic dimensions where it traces, as portable StableHLO."""

    def job(name: str, bucket: Bucket) -> Callable[[], ExportedProgram | NotSymbolic]:
        return lambda: exported.export(source.functions[name], bucket, source.params, plan.platforms)

    def symbolic(name: str) -> Callable[[], ExportedProgram | NotSymbolic]:
        largest = max(source.grid[name], key=Bucket.volume)
        return lambda: exported.export_symbolic(source.functions[name], largest, source.params, plan.platforms)

    jobs = {f"{name}@{bucket.label}": job(name, bucket) for name, bucket in source.grid}
    jobs |= {
        f"{name}@symbolic": symbolic(name) for name, function in source.functions.items() if function.signature.dims
    }
    programs: list[ExportedProgram] = []
    for label, result in zip(jobs, run_parallel(jobs, "trace and export"), strict=True):
        if isinstance(result, NotSymbolic):
            emit(Notice(f"no symbolic export of {label.partition('@')[0]}: {result.reason}"))
        else:
            programs.append(result)
    _report_constants(programs)
    return programs


def _report_constants(programs: Sequence[ExportedProgram]) -> None:
    """Says which arrays stay in the programs: they keep their values when weights are swapped."""
    for name in dict.fromkeys(program.record.function for program in programs):
        largest = max((p for p in programs if p.record.function == name), key=lambda p: p.record.constant_bytes)
        shown = [each for each in largest.constants if each.bytes >= _REPORTED_CONSTANT or each.parameter]
        if shown:
            level = "warning" if any(each.parameter for each in shown) else "info"
            listed = "; ".join(map(str, shown))
            emit(Notice(f"{name} has constants in its program, which no new checkpoint changes: {listed}", level))


def _golden(source: Source, plan: BuildPlan, float32: Tree | None) -> dict[str, tuple[str, bytes]]:
    """Golden samples of every bucket that some target is proved at: `FUNCTION@BUCKET` -> file and bytes."""
    corners = proofs.buckets_to_prove("export", source.grid, full=plan.full)
    wanted = {
        name: tuple(
            sorted(
                {
                    bucket
                    for target in plan.targets
                    for bucket in proofs.buckets_to_prove(target, source.grid, full=plan.full)[name]
                }
            )
        )
        for name in source.functions
    }

    def written(made: samples.Golden) -> tuple[str, tuple[str, bytes]]:
        bucket = Bucket.parse(made.bucket)
        return f"{made.function}@{made.bucket}", (golden.golden_file(made.function, bucket), samples.to_bytes(made))

    return dict(golden.make_all(source.functions, wanted, source.params, written, float32=float32, thorough=corners))


def _float32(source: Source, choice: CheckpointChoice) -> Tree | None:
    """The parameters in float32 where the bundle's are narrower and the checkpoint has more; None otherwise."""
    if choice.path is None or choice.dtype is None or dtype_of(choice.dtype).itemsize >= 4:
        return None
    with_float32 = replace(choice, dtype="float32")
    return prepare(source.model, with_float32, device=jax.devices()[0], grid=source.grid).params


def _write(
    writer: BundleWriter,
    source: Source,
    programs: Sequence[ExportedProgram],
    samples_files: Mapping[str, tuple[str, bytes]],
) -> dict[str, tuple[ProcessorRecord, ...]]:
    """Parameters, exports, samples and tokenizers, into the temporary directory."""
    with named_step("write parameters"):
        save(writer.root / PARAMETERS, source.params)
    for program in programs:
        writer.write(program.record.file, program.data)
    for file, data in samples_files.values():
        writer.write(file, data)
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
    programs: Sequence[ExportedProgram],
    samples_files: Mapping[str, tuple[str, bytes]],
    processors: Mapping[str, tuple[ProcessorRecord, ...]],
    reference: str | None,
    dtype: str | None,
) -> Manifest:
    states = [function.state for function in source.functions.values() if function.state is not None]
    return Manifest(
        name=source.model.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        platforms=plan.platforms,
        # aot and saved_model name themselves once they are there.
        targets=tuple(target for target in plan.targets if target in ("jit", "export")),
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
        programs=tuple(program.record for program in programs),
        golden={key: file for key, (file, _) in samples_files.items()},
        expiry=(export_expiry(),),
    )


def _compile(bundle: Bundle, source: Source, plan: BuildPlan) -> Bundle:
    """This machine's executables, compiled from the exports."""

    def job(name: str, bucket: Bucket) -> Callable[[], aot.CompiledExecutable]:
        return lambda: aot.compile_executable(bundle, name, bucket, plan.device)

    jobs = {f"{name}@{bucket.label}": job(name, bucket) for name, bucket in source.grid}
    return aot.add(bundle, run_parallel(jobs, "compile"))


def _saved_model(bundle: Bundle, plan: BuildPlan) -> Bundle:
    from servax.targets import savedmodel

    record = savedmodel.write(bundle, bundle.root / savedmodel.DIRECTORY, tensorflow=plan.tensorflow)
    return amend(bundle, {}, lambda manifest: with_saved_model(manifest, record))


def _prove(writer: BundleWriter, bundle: Bundle, plan: BuildPlan, reference: str | None) -> Manifest:
    """Every target proved in a child; the verdicts in the manifest, the numbers in parity.json."""
    here = platform_of(plan.device)
    bundle = writer.draft(bundle.manifest)
    found = prove(
        bundle,
        plan.targets,
        plan.platforms,
        here,
        full=plan.full,
        max_precision_error=plan.max_precision_error,
        unavailable="failed",
        model=reference,
    )
    manifest = with_verdicts(bundle.manifest, found)
    refuse_failures(manifest)
    writer.write(PARITY, proofs.report(found))
    return manifest
