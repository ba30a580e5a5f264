"""The next version of a stored model: the same programs with new weights; no source, no Flax, no compilation."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from etils import epath

from servax.checkpoint.restoring import Restored
from servax.checkpoint.saving import save
from servax.checkpoint.steps import Step as CheckpointStep
from servax.core import trees
from servax.core.device import Device, platform_of
from servax.core.errors import ArtifactUnavailable, BundleError, UsageError
from servax.core.events import Notice, StepAdvanced, emit
from servax.core.events import step as named_step
from servax.core.monitoring import LOADING, thread_role
from servax.core.trees import KeyPath
from servax.runtime.directories import latest_bundle, versions_of
from servax.runtime.swap import difference, require_finite
from servax.stages import fingerprint
from servax.stages.buckets import Bucket
from servax.targets import aot
from servax.targets.bundle import PARAMETERS, README, Bundle, BundleWriter
from servax.targets.child_protocol import Job
from servax.targets.golden import golden_file
from servax.targets.jaxpart import JaxPart
from servax.targets.manifest import FileRecord, Manifest, RefreshRecord
from servax.targets.manifestfile import REBUILD
from servax.targets.readme import readme_text
from servax.targets.samples import Expected, Golden, from_bytes, to_bytes
from servax.workflow.device import pick_device
from servax.workflow.parameters import bundle_params, lifted_paths, lifted_values, restored_as

_REPLACED = (PARAMETERS, "golden", "saved_model")
"""Directories of a bundle that hold its parameters, or what they give."""


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What `refresh` made.

    Attributes:
      bundle: the new version.
      version: its number.
      leaves: how many parameters it has.
      bytes: their size.
      record: what the manifest says of it: where the programs are from, finiteness, drift, and what is left out.
    """

    bundle: Bundle
    version: int
    leaves: int
    bytes: int
    record: RefreshRecord


def refresh(
    folder: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str],
    select: str | None = None,
    step: CheckpointStep | None = None,
    item: str | None = None,
    base: int | None = None,
    platform: str | None = None,
    executables: bool = True,
    allow_nonfinite: bool = False,
) -> RefreshReport:
    """Writes the next version of `STORE/NAME`: programs of the newest version, parameters of `checkpoint`.

    Where the bundle has executables for this machine, they answer the golden samples with the new parameters: how far
    the answers moved is recorded, and they are the new golden samples. A SavedModel holds its parameters itself, and is
    left out.

    Args:
      folder: the model's directory, with its versions.
      checkpoint: an Orbax directory, a safetensors or GGUF file; local path or URL.
      select: subtree of the checkpoint with the parameters; None: the one that fits.
      step: step of a CheckpointManager directory.
      item: item of a CheckpointManager checkpoint.
      base: the version whose programs are taken; None: the newest.
      platform: the device the parameters are restored on: `cpu`, `cuda`, `tpu`; None: JAX's default.
      executables: whether native code of the bundle may be loaded.
      allow_nonfinite: whether parameters may hold NaN or infinity where those of the base are finite.

    Raises:
      UsageError: there is no version to take the programs of.
      CheckpointError: the checkpoint cannot be read, its leaves differ in path, shape or dtype, or are not finite.
      BundleError: a file of the base is damaged.
    """
    root = epath.Path(folder).expanduser()
    old = _base(root, base)
    device = pick_device(platform)
    with thread_role(LOADING), BundleWriter(root / str(_next(root))) as writer:
        restored, finite = _restored(old, device, checkpoint, allow_nonfinite, select=select, step=step, item=item)
        with named_step("write parameters"):
            save(writer.root / PARAMETERS, restored.params)
        record = RefreshRecord(
            version=old.root.name,
            built=old.manifest.refresh.built if old.manifest.refresh else old.manifest.created,
            finite=finite,
        )
        leaves = trees.flatten(restored.params).values()
        count, size = len(leaves), sum(leaf.nbytes for leaf in leaves)
        manifest = _manifest(old.manifest, restored)
        del restored, leaves  # from here on they are the new version's own
        _link(old, writer)
        manifest, record = _with_golden(old, writer, manifest, record, device, executables=executables)
        manifest = manifest.model_copy(update={"refresh": record})
        writer.write(README, readme_text(manifest))
        bundle = _finish(writer, manifest, root, old)
    for part, reason in record.left_out.items():
        emit(Notice(f"{part} is left out of {bundle.root}: {reason}", "warning"))
    return RefreshReport(bundle, int(bundle.root.name), count, size, record)


def _base(root: epath.Path, version: int | None) -> Bundle:
    """The version that the programs come from."""
    there = versions_of(root)
    path = latest_bundle(root) if version is None else there.get(version)
    if path is None:
        raise UsageError(
            "there is no version to take the programs of",
            where=str(root),
            seen=", ".join(map(str, there)) or "no directory whose name is a whole number",
            expected="STORE/NAME, with a bundle in STORE/NAME/VERSION",
            remedy="build the first version: servax build ... -o STORE/NAME/1",
        )
    return Bundle.open(path)


def _next(root: epath.Path) -> int:
    return max(versions_of(root), default=0) + 1


def _restored(
    old: Bundle, device: Device, checkpoint: str | os.PathLike[str], allow_nonfinite: bool, **choice: Any
) -> tuple[Restored, bool]:
    """The new parameters on the device, and whether all are finite."""
    with named_step("restore"):
        lifted: Mapping[KeyPath, Any] = {}
        if lifted_paths(old):
            lifted = lifted_values(old, bundle_params(old, device))
        restored = restored_as(
            checkpoint,
            like=old.manifest.abstract_params(),
            selected=old.manifest.provenance.select,
            device=device,
            lifted=lifted,
            int8=old.manifest.is_int8,
            **choice,
        )
    leaves = trees.flatten(restored.params)
    fresh = tuple(leaves.values())
    present: Any = _Present(old, device)
    finite = require_finite(tuple(leaves), fresh, present, allow=allow_nonfinite, checkpoint=os.fspath(checkpoint))
    return restored, finite


class _Present:
    """Leaves of the base by position, read only if one is asked for: most checkpoints are finite."""

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self._bundle = bundle
        self._device = device
        self._leaves: tuple[Any, ...] | None = None

    def __getitem__(self, index: int) -> Any:
        if self._leaves is None:
            self._leaves = tuple(bundle_params(self._bundle, self._device).values())
        return self._leaves[index]


def _manifest(old: Manifest, restored: Restored) -> Manifest:
    """The base's manifest with the new parameters' provenance, without what holds the old ones."""
    found = restored.provenance
    return old.model_copy(
        update={
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "provenance": old.provenance.model_copy(
                update={
                    "checkpoint": found.path,
                    "layout": found.layout,
                    "step": found.step,
                    "item": found.item,
                    "select": found.select,
                }
            ),
            "parameters": tuple(
                each.model_copy(update={"origin": restored.origins[trees.path_of(each.path)]})
                for each in old.parameters
            ),
            "targets": tuple(name for name in old.targets if name != "saved_model"),
            "saved_model": None,
            "verdicts": tuple(each for each in old.verdicts if each.target != "saved_model"),
            "expiry": tuple(each for each in old.expiry if each.target != "saved_model"),
            "golden": {},
        }
    )


def _link(old: Bundle, writer: BundleWriter) -> None:
    """Puts the files that do not depend on the parameters into the new version: as hard links if possible."""
    for rel in _kept(old.manifest):
        source, target = old.path(rel), writer.root / rel
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            if source.exists():  # an executable that is gone can be made again
                source.copy(target)


def _kept(manifest: Manifest) -> Mapping[str, FileRecord]:
    return {
        rel: record for rel, record in manifest.files.items() if rel.split("/")[0] not in _REPLACED and rel != README
    }


def _with_golden(
    old: Bundle, writer: BundleWriter, manifest: Manifest, record: RefreshRecord, device: Device, *, executables: bool
) -> tuple[Manifest, RefreshRecord]:
    """The new version's golden samples, answered by this machine's executables, and how far they are from the old."""
    left_out: dict[str, str] = {}
    if old.manifest.saved_model is not None:
        left_out["saved_model"] = (
            "it holds the old parameters; make it anew with `servax build --from STORE/NAME/VERSION -t saved_model`"
        )
    drift: dict[str, float | None] = {}
    files: dict[str, str] = {}
    part = _executables(writer.draft(manifest), device, allowed=executables) if old.manifest.golden else ""
    if isinstance(part, str):
        left_out |= {"golden": part} if part else {}
    else:
        with named_step("golden", total=len(old.manifest.golden)):
            for key, file in old.manifest.golden.items():
                golden = from_bytes(old.read(file), file)
                made = _answered(golden, part)
                if isinstance(made, str):
                    left_out[f"golden {key}"] = made
                    continue
                rel = golden_file(golden.function, Bucket.parse(golden.bucket))
                writer.write(rel, to_bytes(made))
                files[key] = rel
                drift[golden.function] = _larger(drift.get(golden.function, 0.0), moved(golden, made))
                emit(StepAdvanced("golden", key))
    return (
        manifest.model_copy(update={"golden": files}),
        record.model_copy(update={"drift": drift, "left_out": left_out}),
    )


def _executables(draft: Bundle, device: Device, *, allowed: bool) -> JaxPart | str:
    """The new version's executables with its parameters; why not, where it has none for this machine."""
    if not allowed:
        return "executables are not to be loaded (--no-executables)"
    mark = fingerprint.current([device])
    if not any(aot.is_usable(draft, name, bucket, mark) for name, bucket in draft.manifest.grid()):
        return f"the bundle has no executable for this machine; run `servax compile {draft.root.parent}/VERSION` first"
    return aot.open_part(Job("aot", platform_of(device), str(draft.root), "", ()))


def _answered(golden: Golden, part: JaxPart) -> Golden | str:
    """The samples with the answers of the new version; why not, where its program cannot run here."""
    try:
        answering = part.load(golden.function, Bucket.parse(golden.bucket))
    except ArtifactUnavailable as error:
        return error.sentence()
    samples = tuple(
        replace(
            sample,
            steps=tuple(
                replace(
                    step,
                    outputs={name: Expected.of(np.array(answer.outputs[name])) for name in step.outputs},
                    state=dict(answer.state),
                )
                for step, answer in zip(sample.steps, answering(sample), strict=True)
            ),
        )
        for sample in golden.samples
    )
    return replace(golden, samples=samples, precision=None)


def moved(old: Golden, new: Golden) -> float | None:
    """How far outputs moved: the largest difference over the largest absolute old value; None: not finite any more."""
    largest: float | None = 0.0
    for before, after in zip(old.samples, new.samples, strict=True):
        for first, second in zip(before.steps, after.steps, strict=True):
            for name, expected in first.outputs.items():
                now = second.outputs[name].values
                now = now if expected.indices is None else now.reshape(-1)[expected.indices]
                largest = _larger(largest, difference(expected.values, now))
    return largest


def _larger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None or not np.isfinite([one, other]).all():
        return None
    return max(one, other)


def _finish(writer: BundleWriter, manifest: Manifest, root: epath.Path, old: Bundle) -> Bundle:
    """The version under the next free number: another refresh may have taken the one that was free at the start.

    Raises:
      BundleError: a file of the base is not what its manifest says.
    """
    draft = writer.draft(manifest)
    if changed := [
        f"{old.path(rel)}: SHA-256 {seen.sha256}, expected {record.sha256}"
        for rel, record in _kept(old.manifest).items()
        if (seen := draft.manifest.files.get(rel)) is not None and seen != record
    ]:
        raise BundleError(
            f"{len(changed)} files of the version that the programs come from are damaged",
            where="; ".join(changed),
            remedy=REBUILD,
        )
    while True:
        try:
            return writer.finish(manifest)
        except (UsageError, OSError):
            if not writer.path.exists():
                raise
            writer.path = (root / str(_next(root))).absolute()
