"""A wrapper's answers beside the golden samples: the numbers, and the verdict they come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.targets.manifest import TargetName, VerdictRecord
from servax.targets.samples import STATE, Golden
from servax.targets.tolerance import Difference, difference, relative_tolerance, rounding_of

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
      relative: tolerance relative to the output's scale, from dtype and depth; 0: exact.
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
    """
    found: list[Measurement] = []
    for sample in golden.samples:
        for number, step in enumerate(sample.steps):
            for kind, prefix, arrays in (("outputs", "", step.outputs), ("state", STATE, step.state)):
                for name, expected in arrays.items():
                    given = answers.get(f"{sample.name}/{number}/{kind}/{name}")
                    label = prefix + name
                    relative = relative_tolerance(rounding_of(label, expected.values.dtype, platform, golden.rounding))
                    apart = _missing() if given is None else difference(expected, given, relative)
                    found.append(
                        Measurement(golden.function, golden.bucket, sample.name, number, label, relative, apart)
                    )
    return tuple(found)


def judge(
    target: TargetName,
    platform: str,
    golden: Golden,
    measurements: Sequence[Measurement],
    max_precision_error: float | None = None,
) -> VerdictRecord:
    """The verdict of one bucket: `failed` where an array exceeds its tolerance.

    `error` and `tolerance` are those of the array that exceeds its tolerance most, or comes closest. With
    `max_precision_error` a precision beyond it fails too.
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
    return VerdictRecord(
        target=target,
        platform=platform,
        function=golden.function,
        bucket=golden.bucket,
        verdict="failed" if reasons else "proved",
        error=worst.found.error if math.isfinite(worst.found.error) else None,
        tolerance=worst.found.tolerance,
        precision=golden.precision,
        reason="; ".join(reasons) or None,
    )


def _missing() -> Difference:
    return Difference(math.inf, 0.0, 1.0, 1, "the wrapper gave no such array")
