"""Versions of what a bundle was built with."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

_DISTRIBUTIONS = {
    "jax": "jax",
    "jaxlib": "jaxlib",
    "orbax-checkpoint": "orbax",
    "flax": "flax",
    "equinox": "equinox",
    "tensorflow": "tensorflow",
    "tensorflow-cpu": "tensorflow",
}
"""Distribution -> the module that shows it was used."""


def versions() -> dict[str, str]:
    """Versions of servax, Python, and the libraries imported so far."""
    found = {"servax": importlib.metadata.version("servax"), "python": platform.python_version()}
    for distribution, module in _DISTRIBUTIONS.items():
        if module in sys.modules or distribution == "jaxlib":
            try:
                found[distribution] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found
