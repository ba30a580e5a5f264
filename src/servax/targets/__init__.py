"""The four wrappers and the bundle: `jit`, `aot`, `exported`, `savedmodel`, and what a bundle is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.targets.bundle import Bundle, BundleWriter, amend
    from servax.targets.manifest import Manifest
    from servax.targets.target import LoadedProgram, Program, ProgramTable

__all__ = ["Bundle", "BundleWriter", "LoadedProgram", "Manifest", "Program", "ProgramTable", "amend"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Bundle": "bundle",
        "BundleWriter": "bundle",
        "LoadedProgram": "target",
        "Manifest": "manifest",
        "Program": "target",
        "ProgramTable": "target",
        "amend": "bundle",
    },
)
