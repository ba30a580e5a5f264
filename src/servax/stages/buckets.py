"""Buckets: the shapes that are compiled ahead, and the choice of one for a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

STATIC = "static"


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A concrete size for every named dimension of one function.

    `sizes` is in order of dimension name. A function without named dimensions has the one bucket `Bucket(())`.
    """

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **sizes: int) -> Bucket:
        """The bucket of these sizes."""
        return cls(tuple(sorted(sizes.items())))

    @classmethod
    def parse(cls, label: str) -> Bucket:
        """The bucket that `label` wrote."""
        if label == STATIC:
            return cls(())
        return cls.of(**{name: int(size) for name, size in (part.split("=") for part in label.split(","))})

    @property
    def label(self) -> str:
        """`batch=8,length=32`, or `static`: for people, file names and `FUNCTION@BUCKET`."""
        return ",".join(f"{name}={size}" for name, size in self.sizes) or STATIC

    def __getitem__(self, dim: str) -> int:
        return dict(self.sizes)[dim]

    def mapping(self) -> dict[str, int]:
        """Sizes by dimension."""
        return dict(self.sizes)

    def volume(self) -> int:
        """The product of all sizes."""
        product = 1
        for _, size in self.sizes:
            product *= size
        return product

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a request of these sizes can be padded up to this bucket."""
        return all(sizes[name] <= size for name, size in self.sizes)


@dataclass(frozen=True, slots=True)
class BucketGrid:
    """The explicit set of buckets of each function."""

    functions: Mapping[str, tuple[Bucket, ...]]

    def __iter__(self) -> Iterator[tuple[str, Bucket]]:
        for name, buckets in self.functions.items():
            for bucket in buckets:
                yield name, bucket

    def __getitem__(self, function: str) -> tuple[Bucket, ...]:
        return self.functions[function]

    def __len__(self) -> int:
        return sum(map(len, self.functions.values()))

    def corners(self, function: str) -> Sequence[Bucket]:
        """The smallest and the largest bucket of a function, and those extreme in one dimension."""
        buckets = self.functions[function]
        chosen = {min(buckets, key=Bucket.volume), max(buckets, key=Bucket.volume)}
        for dim, _ in buckets[0].sizes:
            for pick in (min, max):
                edge = pick(bucket[dim] for bucket in buckets)
                chosen.add(min((b for b in buckets if b[dim] == edge), key=Bucket.volume))
        return sorted(chosen)
