"""Re-exports that cost nothing until they are used: importing a room must not import JAX, Flax or Orbax."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) of a package that re-exports `names`.

    `names` maps each name to the module that defines it, dotted from the package.
    """

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{names[name]}"), name)

    def directory() -> list[str]:
        return sorted(names)

    return getattribute, directory
