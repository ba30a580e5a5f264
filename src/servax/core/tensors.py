"""Tensors by name, dtype and shape, and the signatures made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from servax.core.errors import ModelError

Scalar = bool | int | float
Dim = int | str
"""A fixed size, the name of a dimension (`"batch"`), or an affine expression of one (`"2*length+1"`, outputs only)."""

_SPEC = re.compile(r"^\s*(?P<dtype>[a-z0-9_]+)\s*\[(?P<dims>[^\]]*)\]\s*(?:=\s*(?P<default>\S+))?\s*$")
_AFFINE = re.compile(r"^(?:(?P<scale>-?\d+)\*)?(?P<name>[A-Za-z_]\w*)(?P<offset>[+-]\d+)?$")
_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")
}


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name such as `"float32"` or `"bfloat16"`; `"string"` is NumPy's object dtype.

    Raises:
      ModelError: the name is not a dtype that JAX or this package knows.
    """
    if name == "string":
        return np.dtype(object)
    if name in _EXTENDED:
        return _EXTENDED[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc" or dtype.name != name:
        raise ModelError(
            f"{name!r} is not a dtype",
            expected="one of bool, int8..int64, uint8..uint64, float16, bfloat16, float32, float64, "
            "complex64, complex128, string",
        )
    return dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a signature.

    Attributes:
      name: the name on the wire; of a nested structure the key path joined by dots (`image.left`).
      dtype: the dtype's name, e.g. `float32`; `string` where a processor turns text into numbers.
      shape: one `Dim` an axis.
      pad: the value that fills the tensor up to its bucket.
      default: the value of an optional tensor that a request leaves out; None: the tensor is required.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    pad: Scalar = 0
    default: Scalar | None = None

    @classmethod
    def parse(cls, name: str, text: str, *, pad: Scalar = 0) -> TensorSpec:
        """Reads `"int32[batch, length]"`, `"float32[]"` or, for an optional tensor, `"float32[batch] = 1.0"`.

        Raises:
          ModelError: the text does not have this form, or the dtype is unknown.
        """
        match = _SPEC.match(text)
        if match is None:
            raise ModelError(
                f"the spec of tensor {name!r} cannot be read",
                where=f"inputs[{name!r}]",
                seen=repr(text),
                expected='"dtype[dimension, ...]", e.g. "int32[batch, length]" or "float32[batch] = 1.0"',
            )
        dtype = dtype_of(match["dtype"])
        shape: list[Dim] = []
        for part in filter(None, (dim.strip() for dim in match["dims"].split(","))):
            if part.isdigit():
                shape.append(int(part))
            elif part.isidentifier():
                shape.append(part)
            else:
                raise ModelError(
                    f"dimension {part!r} of tensor {name!r} is neither a size nor a name",
                    where=f"inputs[{name!r}]",
                    seen=repr(text),
                    expected="an integer such as 128, or a name such as batch",
                )
        default = None if match["default"] is None else _scalar(name, match["default"], dtype)
        return cls(name, match["dtype"], tuple(shape), pad, default)

    @property
    def required(self) -> bool:
        """Whether every request must carry this tensor."""
        return self.default is None

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype; object for `string`."""
        return dtype_of(self.dtype)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dimensions this tensor mentions, in order, each once."""
        return tuple(dict.fromkeys(_names(self.shape)))

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where each named dimension has the size that `sizes` gives it."""
        return tuple(evaluate_dim(dim, sizes) for dim in self.shape)

    def text(self) -> str:
        """The spec as `parse` reads it: `int32[batch, length]`."""
        default = "" if self.default is None else f" = {self.default}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{default}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of one function.

    Attributes:
      inputs: in order of name; the tensors that the program takes.
      outputs: in order of name; empty until inferred.
      batch: the dimension along which requests are joined; None where there is none.
      lengths: input name -> the dimension whose true size, row by row, servax fills in (`int32[batch]`).
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = ()
    batch: str | None = "batch"
    lengths: Mapping[str, str] = field(default_factory=dict[str, str])

    def input(self, name: str) -> TensorSpec:
        """The input of this name; KeyError where there is none."""
        return _by_name(self.inputs, name)

    def output(self, name: str) -> TensorSpec:
        """The output of this name; KeyError where there is none."""
        return _by_name(self.outputs, name)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of all dimensions of the inputs, in order of appearance."""
        return tuple(dict.fromkeys(name for spec in self.inputs for name in spec.dims))

    def with_outputs(self, outputs: Sequence[TensorSpec]) -> Signature:
        """The same signature with these outputs."""
        return replace(self, outputs=tuple(sorted(outputs, key=lambda spec: spec.name)))


def evaluate_dim(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dimension: itself, the size of its name, or `scale*name+offset`.

    Raises:
      KeyError: `sizes` lacks the name.
    """
    if isinstance(dim, int):
        return dim
    match = _AFFINE.match(dim)
    if match is None:
        raise ValueError(f"{dim!r} is neither a name nor an affine expression of one")
    return int(match["scale"] or 1) * sizes[match["name"]] + int(match["offset"] or 0)


def _names(shape: Sequence[Dim]) -> list[str]:
    names: list[str] = []
    for dim in shape:
        if isinstance(dim, str) and (match := _AFFINE.match(dim)):
            names.append(match["name"])
    return names


def _by_name(specs: Sequence[TensorSpec], name: str) -> TensorSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise KeyError(name)


def _scalar(name: str, text: str, dtype: np.dtype) -> Scalar:
    try:
        if dtype.kind == "b":
            return {"True": True, "true": True, "False": False, "false": False}[text]
        return int(text) if dtype.kind in "iu" else float(text)
    except (KeyError, ValueError):
        raise ModelError(
            f"the default of tensor {name!r} is not a {dtype.name}", where=f"inputs[{name!r}]", seen=repr(text)
        ) from None
