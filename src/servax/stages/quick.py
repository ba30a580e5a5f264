"""The requests that need nothing done, told at once: NumPy arrays of the very dtypes and shapes of a signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from servax.core.tensors import Signature
from servax.stages.padding import CheckedTensors, is_optional

_NONE: frozenset[str] = frozenset()
_NO_LENGTHS: Mapping[str, Any] = {}


class QuickCheck:
    """`padding.check` for the requests that it would leave as they are; what it does not recognise is no fault yet."""

    __slots__ = ("_dims", "_names", "_specs")

    def __init__(self, signature: Signature) -> None:
        required = [spec for spec in signature.inputs if not is_optional(spec, signature)]
        self._specs = tuple(
            (
                spec.name,
                spec.numpy_dtype,
                len(spec.shape),
                tuple((axis, dim) for axis, dim in enumerate(spec.shape) if isinstance(dim, int)),
                tuple((axis, dim) for axis, dim in enumerate(spec.shape) if isinstance(dim, str)),
            )
            for spec in required
            if spec.dtype != "string"
        )
        self._names = frozenset(name for name, *_ in self._specs)
        whole = len(self._specs) == len(required) and all(
            spec.default is not None or spec.name in signature.lengths or spec in required for spec in signature.inputs
        )
        self._dims = len(signature.dims) if whole else -1

    def __call__(self, tensors: Mapping[str, Any], *, owned: bool) -> CheckedTensors | None:
        """The request as `check` gives it; None where only `check` can tell."""
        if len(tensors) != len(self._specs):
            return None
        sizes: dict[str, int] = {}
        for name, dtype, rank, fixed, named in self._specs:
            array = tensors.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != rank:
                return None
            shape = array.shape
            for axis, size in fixed:
                if shape[axis] != size:
                    return None
            for axis, dim in named:
                size = shape[axis]
                if size == 0 or sizes.setdefault(dim, size) != size:
                    return None
        if len(sizes) != self._dims:
            return None
        return CheckedTensors(tensors, sizes, _NO_LENGTHS, self._names if owned else _NONE)
