"""How one array differs from what it should be, by element, as a whole, and by a common factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.targets.samples import Expected
from servax.targets.tolerance import Tolerance

_FILLER = 1e4
_FILLER_GAP = 100.0

_SPREAD = 3.0
"""How far the largest of thousands of normal deviates lies above the upper quartile of their magnitudes."""

_GROUP = 4
"""Elements that a column needs for its magnitudes to say something."""

_FEW = 1 / 4
"""What the largest element of a row gives to the scale of the others, where too few rows tell if it stands alone."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """How one array differs from what it should be, at the element that exceeds its tolerance most or comes closest.

    Attributes:
      error: absolute difference there; infinite where shapes, dtypes or non-finite values disagree. Where only the
        whole is off, its relative error times the scale.
      tolerance: absolute, at that element.
      scale: of the expected values.
      over: how many elements exceed their tolerance.
      detail: the element and both values, for people.
      unequal: how many integers are unequal, within tolerance or not.
    """

    error: float
    tolerance: float
    scale: float
    over: int
    detail: str
    unequal: int = 0

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
    """The largest finite magnitude, a mask's fillers (-1e9, the dtype's smallest) left out; 1 where all are zero."""
    magnitudes = np.abs(_wide(values)).reshape(-1)
    magnitudes = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    if magnitudes.size == 0:
        return 1.0
    return float(magnitudes[~_fillers(magnitudes)].max())


def difference(expected: Expected, seen: Array | Expected, tolerance: Tolerance) -> Difference:
    """How `seen`, whole or the same elements of it, differs from `expected`.

    Floats pass three gates: every element against its local scale, the whole, and a common factor. Integers and
    booleans are equal but for `tolerance.ties`. NaN and infinities must stand in the same places.
    """
    whole = seen if isinstance(seen, Expected) else Expected.of(seen)
    problem = _mismatch(expected, whole)
    if problem is not None:
        return Difference(float("inf"), 0.0, 1.0, max(1, whole.values.size), problem)
    given = whole if whole.indices is not None or expected.indices is None else expected.like(whole.values)
    ours = given.values
    if ours.dtype.kind in "biu" or ours.dtype.name in ("int4", "uint4"):
        return _integers(expected, ours, ties_allowed(tolerance, ours.size))
    found = _floats(expected, ours, tolerance)
    if expected.norm is None or given.norm is None or not found.within:
        return found
    slack = max(tolerance.whole, 1e-12) * max(expected.norm, found.scale)
    if (apart := abs(given.norm - expected.norm)) > slack:
        detail = f"norm of the whole is {given.norm:.6g}, expected {expected.norm:.6g}"
        return Difference(apart, float(slack), found.scale, 1, detail)
    return found


def ties_allowed(tolerance: Tolerance, size: int) -> int:
    """How many of `size` integers may be unequal: where rounded values decide them one at least, but never all."""
    return max(0, min(max(1, int(tolerance.ties * size)), size - 1)) if tolerance.ties else 0


def _mismatch(expected: Expected, seen: Expected) -> str | None:
    if seen.values.dtype != expected.values.dtype:
        return f"dtype {seen.values.dtype}, expected {expected.values.dtype}"
    if seen.shape != expected.shape:
        return f"shape {list(seen.shape)}, expected {list(expected.shape)}"
    return None


def _integers(expected: Expected, ours: Array, allowed: int) -> Difference:
    # object arithmetic: the difference of two uint64 does not fit any NumPy integer
    unequal = np.flatnonzero((ours != expected.values).reshape(-1))
    scale = scale_of(expected.values)
    if unequal.size == 0:
        return Difference(0.0, 0.0, scale, 0, "")
    apart = [abs(int(ours.flat[i]) - int(expected.values.flat[i])) for i in unequal]
    worst = int(np.argmax(apart))
    detail = _element(expected, ours, int(unequal[worst]), unequal.size)
    if unequal.size <= allowed:
        return Difference(0.0, 0.0, scale, 0, f"{unequal.size} of {ours.size} integers unequal", unequal.size)
    return Difference(float(apart[worst]), 0.0, scale, unequal.size, detail, unequal.size)


def _floats(expected: Expected, ours: Array, tolerance: Tolerance) -> Difference:
    a, b = _wide(expected.values).reshape(-1), _wide(ours).reshape(-1)
    scale = scale_of(expected.values)
    if a.size == 0:
        return Difference(0.0, tolerance.element * scale, scale, 0, "")
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (np.isnan(a) & np.isnan(b)) | (a == b)
    apart = np.full(a.shape, np.inf)
    apart[same] = 0.0
    apart[finite] = np.abs(a[finite] - b[finite])
    local = _local_scales(a, expected, scale)
    allowed = tolerance.element * local
    severity = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0)
    worst = int(np.argmax(severity))
    over = int(np.count_nonzero(apart > allowed))
    if over == 0:
        counted = finite & ~_fillers(np.abs(a))
        units = local[counted]
        problem = _whole(a[counted] / units, (b[counted] - a[counted]) / units, scale, tolerance)
        if problem is not None:
            return problem
    detail = _element(expected, ours, worst, over)
    return Difference(float(apart[worst]), float(allowed[worst]), scale, over, detail)


def _local_scales(values: Array, expected: Expected, scale: float) -> Array:
    """By element, the magnitude that its rounding errors are relative to.

    The terms summed into an element are as large as its row along the last axis, or its column, mostly is: the upper
    quartile of the two, so that a few large columns (one dominant logit) or rows hide little of the others, and a small
    element of a large column is not judged by its own size. Never more than the scale of the whole, unless the element
    itself is. The whole's where there are no two axes.
    """
    magnitudes = np.abs(values)
    own = np.where(np.isfinite(magnitudes), magnitudes, 0.0)
    local = np.full(values.shape, scale)
    if len(expected.shape) >= 2 and values.size:
        positions = np.arange(values.size) if expected.indices is None else expected.indices
        row, column = np.divmod(positions, expected.shape[-1])
        usable = (own > 0) & ~_fillers(magnitudes)
        of_row, of_column = _Group.of(own, row, usable), _Group.of(own, column, usable)
        rows = int(np.prod(expected.shape[:-1]))
        known = of_column.count >= min(_GROUP, rows)
        typical = _SPREAD * np.where(known, np.maximum(of_row.quartile, of_column.quartile), np.inf)
        # A row's peak is the scale of all in it, as in a softmax, only as far as other columns have such peaks as well.
        peaks = np.minimum(of_row.most, np.quantile(of_column.most, 0.75)) if rows >= _GROUP else _FEW * of_row.most
        local = np.minimum(np.maximum(typical, peaks), scale)
    return np.maximum(local, own)


@dataclass(frozen=True, slots=True)
class _Group:
    """Of each element's row or column, the number of usable magnitudes, their upper quartile and the largest."""

    count: Array
    quartile: Array
    most: Array

    @classmethod
    def of(cls, magnitudes: Array, groups: Array, usable: Array) -> _Group:
        """The groups that `groups` numbers, element by element; 0 where none is usable."""
        ids, values = groups[usable], magnitudes[usable]
        order = np.lexsort((values, ids))
        ranked = values[order]
        present, first, counts = np.unique(ids[order], return_index=True, return_counts=True)
        count, quartile, most = (np.zeros(int(groups.max(initial=0)) + 1) for _ in range(3))
        count[present] = counts
        quartile[present] = ranked[first + (3 * (counts - 1) + 3) // 4]
        most[present] = ranked[first + counts - 1]
        return cls(count[groups], quartile[groups], most[groups])


def _whole(wanted: Array, apart: Array, scale: float, tolerance: Tolerance) -> Difference | None:
    """The relative L2 error of the whole, or the factor common to all, if it is more than rounding explains.

    Of n elements, no L2 error is judged more strictly than one element times 1 / sqrt(n), no factor than an L2 error
    is.

    Args:
      wanted: expected values in units of their local scales, so that large columns do not hide the others.
      apart: differences, in the same units.
      scale: of the expected values.
      tolerance: of the output.
    """
    total = float(np.linalg.norm(wanted))
    if total == 0:
        return None
    root = float(np.sqrt(wanted.size))
    whole = max(tolerance.whole, tolerance.element / root)
    error = float(np.linalg.norm(apart)) / total
    if error > whole:
        detail = f"relative L2 error of the whole is {error:.2g}, where rounding explains {whole:.2g}"
        return Difference(error * scale, whole * scale, scale, wanted.size, detail)
    most = max(tolerance.factor, whole / root)
    factor = float(np.vdot(wanted, apart).real) / total**2
    if abs(factor) > most:
        detail = f"all values are scaled by {1 + factor:.4g}, where rounding explains {most:.2g}"
        return Difference(abs(factor) * scale, most * scale, scale, wanted.size, detail)
    return None


def _element(expected: Expected, ours: Array, flat: int, over: int) -> str:
    place = flat if expected.indices is None else int(expected.indices[flat])
    index = ", ".join(str(int(each)) for each in np.unravel_index(place, expected.shape)) if expected.shape else ""
    return f"[{index}] is {ours.flat[flat]!s}, expected {expected.values.flat[flat]!s}; {over} of {ours.size} elements"


def _fillers(magnitudes: Array) -> Array:
    """Which magnitudes are a mask's large values: 1e4 and more, and at least a hundred times all the others."""
    finite = np.isfinite(magnitudes)
    large = finite & (magnitudes >= _FILLER)
    rest = magnitudes[finite & ~large & (magnitudes > 0)]
    if large.any() and rest.size and magnitudes[large].min() >= _FILLER_GAP * rest.max():
        return large
    return np.zeros(magnitudes.shape, bool)


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
