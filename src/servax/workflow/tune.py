"""The grid of buckets fitted to recorded shapes: what `servax tune` finds, and what it saves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from servax.core.errors import UsageError
from servax.core.events import Notice, emit
from servax.core.table import Table, seconds_text
from servax.core.tensors import Signature
from servax.stages.buckets import Bucket, BucketGrid, make_grid
from servax.stages.cost_model import CostModel
from servax.stages.fitting import Cost, Fitting, expected, share, thin
from servax.workflow.traffic import Shape

By = Literal["run", "request"]

_SIZES = {0: 1, 1: 1024, 2: 96}
"""Sizes of each dimension that are told apart, by the number of dimensions; of more dimensions 16."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a grid is fitted for.

    Attributes:
      name: of the model.
      signatures: by function.
      grid: the present buckets.
      costs: measured seconds of its programs; empty: cost is the padded volume.
    """

    name: str
    signatures: Mapping[str, Signature]
    grid: BucketGrid
    costs: Mapping[tuple[str, Bucket], float] = field(default_factory=dict[tuple[str, Bucket], float])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A grid of one function with what the recorded traffic costs in it; infinite where some of it does not fit."""

    buckets: tuple[Bucket, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """One function's part of the result.

    Attributes:
      kind: what the grid is fitted to, `run` or `request`.
      observed: how many of them.
      model: cost of a bucket; None: its volume.
      fitted: the cheapest grid.
      powers: the cheapest grid of powers of two (and the largest size) under the same limit.
      present: the grid as it is.
    """

    kind: By
    observed: int
    model: CostModel | None
    fitted: Candidate
    powers: Candidate
    present: Candidate


@dataclass(frozen=True, slots=True)
class Tuning:
    """The fitted grid.

    Attributes:
      name: of the model.
      functions: those that shapes were recorded of.
      grid: of all functions; one without recorded shapes keeps its buckets.
      limit: of the number of executables.
    """

    name: str
    functions: Mapping[str, Tuned]
    grid: BucketGrid
    limit: int

    @property
    def measured(self) -> bool:
        """Whether costs are seconds rather than padded volumes."""
        return all(tuned.model is not None for tuned in self.functions.values())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the grid as `--bucket-file` takes it."""
        from etils import epath

        lines = [
            f"  {json.dumps(name)}: [\n    "
            + ",\n    ".join(json.dumps(bucket.mapping()) for bucket in self.grid[name])
            + "\n  ]"
            for name in self.grid.functions
        ]
        epath.Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""

        def of(candidate: Candidate) -> dict[str, Any]:
            cost = candidate.cost if candidate.cost != float("inf") else None
            return {"buckets": [bucket.mapping() for bucket in candidate.buckets], "cost": cost}

        return {
            "name": self.name,
            "limit": self.limit,
            "unit": "seconds" if self.measured else "padded elements",
            "grid": {name: [bucket.mapping() for bucket in buckets] for name, buckets in self.grid.functions.items()},
            "functions": {
                name: {
                    "fitted_to": tuned.kind,
                    "observed": tuned.observed,
                    "cost": None if tuned.model is None else tuned.model.text(),
                    "cost_error": None if tuned.model is None else tuned.model.error,
                    **{key: of(getattr(tuned, key)) for key in ("fitted", "powers", "present")},
                }
                for name, tuned in self.functions.items()
            },
        }

    def table(self) -> Table:
        """For each function the three grids side by side."""
        rows: list[tuple[str, ...]] = []
        for name, tuned in self.functions.items():
            for title, candidate in (
                ("fitted", tuned.fitted),
                ("powers of two", tuned.powers),
                ("present", tuned.present),
            ):
                comparable = title != "fitted" and 0 < candidate.cost < float("inf")
                saved = f"{1 - tuned.fitted.cost / candidate.cost:.1%}" if comparable else ""
                rows.append(
                    (
                        name,
                        title,
                        _grid_text(candidate.buckets),
                        str(len(candidate.buckets)),
                        self._cost_text(candidate.cost),
                        saved,
                    )
                )
        cost = ">device time" if self.measured else ">padded elements"
        return Table.of(
            f"{self.name}: grids of at most {self.limit} executables, and what the recorded traffic costs in each",
            ("function", "grid", "buckets", ">executables", cost, ">saved by fitted"),
            rows,
        )

    def _cost_text(self, cost: float) -> str:
        if cost == float("inf"):
            return "does not hold all"
        return seconds_text(cost) if self.measured else f"{cost:,.0f}"


def describe(subject: str, buckets: Sequence[str] = (), bucket_file: str | os.PathLike[str] | None = None) -> Subject:
    """A bundle, or `MODEL.py:NAME`, without its costs: nothing is loaded or compiled."""
    from servax.model.reference import load_model
    from servax.targets.bundle import Bundle, is_bundle

    if is_bundle(subject):
        manifest = Bundle.open(subject).manifest
        signatures = {name: record.signature() for name, record in manifest.functions.items()}
        return Subject(manifest.name, signatures, manifest.grid())
    model = load_model(subject)
    signatures = {name: function.signature for name, function in model.functions.items()}
    return Subject(model.name, signatures, make_grid(model.functions, buckets, bucket_file))


def tune(
    subject: Subject,
    shapes: Sequence[tuple[Shape, int]],
    *,
    executables: int | None = None,
    by: By = "run",
    shrink: bool = False,
) -> Tuning:
    """The grid in which the recorded shapes cost least.

    A request with more rows than the largest batch runs in parts, and counts as these. What is served stays served:
    the largest size of every dimension is the largest of the present grid, or of what was recorded if that is larger.

    Args:
      subject: signatures, present grid and costs.
      shapes: as `traffic.read` gives them.
      executables: limit of all functions together; None: as many as the present grid has.
      by: `run`: fits to what ran on the device, requests joined, where that was recorded; `request`: to each request
        as though it ran alone.
      shrink: the largest sizes are the largest recorded.

    Raises:
      UsageError: nothing was recorded of this model's functions, a shape lacks a dimension, or the limit is too low.
    """
    observed = _observed(subject, shapes, by)
    limit = executables or len(subject.grid)
    kept = {name: buckets for name, buckets in subject.grid.functions.items() if name not in observed}
    left = limit - sum(map(len, kept.values()))
    if left < len(observed):
        raise UsageError(
            "the limit of executables leaves some functions without any",
            seen=f"--executables {limit}; {sum(map(len, kept.values()))} of functions that nothing was recorded of",
            expected=f"at least {limit - left + len(observed)}",
        )
    models: dict[str, CostModel | None] = {}
    costs: dict[str, Cost] = {}
    weights: dict[str, dict[Bucket, float]] = {}
    kinds: dict[str, By] = {}
    for name, (kind, found) in observed.items():
        present = subject.grid[name]
        measured = {bucket: subject.costs[name, bucket] for bucket in present if (name, bucket) in subject.costs}
        models[name] = CostModel.fit(measured, subject.signatures[name].batch) if measured else None
        costs[name] = models[name] or _volume
        kinds[name] = kind
        weights[name] = _with_largest(found, () if shrink else present)
    fitted = _cheapest(subject, weights, costs, left)
    powers = _cheapest(subject, {name: _doubled(each) for name, each in weights.items()}, costs, left)
    tuned = {
        name: Tuned(
            kinds[name],
            round(sum(observed[name][1].values())),
            models[name],
            *(
                Candidate(buckets, expected(observed[name][1], buckets, costs[name]))
                for buckets in (fitted[name], powers[name], subject.grid[name])
            ),
        )
        for name in observed
    }
    grid = {name: fitted.get(name) or kept[name] for name in subject.grid.functions}
    return Tuning(subject.name, tuned, BucketGrid(grid), limit)


def _observed(
    subject: Subject, shapes: Sequence[tuple[Shape, int]], by: By
) -> dict[str, tuple[By, dict[Bucket, float]]]:
    """By function: what it is fitted to, and the weight of each shape."""
    models = {shape.model for shape, _ in shapes}
    several = len(models - {""}) > 1
    known = [
        (shape, count)
        for shape, count in shapes
        if shape.function in subject.signatures and (not several or shape.model in ("", subject.name))
    ]
    if not known:
        seen = ", ".join(sorted({f"{shape.model}:{shape.function}".lstrip(":") for shape, _ in shapes})[:8])
        raise UsageError(
            "nothing was recorded of this model's functions",
            seen=seen or "no shapes",
            expected=f"shapes of {subject.name}: {', '.join(subject.signatures)}",
        )
    if len(known) < len(shapes):
        emit(Notice(f"{len(shapes) - len(known)} of {len(shapes)} shapes are of other models or functions"))
    observed: dict[str, tuple[By, dict[Bucket, float]]] = {}
    for name in subject.signatures:
        of_function = [(shape, count) for shape, count in known if shape.function == name]
        runs = by == "run" and any(shape.kind == "run" for shape, _ in of_function)
        kind: By = "run" if runs else "request"
        weights: dict[Bucket, float] = {}
        for shape, count in of_function:
            if shape.kind == kind:
                for bucket, parts in _parts(subject, name, shape):
                    weights[bucket] = weights.get(bucket, 0.0) + count * parts
        if weights:
            observed[name] = (kind, weights)
    return observed


def _parts(subject: Subject, name: str, shape: Shape) -> list[tuple[Bucket, int]]:
    """The shape's sizes in the function's dimensions; of more rows than the largest batch, as they run."""
    signature = subject.signatures[name]
    sizes = dict(shape.sizes)
    if signature.batch is not None and shape.kind == "run" and shape.rows:
        sizes[signature.batch] = shape.rows
    if missing := [dim for dim in signature.dims if dim not in sizes]:
        raise UsageError(
            f"a recorded shape of {name} lacks a dimension",
            where=", ".join(missing),
            seen=json.dumps(dict(shape.sizes)),
            expected=f"sizes of {', '.join(signature.dims)}",
            remedy="record the shapes of this model",
        )
    own = {dim: sizes[dim] for dim in signature.dims}
    if signature.batch not in own:
        return [(Bucket.of(**own), 1)]
    rows = own.pop(signature.batch)
    most = max(bucket[signature.batch] for bucket in subject.grid[name])
    parts = [(most, rows // most), (rows % most, 1)]
    return [(Bucket.of(**own, **{signature.batch: size}), number) for size, number in parts if size and number]


def _with_largest(weights: Mapping[Bucket, float], present: Sequence[Bucket]) -> dict[Bucket, float]:
    """The shapes, thinned, with one that is the largest in every dimension, so that a bucket holds any of them."""
    every = [*weights, *present]
    corner = Bucket.of(**{dim: max(bucket[dim] for bucket in every) for dim, _ in every[0].sizes})
    return thin({corner: 0.0, **weights}, _SIZES.get(len(corner.sizes), 16))


def _doubled(weights: Mapping[Bucket, float]) -> dict[Bucket, float]:
    """The shapes, each size rounded up to a power of two, or to the largest if that is less."""
    largest = {dim: max(bucket[dim] for bucket in weights) for dim, _ in next(iter(weights)).sizes}
    doubled: dict[Bucket, float] = {}
    for bucket, weight in weights.items():
        sizes = {dim: min(1 << (size - 1).bit_length(), largest[dim]) for dim, size in bucket.sizes}
        rounded = Bucket.of(**sizes)
        doubled[rounded] = doubled.get(rounded, 0.0) + weight
    return doubled


def _cheapest(
    subject: Subject, weights: Mapping[str, Mapping[Bucket, float]], costs: Mapping[str, Cost], limit: int
) -> dict[str, tuple[Bucket, ...]]:
    fittings: dict[str, Fitting] = {}
    for name, of_function in weights.items():
        signature = subject.signatures[name]
        order = sorted(signature.dims, key=lambda dim: dim == signature.batch)  # batches within classes of the others
        fittings[name] = Fitting(of_function, costs[name], limit, order)
    shares = share({name: fitting.costs for name, fitting in fittings.items()}, limit)
    return {name: fitting.buckets(shares[name]) for name, fitting in fittings.items()}


def _volume(bucket: Bucket) -> float:
    return float(bucket.volume())


def _grid_text(buckets: Sequence[Bucket]) -> str:
    """Buckets in short: `length=16: batch=1,8; length=64: batch=2`."""
    if not buckets[0].sizes:
        return buckets[0].label
    inner = buckets[0].sizes[0][0]
    classes: dict[str, list[int]] = {}
    for bucket in sorted(buckets, key=lambda bucket: (bucket.sizes[1:], bucket.sizes[0])):
        outer = ",".join(f"{dim}={size}" for dim, size in bucket.sizes[1:])
        classes.setdefault(outer, []).append(bucket.sizes[0][1])
    return "; ".join(
        f"{outer}: {inner}={','.join(map(str, sizes))}" if outer else f"{inner}={','.join(map(str, sizes))}"
        for outer, sizes in classes.items()
    )
