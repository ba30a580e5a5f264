"""What a bucket costs that nobody has measured, from those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from servax.stages.buckets import Bucket

Term = tuple[tuple[str, int], ...]
"""A product of sizes: dimensions with their powers. `()` is what every run costs, however small."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a run as a sum of products of its sizes, none of them negative: a larger bucket never costs less.

    Attributes:
      terms: each with its seconds.
      error: the largest relative error at a measured bucket.
    """

    terms: Mapping[Term, float]
    error: float

    def __call__(self, bucket: Bucket) -> float:
        """Seconds of a run."""
        return sum(seconds * _product(term, bucket) for term, seconds in self.terms.items())

    def text(self) -> str:
        """The sum as people read it: `0.12 ms + 0.031 ms x batch`."""
        parts = [
            " x ".join([f"{seconds * 1e3:.3g} ms", *(dim if power == 1 else f"{dim}^{power}" for dim, power in term)])
            for term, seconds in self.terms.items()
        ]
        return " + ".join(parts) or "nothing"

    @classmethod
    def fit(cls, measured: Mapping[Bucket, float], batch: str | None) -> CostModel:
        """The sum of fewest terms that comes as close to the measurements as any, by relative least squares.

        Terms are a constant, the products of dimensions, and products with the square of a dimension other than
        `batch`, as attention has it. One measurement is taken to grow with the volume.
        """
        dims = [dim for dim, _ in next(iter(measured)).sizes]
        seconds = np.array(list(measured.values()))
        volume: Term = tuple((dim, 1) for dim in dims)
        candidates = [volume] if len(measured) == 1 else _terms(dims, batch)
        columns = {term: np.array([_product(term, bucket) for bucket in measured]) / seconds for term in candidates}
        best: tuple[float, dict[Term, float]] | None = None
        most = max(min(2, len(measured)), len(measured) - 1)  # as many terms as measurements would follow their noise
        for number in range(1, min(len(candidates), most) + 1):
            for chosen in combinations(candidates, number):
                matrix = np.stack([columns[term] for term in chosen], axis=1)
                scale = np.abs(matrix).max(0)
                factors = np.linalg.lstsq(matrix / scale, np.ones(len(seconds)), rcond=None)[0]
                if (factors <= 0).any():
                    continue
                error = float(np.sqrt(np.mean((matrix / scale @ factors - 1) ** 2)))
                if best is None or error < best[0] * 0.9 - 1e-3:
                    best = error, dict(zip(chosen, (factors / scale).tolist(), strict=True))
        assert best is not None, "a single positive term fits positive measurements with a positive factor"
        model = cls(best[1], 0.0)
        return cls(best[1], max(abs(model(bucket) / cost - 1) for bucket, cost in measured.items()))


def _terms(dims: list[str], batch: str | None) -> list[Term]:
    linear = [tuple((dim, 1) for dim in some) for number in range(len(dims) + 1) for some in combinations(dims, number)]
    squares: list[Term] = [
        tuple((each, 2 if each == dim else 1) for each in dims if each in (dim, batch)) for dim in dims if dim != batch
    ]
    return linear + squares


def _product(term: Term, bucket: Bucket) -> float:
    product = 1.0
    for dim, power in term:
        product *= bucket[dim] ** power
    return product
