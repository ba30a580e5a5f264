"""A wrapper's answers beside the golden samples: the numbers, and the verdict they come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from servax.targets.child_protocol import answer_to
from servax.targets.difference import Difference, difference, ties_allowed
from servax.targets.manifest import TargetName, VerdictRecord
from servax.targets.samples import STATE, Golden
from servax.targets.tolerance import Tolerance, rounding_of

NAMED = 3
"""Arrays that a failure's reason describes; further ones are counted."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One array of a wrapper's answers beside its golden value.

    Attributes:
      function: whose answer it is.
      bucket: label of the bucket that ran.
      sample: `full`, `padded` or `alone`.
      step: number of the call, from 0.
      array: name of the output, or `state/NAME`.
      relative: tolerance of an element relative to its local scale, from dtype and depth; 0: exact.
      found: the difference.
    """

    function: str
    bucket: str
    sample: str
    step: int
    array: str
    relative: float
    found: Difference

    def text(self) -> str:
        """The difference, for people."""
        step = f", step {self.step + 1}" if self.step else ""
        numbers = f"off by {self.found.error:.3g}, tolerance {self.found.tolerance:.1e}: " if self._measured else ""
        return f"{self.array} of sample {self.sample}{step}: {numbers}{self.found.detail}"

    def as_json(self) -> dict[str, Any]:
        """The measurement as JSON values; what cannot be measured, such as a wrong shape, has no `error`."""
        return {
            "function": self.function,
            "bucket": self.bucket,
            "sample": self.sample,
            "step": self.step,
            "array": self.array,
            "error": self.found.error if self._measured else None,
            "tolerance": self.found.tolerance,
            "relative_tolerance": self.relative,
            "scale": self.found.scale,
            "elements_over": self.found.over,
            "integers_unequal": self.found.unequal,
            "detail": self.found.detail,
        }

    @property
    def _measured(self) -> bool:
        return math.isfinite(self.found.error)


def compare(golden: Golden, answers: Mapping[str, Array], platform: str) -> tuple[Measurement, ...]:
    """Every array of the golden samples beside the one that a wrapper gave.

    Args:
      golden: what should be.
      answers: by `SAMPLE/STEP/outputs/NAME` and `SAMPLE/STEP/state/NAME`.
      platform: where the wrapper ran; tolerances depend on it.

    Integers that rounded values decide are counted over all samples of the bucket, since some hold a single one.
    """
    found: list[Measurement] = []
    counts: dict[str, _Count] = {}
    for sample in golden.samples:
        for number, step in enumerate(sample.steps):
            for kind, prefix, arrays in (("outputs", "", step.outputs), ("state", STATE, step.state)):
                for name, expected in arrays.items():
                    given = answer_to(expected, answers, f"{sample.name}/{number}/{kind}", name)
                    label = prefix + name
                    tolerance = Tolerance.of(rounding_of(label, expected.values.dtype, platform, golden.rounding))
                    strict = replace(tolerance, ties=0.0)
                    apart = _missing() if given is None else difference(expected, given, strict)
                    counts[label] = counts.get(label, _Count()).plus(expected.values.size, apart, tolerance)
                    found.append(
                        Measurement(
                            golden.function, golden.bucket, sample.name, number, label, tolerance.element, apart
                        )
                    )
    return tuple(replace(each, found=counts[each.array].judged(each.found)) for each in found)


@dataclass(frozen=True, slots=True)
class _Count:
    """Integers of one output in all samples of a bucket: how many, how many unequal, and how many of them may be."""

    compared: int = 0
    unequal: int = 0
    allowed: int = 0

    def plus(self, compared: int, found: Difference, tolerance: Tolerance) -> _Count:
        total = self.compared + compared
        return _Count(total, self.unequal + found.unequal, ties_allowed(tolerance, total))

    def judged(self, found: Difference) -> Difference:
        """The difference, accepted if unequal integers are all it is and there are few enough."""
        if not found.unequal or self.unequal > self.allowed:
            return found
        return replace(found, error=0.0, over=0, detail=f"{found.unequal} integers decided otherwise by rounding")


def judge(
    target: TargetName,
    platform: str,
    golden: Golden,
    measurements: Sequence[Measurement],
    max_precision_error: float | None = None,
) -> VerdictRecord:
    """The verdict of one bucket: `failed` where an array exceeds its tolerance.

    `error` and `tolerance` are those of the array that exceeds its tolerance most, or comes closest. With
    `max_precision_error` a precision beyond it fails too. The reason of a proof counts integers that rounding decided
    otherwise.
    """
    worst = max(measurements, key=lambda each: (not each.found.within, each.found.severity))
    reasons: list[str] = []
    over = sorted((each for each in measurements if not each.found.within), key=lambda each: -each.found.severity)
    if over:
        reasons += [each.text() for each in over[:NAMED]]
        if len(over) > NAMED:
            reasons.append(f"and {len(over) - NAMED} more arrays, see parity.json")
    if max_precision_error is not None and golden.precision is not None and golden.precision > max_precision_error:
        reasons.append(
            f"differs from float32 by {golden.precision:.3g} of the output's scale, more than the "
            f"{max_precision_error:.3g} that --max-precision-error allows"
        )
    verdict = "failed" if reasons else "proved"
    unequal: dict[str, int] = {}
    for each in measurements:
        if each.found.within and each.found.unequal:
            unequal[each.array] = unequal.get(each.array, 0) + each.found.unequal
    reasons += [f"{count} of {name}'s integers decided otherwise by rounding" for name, count in unequal.items()]
    return VerdictRecord(
        target=target,
        platform=platform,
        function=golden.function,
        bucket=golden.bucket,
        verdict=verdict,
        error=worst.found.error if math.isfinite(worst.found.error) else None,
        tolerance=worst.found.tolerance,
        precision=golden.precision,
        reason="; ".join(reasons) or None,
    )


def _missing() -> Difference:
    return Difference(math.inf, 0.0, 1.0, 1, "the wrapper gave no such array")
