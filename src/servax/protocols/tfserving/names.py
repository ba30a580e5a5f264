"""TensorFlow Serving's words for ours: signatures are functions, its data types our dtypes, its states our states.

Names of tensors are those that a SavedModel of the same model has, where dots are underscores, so that its clients need
no change; inputs are known by our names as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from servax.core.errors import InvalidInput, NotFound, ServaxError
from servax.core.tensors import Signature
from servax.protocols.dataplane import DataPlane
from servax.protocols.wording import short
from servax.runtime.catalog import ModelStatus
from servax.runtime.servable import Servable, State, default_function
from servax.targets.savedmodel_names import tensor_name

SERVING_DEFAULT = "serving_default"
"""The signature that a request without a name means; here another name of the default function."""

PREDICT_METHOD = "tensorflow/serving/predict"
"""What a signature that answers `Predict` calls its method."""

DATA_TYPES = {
    "float32": ("DT_FLOAT", 1),
    "float64": ("DT_DOUBLE", 2),
    "int32": ("DT_INT32", 3),
    "uint8": ("DT_UINT8", 4),
    "int16": ("DT_INT16", 5),
    "int8": ("DT_INT8", 6),
    "string": ("DT_STRING", 7),
    "complex64": ("DT_COMPLEX64", 8),
    "int64": ("DT_INT64", 9),
    "bool": ("DT_BOOL", 10),
    "bfloat16": ("DT_BFLOAT16", 14),
    "uint16": ("DT_UINT16", 17),
    "complex128": ("DT_COMPLEX128", 18),
    "float16": ("DT_HALF", 19),
    "uint32": ("DT_UINT32", 22),
    "uint64": ("DT_UINT64", 23),
    "float8_e5m2": ("DT_FLOAT8_E5M2", 24),
    "float8_e4m3fn": ("DT_FLOAT8_E4M3FN", 25),
    "int4": ("DT_INT4", 29),
    "uint4": ("DT_UINT4", 30),
}
"""dtype -> name and number of TensorFlow's `DataType`."""

STATES = {
    State.LOADING: ("LOADING", 20),
    State.WARMING: ("LOADING", 20),
    State.READY: ("AVAILABLE", 30),
    State.DRAINING: ("UNLOADING", 40),
    State.UNLOADED: ("END", 50),
    State.FAILED: ("END", 50),
}
"""State -> name and number of `ModelVersionStatus.State`."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a request names; at most one of version and label is given."""

    model: str
    version: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """The function that a request means.

    Attributes:
      signature_name: as TensorFlow Serving repeats it: `serving_default` where none was named.
      texts: text tensors, each with the input it is turned into.
    """

    function: str
    signature: Signature
    signature_name: str
    texts: Mapping[str, str]


def servable_of(plane: DataPlane, target: Target) -> Servable:
    """The servable that is meant.

    Raises:
      NotFound: no such model or version.
      InvalidInput: the model has no such label, which TensorFlow Serving counts as a wrong argument.
    """
    try:
        return plane.get(target.model, target.version, target.label)
    except NotFound as error:
        if target.label is not None and target.model in plane:
            raise _as_invalid(error) from None
        raise


def called(plane: DataPlane, target: Target, signature_name: str | None) -> Called:
    """The function that a signature's name means; errors as of `servable_of`, and InvalidInput where it has none."""
    servable = servable_of(plane, target)
    signatures = servable.signatures
    named = signature_name or SERVING_DEFAULT
    function = _function(named, signatures)
    if function is None:
        raise InvalidInput(
            f"model {target.model!r} has no signature {short(named)!r}",
            where="signature_name",
            seen=short(named),
            expected=" or ".join(signature_names(signatures)),
        )
    return Called(function, signatures[function], named, servable.texts.get(function, {}))


def signature_names(signatures: Mapping[str, Signature]) -> dict[str, str]:
    """Every name of a signature, with the function it means."""
    names = {function: function for function in sorted(signatures)}
    default = default_function(None, signatures)
    return {SERVING_DEFAULT: default, **names} if default in signatures else names


def wire_name(name: str) -> str:
    """The name of a tensor as it is written."""
    return name if name.isascii() and name.isidentifier() and name[0] != "_" else tensor_name(name)


def input_name(name: str, signature: Signature, texts: Mapping[str, str]) -> str:
    """The input, or the text tensor, that a request means by a name.

    Raises:
      InvalidInput: there is none.
    """
    known = [*(spec.name for spec in signature.inputs), *texts]
    if name in known:
        return name
    found = next((each for each in known if wire_name(each) == name), None)
    if found is None:
        raise InvalidInput(
            f"there is no input {short(name)!r}", where=short(name), expected=", ".join(known) or "no input"
        )
    return found


def statuses_of(plane: DataPlane, target: Target) -> tuple[ModelStatus, ...]:
    """The status of every version of a model, or of the one that is meant; errors as of `servable_of`."""
    statuses = plane.versions(target.model)
    version = target.version if target.label is None else servable_of(plane, target).version
    if version is None:
        return statuses
    found = tuple(status for status in statuses if status.version == version)
    if not found:
        servable_of(plane, target)  # says that there is none
    return found


def error_of(status: ModelStatus) -> tuple[str, int, str]:
    """Name, number and message of the error that a version's status carries."""
    if status.state is State.FAILED:
        return "INTERNAL", 13, status.reason or "it failed"
    return "OK", 0, ""


def version_number(version: str) -> int | None:
    """A version as TensorFlow Serving has it; None for one that is no number."""
    return int(version) if version.isascii() and version.isdigit() and int(version) < 2**63 else None


def _function(named: str, signatures: Mapping[str, Signature]) -> str | None:
    """The function of a signature's name; a SavedModel may have one for each bucket (`predict_batch_8_length_32`)."""
    if named in signatures:
        return named
    if named == SERVING_DEFAULT:
        default = default_function(None, signatures)
        return default if default in signatures else None
    for function, signature in signatures.items():
        dims = "|".join(map(re.escape, signature.dims))
        if named.startswith(f"{function}_") and re.fullmatch(rf"(?:_(?:{dims})_[0-9]+)+", named[len(function) :]):
            return function
    return None


def _as_invalid(error: ServaxError) -> InvalidInput:
    return InvalidInput(error.what, where=error.where, seen=error.seen, expected=error.expected, remedy=error.remedy)
