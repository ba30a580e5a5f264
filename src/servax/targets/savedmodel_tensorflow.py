"""The TensorFlow that makes a SavedModel, and the one that will read it: what each version understands."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

from servax.core.errors import UsageError

KNOWN = {
    "2.19": ("1.9.1", 9),
    "2.20": ("1.12.1", 10),
    "2.21": ("1.13.7", 10),
}
"""TensorFlow -> the StableHLO and the XlaCallModule version it reads.

Asked of the wheels tensorflow-cpu 2.19.1, 2.20.0 and 2.21.0 by the calls in `consumer`, and each proved by loading and
calling a SavedModel that jax 0.12.0.1 made for it. 2.18 (StableHLO 1.7.3) does not read modules of jax 0.12, even when
they are serialized for its version.
"""

_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")


@dataclass(frozen=True, slots=True)
class Consumer:
    """The TensorFlow that will read a SavedModel.

    Attributes:
      tensorflow: its version: all of it where it is installed here, else as it was given (`2.21`).
      stablehlo: the version of StableHLO that it reads.
      call_module: the newest version of the XlaCallModule operation that it runs, which JAX calls the calling
        convention.
    """

    tensorflow: str
    stablehlo: str
    call_module: int


def check_tensorflow(tensorflow: str | None = None) -> None:
    """Refuses at once what `consumer` would refuse once TensorFlow is imported, seconds later.

    Raises:
      UsageError: TensorFlow is not installed, or the version is neither the installed one nor known.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise _missing("there is no module tensorflow")
    if tensorflow is not None and (installed := installed_tensorflow()) is not None:
        _known(tensorflow, installed)


def load_tensorflow() -> Any:
    """The `tensorflow` module.

    Raises:
      UsageError: TensorFlow is not installed, or does not import.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise _missing(f"{type(error).__name__}: {error}") from error
    return tf


def consumer(tensorflow: str | None = None) -> Consumer:
    """What the TensorFlow of a version reads; None, or the version that is installed here: asked of that one.

    Raises:
      UsageError: TensorFlow is not installed, or the version is neither the installed one nor known.
    """
    tf = load_tensorflow()
    # No public interface says these two; JAX and TensorFlow's own converters ask in the same places.
    import tensorflow.compiler.mlir.stablehlo.stablehlo as extension
    from tensorflow.compiler.tf2xla.python import xla

    stablehlo: Any = extension  # its names come from a library
    installed: str = tf.__version__
    if tensorflow is not None and (known := _known(tensorflow, installed)) is not None:
        return Consumer(tensorflow, *known)
    return Consumer(installed, str(stablehlo.get_current_version()), int(xla.call_module_maximum_supported_version()))


def _known(tensorflow: str, installed: str) -> tuple[str, int] | None:
    """What a version reads, by the table; None for the installed one, which is asked."""
    if _minor(tensorflow) == _minor(installed):
        return None
    if (known := KNOWN.get(_minor(tensorflow))) is None:
        raise UsageError(
            f"which StableHLO TensorFlow {tensorflow} reads is not known here",
            seen=f"tensorflow={tensorflow!r}, with TensorFlow {installed} installed",
            expected=f"one of {', '.join(sorted({*KNOWN, _minor(installed)}))}",
            remedy="name one of these, or run `servax build --from BUNDLE -t saved_model` where "
            f"TensorFlow {tensorflow} is installed: it is then asked itself",
        )
    return known


def installed_tensorflow() -> str | None:
    """The version of the TensorFlow that is installed, by its metadata; None where none is."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _missing(seen: str) -> UsageError:
    return UsageError("the saved_model target needs TensorFlow", seen=seen, remedy="pip install 'servax[tensorflow]'")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
