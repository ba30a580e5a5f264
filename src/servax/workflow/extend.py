"""A target added to a bundle from its exports, without the model's source."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from servax.core.errors import UsageError
from servax.targets import parity as proofs
from servax.targets import savedmodel
from servax.targets.bundle import Bundle, amend
from servax.targets.expiry import saved_model_expiry
from servax.targets.manifest import Manifest, SavedModelRecord
from servax.workflow.compile import compile_bundle
from servax.workflow.device import platform_here
from servax.workflow.verify import PARITY, check_targets, prove, refuse_failures, with_verdicts


def extend(
    path: str | os.PathLike[str], *, targets: Sequence[str], tensorflow: str | None = None, parity: str = "corners"
) -> Bundle:
    """Adds `aot` or `saved_model` to a bundle and proves it.

    Args:
      path: the bundle; it is changed in place, its manifest last.
      targets: of `aot` and `saved_model`.
      tensorflow: version of TensorFlow that will read the SavedModel; None: the installed one.
      parity: `corners` or `full`.

    Raises:
      UsageError: a target that needs the source, or none at all.
      ParityError: the new wrapper does not give the source's numbers; its verdict is recorded.
    """
    chosen = check_targets(targets)
    if not chosen or any(target not in ("aot", "saved_model") for target in chosen):
        raise UsageError(
            "only aot and saved_model can be made from a bundle; the others need the model's source",
            seen=", ".join(targets) or "no target",
            remedy="servax build --from BUNDLE -t saved_model, or build from the model",
        )
    bundle = Bundle.open(path)
    if "aot" in chosen:
        bundle = compile_bundle(path).bundle
    if "saved_model" in chosen:
        bundle = _add_saved_model(bundle, tensorflow)
    here = platform_here()
    found = prove(
        bundle, chosen, (here,), here, full=parity == "full", max_precision_error=None, unavailable="unproven"
    )
    bundle = amend(bundle, {PARITY: proofs.report(found)}, lambda manifest: with_verdicts(manifest, found))
    refuse_failures(bundle.manifest)
    return bundle


def with_saved_model(manifest: Manifest, record: SavedModelRecord) -> Manifest:
    """The manifest of a bundle that has a SavedModel."""
    others = tuple(each for each in manifest.expiry if each.target != "saved_model")
    return manifest.model_copy(
        update={
            "saved_model": record,
            "targets": check_targets([*manifest.targets, "saved_model"]),
            "expiry": (*others, saved_model_expiry(record.tensorflow)),
        }
    )


def _add_saved_model(bundle: Bundle, tensorflow: str | None) -> Bundle:
    directory = bundle.root / f".{savedmodel.DIRECTORY}.tmp-{secrets.token_hex(4)}"
    try:
        record = savedmodel.write(bundle, directory, tensorflow=tensorflow)
        files = {
            f"{savedmodel.DIRECTORY}/{(folder / name).relative_to(directory).as_posix()}": folder / name
            for folder, _, names in directory.walk()
            for name in names
        }
        stale = {name for name in bundle.manifest.files if name.startswith(f"{savedmodel.DIRECTORY}/")} - files.keys()
        bundle = amend(bundle, files, lambda manifest: with_saved_model(_without(manifest, stale), record))
        for name in stale:
            bundle.path(name).unlink(missing_ok=True)
        return bundle
    finally:
        directory.rmtree(missing_ok=True)


def _without(manifest: Manifest, names: set[str]) -> Manifest:
    kept = {name: record for name, record in manifest.files.items() if name not in names}
    return manifest.model_copy(update={"files": kept})
