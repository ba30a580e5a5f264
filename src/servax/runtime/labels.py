"""Names for versions, `stable` and `canary` above all, and shares of the requests that name no version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from servax.core.errors import UsageError

LATEST = "latest"
"""In place of a version: the newest that serves."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """Shares of the requests that name neither version nor label.

    Attributes:
      weights: by label or version; only their ratios count. The share of one that is not served goes to the others.
    """

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        wrong = [f"{name}={weight}" for name, weight in self.weights.items() if not 0 <= weight < math.inf]
        if wrong or not sum(self.weights.values()) > 0:
            raise UsageError(
                "a split's weights cannot be used",
                seen=", ".join(wrong) or ", ".join(f"{name}={weight}" for name, weight in self.weights.items()),
                expected="numbers of 0 and more, one of them above 0",
            )

    @classmethod
    def parse(cls, text: str) -> Split:
        """The split that a text such as `stable=0.9,canary=0.1` means.

        Raises:
          UsageError: it cannot be read.
        """
        pairs = _pairs(text, "a split", "stable=0.9,canary=0.1")
        try:
            return cls({name: float(value) for name, value in pairs})
        except ValueError:
            raise _unreadable("a split", text, "stable=0.9,canary=0.1") from None


def draw(point: float, shares: Sequence[tuple[float, T]]) -> T | None:
    """What `point`, of 0 up to 1, falls on when `shares`, weight and value, are laid side by side; None without any."""
    left = point * sum(weight for weight, _ in shares)
    for weight, value in shares:
        if left < weight:
            return value
        left -= weight
    return shares[-1][1] if shares else None


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Versions by label, of texts such as `stable=3` and `canary=latest`.

    Raises:
      UsageError: one cannot be read, is a number itself, or is given twice.
    """
    labels: dict[str, str] = {}
    for text in texts:
        for label, version in _pairs(text, "a label", "stable=3"):
            if label.isdecimal() or not (version.isdecimal() or version == LATEST) or label in labels:
                raise _unreadable("a label", text, "stable=3 or canary=latest: each label once, its name no number")
            labels[label] = version if version == LATEST else str(int(version))
    return labels


def _pairs(text: str, what: str, example: str) -> list[tuple[str, str]]:
    pairs = [tuple(map(str.strip, part.partition("=")[::2])) for part in text.split(",")]
    if not all(name and value for name, value in pairs) or len({name for name, _ in pairs}) < len(pairs):
        raise _unreadable(what, text, example)
    return [(name, value) for name, value in pairs]


def _unreadable(what: str, text: str, example: str) -> UsageError:
    return UsageError(f"{what} cannot be read", seen=text, expected=f"e.g. {example}")
