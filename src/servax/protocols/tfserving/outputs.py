"""Outputs in the JSON of TensorFlow Serving's REST API: rows, or whole tensors, as nested lists.

NaN and infinities are the bare words `NaN`, `Infinity` and `-Infinity`, as TensorFlow Serving writes them: most JSON
libraries read them, strict JSON has nothing for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature
from servax.protocols.tfserving.names import wire_name
from servax.stages.conversion import numpy_dtype

Array = np.ndarray[Any, Any]


def require_rows(signature: Signature) -> None:
    """Refuses the row format where a function's outputs do not all have the same first dimension.

    Raises:
      InvalidInput: names the outputs with their shapes.
    """
    firsts = {spec.shape[:1] for spec in signature.outputs}
    if len(firsts) > 1 or () in firsts:
        raise InvalidInput(
            "the outputs cannot be given row by row",
            where=", ".join(spec.name for spec in signature.outputs),
            seen=", ".join(f"{spec.name}: {spec.text()}" for spec in signature.outputs),
            expected="outputs that all have the same first dimension",
            remedy="send the request in columnar format: `inputs` in place of `instances`",
        )


def require_json(signature: Signature) -> None:
    """Refuses a function with outputs that have no form in JSON; raises InvalidInput, naming them."""
    if stuck := [spec for spec in signature.outputs if numpy_dtype(spec.dtype).kind == "c"]:
        raise InvalidInput(
            "outputs have a dtype that TensorFlow Serving's JSON does not carry",
            where=", ".join(spec.name for spec in stuck),
            seen=", ".join(spec.dtype for spec in stuck),
            expected="real numbers, integers or booleans",
            remedy="give `x.real` and `x.imag` apart, or call it over gRPC",
        )


def write_predictions(outputs: Mapping[str, Array]) -> bytes:
    """The answer to a request in row format: bare values of one output, objects of several."""
    arrays = {wire_name(name): _plain(array) for name, array in outputs.items()}
    columns = {name: array.tolist() for name, array in arrays.items()}
    if len(columns) == 1:
        rows = next(iter(columns.values()))
    else:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return _encoded({"predictions": rows}, arrays)


def write_outputs(outputs: Mapping[str, Array]) -> bytes:
    """The answer to a request in columnar format: a bare tensor of one output, an object of several."""
    arrays = {wire_name(name): _plain(array) for name, array in outputs.items()}
    columns = {name: array.tolist() for name, array in arrays.items()}
    return _encoded({"outputs": next(iter(columns.values())) if len(columns) == 1 else columns}, arrays)


def _plain(array: Array) -> Array:
    """The array in a dtype of NumPy's own, which has all its values."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.astype(np.int8 if "int" in array.dtype.name else np.float32)


def _encoded(message: dict[str, Any], arrays: Mapping[str, Array]) -> bytes:
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays.values()):
        return msgspec.json.encode(message)
    return json.dumps(message, separators=(",", ":")).encode()
