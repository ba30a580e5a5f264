"""This machine's executables, compiled from a bundle's exports; needs neither the model's source nor a trace of it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from servax.core.errors import BundleError
from servax.stages import fingerprint
from servax.targets import aot
from servax.targets.bundle import Bundle
from servax.workflow.device import pick_device


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What `compile_bundle` did.

    Attributes:
      bundle: the bundle with the executables in it.
      fingerprint: id of this machine's fingerprint.
      added: how many executables were compiled and added.
      present: how many were there already.
    """

    bundle: Bundle
    fingerprint: str
    added: int
    present: int


def compile_bundle(path: str | os.PathLike[str], *, platform: str | None = None) -> CompileReport:
    """Adds the executables that this machine lacks.

    Raises:
      BundleError: the bundle has no exports to compile, or one is damaged.
      ArtifactUnavailable: the exports are not for this platform.
      PlatformError: the platform asked for is not here.
    """
    bundle = Bundle.open(path)
    device = pick_device(platform)
    if not bundle.manifest.programs:
        raise BundleError(
            "the bundle has no exports to compile",
            where=str(bundle.root),
            remedy="build it with its exports (without --no-fallback)",
        )
    mark = fingerprint.current([device])
    bundle, added = aot.compile_missing(bundle, device, mark)
    return CompileReport(bundle, mark.id, added, len(list(bundle.manifest.grid())) - added)
