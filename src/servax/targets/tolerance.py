"""How far two computations of one function may differ, and how far they do.

Rounding errors of a sum of K terms behave like a random walk: they grow as `u * sqrt(K)`, `u` the unit roundoff, not
as `u * K` (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5),
2019). `rounding.py` adds these along the longest path to an output; here the sum becomes a tolerance.

It is relative to the output's scale. The factor of safety stands for what the estimate leaves out: fast
approximations of `exp` and `tanh`, and other orders of summation (1e-4 in float32 at K = 1024 when the batch size
changes, jax#34080, jax#26795). Both ends are fixed, so that a shallow function is not judged by its last bit and a deep
one does not hide a real error: in float32 everything is accepted up to 1.2e-4, nothing over 4.9e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.targets.samples import Expected, Rounding, norm_of

UNIT = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Unit roundoff by dtype: half the distance from 1 to the next number."""

SAFETY = 4.0

_WIDE = (2.0**11, 2.0**13)
_NARROW = (4.0, 16.0)
_NARROWEST_WIDE = 2.0**-20
_LARGEST = 0.25
_FILLER = 1e4
_FILLER_GAP = 100.0

Array = np.ndarray[Any, Any]


def relative_tolerance(rounding: Rounding) -> float:
    """The largest difference, relative to the output's scale, that rounding explains; 0: none, values are exact.

    At least 2^11 and at most 2^13 units for float32 and float64; at least 4 and at most 16 units for narrower types,
    where fusion leaves out whole roundings: 0.016 to 0.0625 for bfloat16.
    """
    if rounding.unit == 0:
        return 0.0
    least, most = _WIDE if rounding.unit < _NARROWEST_WIDE else _NARROW
    return min(max(SAFETY * rounding.error, least * rounding.unit), most * rounding.unit, _LARGEST)


def rounding_of(
    name: str, dtype: np.dtype[Any], platform: str, known: Mapping[str, Mapping[str, Rounding]]
) -> Rounding:
    """The rounding of an output on a platform; where none was estimated, one operation in the output's own dtype."""
    platforms = known.get(name, {})
    unit = UNIT.get(dtype.name, 0.0)
    return platforms.get(platform) or platforms.get("cpu") or Rounding(unit, unit)


@dataclass(frozen=True, slots=True)
class Difference:
    """How one array differs from what it should be, at the element that exceeds its tolerance most or comes closest.

    Attributes:
      error: absolute difference there; infinite where shapes, dtypes or non-finite values disagree.
      tolerance: absolute, at that element.
      scale: of the expected values.
      over: how many elements exceed their tolerance.
      detail: the element and both values, for people.
    """

    error: float
    tolerance: float
    scale: float
    over: int
    detail: str

    @property
    def within(self) -> bool:
        """Whether no element exceeds its tolerance."""
        return self.over == 0

    @property
    def severity(self) -> float:
        """The error in units of its tolerance."""
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance else float("inf")


def scale_of(values: Array) -> float:
    """The largest finite magnitude, fillers left out; 1 where all are zero.

    Fillers are a mask's large values (-1e9, the dtype's smallest): magnitudes of 1e4 and more, at least a hundred
    times all the others. Were they the scale, no error beside them would show.
    """
    magnitudes = np.abs(_wide(values)).reshape(-1)
    magnitudes = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    if magnitudes.size == 0:
        return 1.0
    large = magnitudes >= _FILLER
    rest = magnitudes[~large]
    if large.any() and rest.size and magnitudes[large].min() >= _FILLER_GAP * rest.max():
        return float(rest.max())
    return float(magnitudes.max())


def difference(expected: Expected, seen: Array, relative: float) -> Difference:
    """How `seen` differs from `expected`, element by element.

    An element may differ by `relative` times the scale, or times its own magnitude if that is larger. Integers and
    booleans are exact. NaN and infinities must stand in the same places.
    """
    problem = _mismatch(expected, seen)
    if problem is not None:
        return Difference(float("inf"), 0.0, 1.0, max(1, seen.size), problem)
    indices = expected.indices
    ours = seen if indices is None else seen.reshape(-1)[indices]
    found = _exact(expected, ours) if ours.dtype.kind in "biu" else _close(expected, ours, relative)
    if expected.norm is None or not found.within:
        return found
    slack = max(relative, 1e-12) * found.scale * np.sqrt(seen.size)
    if (apart := abs(norm_of(seen) - expected.norm)) > slack:
        detail = f"norm of the whole is {norm_of(seen):.6g}, expected {expected.norm:.6g}"
        return Difference(apart, float(slack), found.scale, 1, detail)
    return found


def _mismatch(expected: Expected, seen: Array) -> str | None:
    if seen.dtype != expected.values.dtype:
        return f"dtype {seen.dtype}, expected {expected.values.dtype}"
    if seen.shape != expected.shape:
        return f"shape {list(seen.shape)}, expected {list(expected.shape)}"
    return None


def _exact(expected: Expected, ours: Array) -> Difference:
    # object arithmetic: the difference of two uint64 does not fit any NumPy integer
    unequal = np.flatnonzero((ours != expected.values).reshape(-1))
    scale = scale_of(expected.values)
    if unequal.size == 0:
        return Difference(0.0, 0.0, scale, 0, "")
    apart = [abs(int(ours.flat[i]) - int(expected.values.flat[i])) for i in unequal]
    worst = int(np.argmax(apart))
    return Difference(
        float(apart[worst]), 0.0, scale, unequal.size, _element(expected, ours, int(unequal[worst]), unequal.size)
    )


def _close(expected: Expected, ours: Array, relative: float) -> Difference:
    a, b = _wide(expected.values).reshape(-1), _wide(ours).reshape(-1)
    scale = scale_of(expected.values)
    if a.size == 0:
        return Difference(0.0, relative * scale, scale, 0, "")
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (np.isnan(a) & np.isnan(b)) | (a == b)
    apart = np.full(a.shape, np.inf)
    apart[same] = 0.0
    apart[finite] = np.abs(a[finite] - b[finite])
    allowed = np.full(a.shape, relative * scale)
    allowed[finite] = relative * np.maximum(scale, np.abs(a[finite]))
    severity = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0)
    worst = int(np.argmax(severity))
    over = int(np.count_nonzero(apart > allowed))
    detail = _element(expected, ours, worst, over)
    return Difference(float(apart[worst]), float(allowed[worst]), scale, over, detail)


def _element(expected: Expected, ours: Array, flat: int, over: int) -> str:
    place = flat if expected.indices is None else int(expected.indices[flat])
    index = ", ".join(str(int(each)) for each in np.unravel_index(place, expected.shape)) if expected.shape else ""
    return f"[{index}] is {ours.flat[flat]!s}, expected {expected.values.flat[flat]!s}; {over} of {ours.size} elements"


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
