"""The four wrappers by name; their modules are imported as they are asked for, since one has to do without JAX."""

from __future__ import annotations

from servax.targets.manifest import TargetName
from servax.targets.target import Target


def target(name: TargetName) -> Target:
    """The wrapper of this name."""
    match name:
        case "jit":
            from servax.targets import jit

            return jit
        case "aot":
            from servax.targets import aot

            return aot
        case "export":
            from servax.targets import exported

            return exported
        case "saved_model":
            from servax.targets import savedmodel

            return savedmodel
