"""Golden samples: what the source function gives, op by op, for seeded inputs in every bucket that is to be proved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from servax.core.events import Notice, emit
from servax.core.tensors import Signature
from servax.core.trees import Tree
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.stages.padding import check
from servax.stages.pipeline import run_parallel
from servax.targets import draws, faults
from servax.targets.difference import scale_of
from servax.targets.draws import Ranges
from servax.targets.indexing import index_bounds
from servax.targets.opbyop import Arrays, Source, State
from servax.targets.rounding import estimate
from servax.targets.samples import Draw, Expected, Golden, Rounding, Sample, Step

STEPS = 2
"""Calls, one after another, in a sample of a stateful function."""

T = TypeVar("T")
Array = np.ndarray[Any, Any]
_Draws = Mapping[str, Draw]


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a function before its samples are made.

    Attributes:
      ranges: of its inputs: inside the tables they index, and giving outputs that are numbers.
      rounding: by output (`state/NAME`: by state) and platform, the larger of its smallest and largest bucket.
    """

    ranges: Ranges
    rounding: Mapping[str, Mapping[str, Rounding]]


def golden_file(function: str, bucket: Bucket) -> str:
    """Where a bundle keeps the samples of a bucket."""
    return f"golden/{function}/{bucket.label}.safetensors"


def profile(function: Function, buckets: Sequence[Bucket], params: Tree) -> Profile:
    """The profile of a function over its buckets.

    Raises:
      ModelError: the function gives other values when it is called again with the same inputs.
    """
    source = Source(function, params)
    smallest, largest = min(buckets, key=Bucket.volume), max(buckets, key=Bucket.volume)
    rounding: dict[str, dict[str, Rounding]] = {}
    bounds: dict[str, int] = {}
    for bucket in dict.fromkeys((smallest, largest)):
        jaxpr, positions, names = source.jaxpr(bucket)
        for name, platforms in estimate(jaxpr, names).items():
            known = rounding.setdefault(name, {})
            for platform, each in platforms.items():
                known[platform] = max(known.get(platform, each), each, key=lambda rounding: rounding.error)
        for name, count in index_bounds(jaxpr, positions).items():
            bounds[name] = min(count, bounds.get(name, count))
    return Profile(_working_ranges(source, smallest, Ranges(bounds, function.told), rounding), rounding)


def make(
    function: Function,
    bucket: Bucket,
    params: Tree,
    known: Profile,
    *,
    float32: Tree | None = None,
    thorough: bool = True,
) -> Golden:
    """The samples of one bucket: `full`, `padded` where a dimension can be, and `alone` where there are several rows.

    Expected outputs are those of the unpadded run; expected states those of the padded run, since padding may write
    into a state where nothing reads it.

    Args:
      function: with its outputs inferred.
      bucket: whose samples these are.
      params: the nested dictionary, in the bundle's dtypes.
      known: the function's profile.
      float32: the same parameters in float32, for `Golden.precision`; None where they are no more precise.
      thorough: runs every sample unpadded too, which compiles each operation at new shapes; otherwise the padded
        runs, cut, are the expected outputs.

    Raises:
      ModelError: a row depends on the others, or an output on padding.
    """
    maker = _Maker(function, bucket, params, known)
    full = maker.draws(draws.full, "full")
    at_full = maker.source.chain(arrays(full), None)
    samples = [maker.sample("full", full, at_full, [outputs for outputs, _ in at_full])]
    batch = function.signature.batch
    if batch is not None and batch in bucket.mapping() and bucket[batch] > 1:
        row = bucket[batch] // 2
        single = [draws.alone(function.signature, each, row) for each in full]
        at_bucket = maker.source.chain(arrays(single), bucket)
        maker.check_neighbours(full[0], at_full[0][0], at_bucket[0][0], row)
        samples.append(maker.sample("alone", single, at_bucket, maker.unpadded(single, at_bucket, thorough)))
    if draws.smaller(bucket) != bucket.mapping():
        short = maker.draws(draws.padded, "padded")
        at_bucket = maker.source.chain(arrays(short), bucket)
        samples.append(maker.sample("padded", short, at_bucket, maker.unpadded(short, at_bucket, thorough, signs=True)))
    precision = None
    if float32 is not None and thorough:
        exact = Source(function, float32).chain(arrays(full), None)
        precision = _relative_difference([outputs for outputs, _ in at_full], [outputs for outputs, _ in exact])
    return Golden(function.name, bucket.label, tuple(samples), known.rounding, precision)


def make_all(
    functions: Mapping[str, Function],
    buckets: Mapping[str, Sequence[Bucket]],
    params: Tree,
    then: Callable[[Golden], T],
    *,
    float32: Tree | None = None,
    thorough: Mapping[str, Sequence[Bucket]],
) -> list[T]:
    """What `then` makes of the samples of every bucket in `buckets`; those in `thorough` run unpadded too.

    Op by op, most of the time goes into compiling operations one at a time: on a CPU several buckets run at once. An
    accelerator holds the intermediate arrays of one. Emits the step `golden`, one advance a bucket.

    Raises:
      ModelError: of a function that has a fault.
    """
    known = {name: profile(functions[name], chosen, params) for name, chosen in buckets.items() if chosen}

    def job(name: str, bucket: Bucket) -> Callable[[], T]:
        return lambda: then(
            make(functions[name], bucket, params, known[name], float32=float32, thorough=bucket in thorough[name])
        )

    jobs = {f"{name}@{bucket.label}": job(name, bucket) for name, chosen in buckets.items() for bucket in chosen}
    return run_parallel(jobs, "golden", workers=None if jax.default_backend() == "cpu" else 1)


class _Maker:
    """The samples of one bucket in the making."""

    def __init__(self, function: Function, bucket: Bucket, params: Tree, known: Profile) -> None:
        self.source = Source(function, params)
        self._function = function
        self._signature = function.signature
        self._bucket = bucket
        self._known = known

    def draws(self, draw: Callable[[Signature, Bucket, Ranges, str], dict[str, Draw]], name: str) -> list[_Draws]:
        """Recipes for the steps of a sample."""
        count = 1 if self._function.state is None else STEPS
        places = [f"{self._function.name}@{self._bucket.label}/{name}/{number}" for number in range(count)]
        return [draw(self._signature, self._bucket, self._known.ranges, place) for place in places]

    def sample(
        self, name: str, recipes: Sequence[_Draws], runs: Sequence[tuple[Arrays, State]], outputs: Sequence[Arrays]
    ) -> Sample:
        """A sample whose outputs are `outputs` and whose states are those of `runs`."""
        tensors = arrays(recipes)
        steps = tuple(
            Step(
                draws=each,
                outputs={key: Expected.of(array) for key, array in expected.items()},
                state=state,
                inputs=inputs,
            )
            for each, inputs, expected, (_, state) in zip(recipes, tensors, outputs, runs, strict=True)
        )
        return Sample(name, self._sizes(tensors[0]), steps)

    def check_neighbours(self, recipe: _Draws, full: Arrays, single: Arrays, row: int) -> None:
        """Raises ModelError where the first answer of a row alone, `single`, is not its answer among others, `full`.

        An output without a batch axis holds for every row, so that it is the same for each row of `recipe` alone. Two
        rows are tried, since one may hold the maximum of all. A stateful function adds its rows up in a state that they
        share, so an output may tell of them all.
        """
        sizes = {**self._bucket.mapping(), str(self._signature.batch): 1}
        among = faults.row_of(self._signature, self._signature.outputs, full, row, sizes)
        found = faults.compare([{key: single[key] for key in among}], [among], self._known.rounding)
        # Equal shapes: a dimension such as 2*batch follows the number of rows.
        common = {key: each for key, each in full.items() if key not in among and each.shape == single[key].shape}
        if common and self._function.state is None:
            first = arrays([draws.alone(self._signature, recipe, 0)])[0]
            other = self.source.run(first, self._bucket)
            for alone in (single, other):
                found += faults.compare([{key: alone[key] for key in common}], [common], self._known.rounding)
        if found:
            raise faults.neighbours(self._function.name, self._bucket.label, found, self._signature)

    def unpadded(
        self, recipes: Sequence[_Draws], runs: Sequence[tuple[Arrays, State]], thorough: bool, *, signs: bool = False
    ) -> list[Arrays]:
        """The outputs to expect of a sample that `runs` answered padded: those of unpadded runs, if thorough.

        Where rows differ in length, the longest and the shortest are compared alone, each at its own length, and the
        outputs of the padded run are kept: what they hold past a row's length is nobody's to say.

        Args:
          recipes: of the sample's inputs.
          runs: outputs and states of the padded runs.
          thorough: runs it unpadded at all.
          signs: compares the first step for float inputs all negative and all positive as well.

        Raises:
          ModelError: the two disagree.
        """
        padded = [outputs for outputs, _ in runs]
        if not thorough:
            return padded
        tensors = arrays(recipes)
        try:
            references = self._references(tensors)
        except Exception as error:  # the model's own code, at sizes that no bucket has
            sizes = ",".join(f"{dim}={size}" for dim, size in self._sizes(tensors[0]).items())
            emit(
                Notice(
                    f"{self._function.name} does not run unpadded at {sizes}, so whether padding to "
                    f"{self._bucket.label} changes its outputs is not known: {type(error).__name__}: {error}",
                    level="warning",
                )
            )
            return padded
        found = self._disagreements(references, padded)
        if found:
            dims = self._culprits(references, tensors)
            raise faults.padding(self._function.name, self._bucket.label, found, dims, self._signature)
        if signs:
            self._check_signs(recipes[0])
        (first, *_) = references
        return list(first.outputs) if first.row is None else padded

    def _check_signs(self, recipe: _Draws) -> None:
        """Raises ModelError where padding changes the outputs for float inputs of one sign.

        A sign for which the unpadded run gives NaN is one that the function does not take.
        """
        for negative, inputs in ((True, "all negative"), (False, "all positive")):
            tensors = draws.one_sided(recipe, negative=negative)
            if tensors is None:
                return
            references = self._references([tensors])
            if any(_has_nan(outputs) for reference in references for outputs in reference.outputs):
                continue
            outputs = self.source.run(tensors, self._bucket)
            if found := self._disagreements(references, [outputs]):
                dims = self._culprits(references, [tensors])
                raise faults.padding(
                    self._function.name, self._bucket.label, found, dims, self._signature, inputs=inputs
                )

    def _references(self, tensors: Sequence[Arrays]) -> list[_Reference]:
        dim = draws.ragged_dim(self._signature)
        lengths = next((tensors[0][name] for name, each in self._signature.lengths.items() if each == dim), None)
        if dim is None or lengths is None or len(set(lengths.tolist())) < 2:
            return [_Reference(None, {}, tuple(outputs for outputs, _ in self.source.chain(tensors, None)))]
        references: list[_Reference] = []
        for row in (0, len(lengths) - 1):
            sizes = {**self._sizes(tensors[0]), str(self._signature.batch): 1, dim: int(lengths[row])}
            alone = faults.row_of(self._signature, self._signature.inputs, tensors[0], row, sizes, every=True)
            outputs = self.source.run(alone, None)
            references.append(_Reference(row, sizes, (outputs,)))
        return references

    def _disagreements(self, references: Sequence[_Reference], padded: Sequence[Arrays]) -> list[faults.Fault]:
        found: list[faults.Fault] = []
        for reference in references:
            if reference.row is None:
                found += faults.compare(reference.outputs, padded, self._known.rounding)
                continue
            ours = faults.row_of(self._signature, self._signature.outputs, padded[0], reference.row, reference.sizes)
            theirs = {key: reference.outputs[0][key] for key in ours}
            found += faults.compare([theirs], [ours], self._known.rounding)
        return found

    def _culprits(self, references: Sequence[_Reference], tensors: Sequence[Arrays]) -> list[str]:
        """The dimensions that change the outputs when they alone are padded; all, where none does."""
        true = self._sizes(tensors[0])
        dims = [dim for dim, size in self._bucket.sizes if true[dim] < size]
        culprits: list[str] = []
        for dim in dims:
            runs = self.source.chain(tensors, Bucket.of(**{**true, dim: self._bucket[dim]}))
            if self._disagreements(references, [outputs for outputs, _ in runs]):
                culprits.append(dim)
        return culprits or dims

    def _sizes(self, tensors: Arrays) -> dict[str, int]:
        return dict(check(self._signature, tensors).sizes)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Outputs, step by step, of an unpadded run: of the whole sample, or of one row of `sizes`."""

    row: int | None
    sizes: Mapping[str, int]
    outputs: tuple[Arrays, ...]


def arrays(recipes: Sequence[_Draws]) -> list[Arrays]:
    """The inputs that recipes describe, step by step."""
    return [{name: draw.array() for name, draw in each.items()} for each in recipes]


def _working_ranges(
    source: Source, bucket: Bucket, ranges: Ranges, rounding: Mapping[str, Mapping[str, Rounding]]
) -> Ranges:
    """The widest ranges tried for which no output is NaN; the first where none does. Calls the function twice at least.

    Raises:
      ModelError: the two calls disagree.
    """
    function = source.function

    def answer(tried: Ranges) -> Arrays:
        recipe = draws.full(function.signature, bucket, tried, f"{function.name}@{bucket.label}/ranges")
        return source.run(arrays([recipe])[0], bucket)

    first = answer(ranges)
    if found := faults.compare([first], [answer(ranges)], rounding):
        raise faults.chance(function.name, bucket.label, found)
    if not _has_nan(first):
        return ranges
    for tried in ranges.narrower():
        if not _has_nan(answer(tried)):
            return tried
    emit(
        Notice(
            f"outputs of {function.name} hold NaN for all golden inputs that were tried; where they do, parity shows "
            "only that the wrappers give NaN too",
            level="warning",
        )
    )
    return ranges


def _has_nan(outputs: Arrays) -> bool:
    return any(np.isnan(_wide(array)).any() for array in outputs.values())


def _relative_difference(low: Sequence[Arrays], exact: Sequence[Arrays]) -> float:
    """The largest difference of any output, relative to the exact output's scale; non-finite elements are left out."""
    largest = 0.0
    for ours, theirs in zip(low, exact, strict=True):
        for name, array in ours.items():
            apart = np.abs(_wide(array) - _wide(theirs[name]))
            largest = max(largest, float(np.max(apart[np.isfinite(apart)], initial=0.0)) / scale_of(theirs[name]))
    return largest


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
