"""A target added to a bundle from its exports, without the model's source."""

from __future__ import annotations

import os
from collections.abc import Sequence

from servax.core.errors import UsageError
from servax.targets import parity as proofs
from servax.targets.bundle import Bundle, amend
from servax.targets.manifest import TARGETS
from servax.targets.table import target
from servax.targets.target import Materials
from servax.workflow.device import pick_device, platform_here
from servax.workflow.verify import PARITY, check_targets, is_full, prove, refuse_failures, with_verdicts


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
      UsageError: a target that needs the source, or none at all; a TensorFlow that is missing or not known.
      ParityError: the new wrapper does not give the source's numbers; its verdict is recorded.
    """
    full = is_full(parity)
    chosen = check_targets(targets)
    if not chosen or not all(target(name).FROM_EXPORTS for name in chosen):
        possible = [name for name in TARGETS if target(name).FROM_EXPORTS]
        raise UsageError(
            f"only {' and '.join(possible)} can be made from a bundle; the others need the model's source",
            seen=", ".join(targets) or "no target",
            remedy="servax build --from BUNDLE -t saved_model, or build from the model",
        )
    bundle = Bundle.open(path)
    materials = Materials(pick_device, bundle.manifest.platforms, tensorflow)
    for name in chosen:
        target(name).check(materials)
    for name in chosen:
        bundle = target(name).make(bundle, materials)
    here = platform_here()
    found = prove(bundle, chosen, (here,), here, full=full, unavailable="unproven")
    bundle = amend(bundle, {PARITY: proofs.report(found)}, lambda manifest: with_verdicts(manifest, found))
    refuse_failures(bundle.manifest)
    return bundle
