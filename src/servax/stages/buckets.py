"""Buckets: the shapes that are compiled ahead, and the choice of one for a request."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from servax.core.errors import TooLarge, UsageError
from servax.model.function import Function

STATIC = "static"

MOST = 2**31 - 1
"""The largest size of a dimension: XLA and `lengths` inputs count in int32."""


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
        """The bucket that `label` wrote.

        Raises:
          UsageError: the text does not have the form of a label.
        """
        if label == STATIC:
            return cls(())
        sizes: dict[str, int] = {}
        for part in label.split(","):
            name, _, size = (text.strip() for text in part.partition("="))
            if not name.isidentifier() or (value := _size(size)) is None or name in sizes:
                raise UsageError(
                    "a bucket's label cannot be read",
                    seen=_shown(label),
                    expected=f"`batch=8,length=32` with sizes from 1 to {MOST}, or `static`",
                )
            sizes[name] = value
        return cls.of(**sizes)

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
        volume = 1
        for _, size in self.sizes:
            volume *= size
        return volume

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


def make_grid(
    functions: Mapping[str, Function],
    options: Sequence[str] | str = (),
    bucket_file: str | os.PathLike[str] | None = None,
) -> BucketGrid:
    """The buckets of every function: its defaults, changed by options, or listed one by one in a file.

    Sizes of a dimension come from, in this order, an option for the function, an option for all, the function's own
    defaults; the buckets of a function are the product over its dimensions, smallest first. A function that the file
    names has exactly the file's buckets instead.

    Args:
      functions: by name.
      options: `batch=1,8` for every function with that dimension, `prefill:chunk=128,512` for one function. Options
        for the same dimension add up. A str is one option.
      bucket_file: path of a JSON file `{function: [{dimension: size, ...}, ...]}`.

    Raises:
      UsageError: an option or the file cannot be read, names what no function has, or a dimension has no sizes.
    """
    general, own = _read_options(functions, options)
    listed = {} if bucket_file is None else _read_file(functions, bucket_file)
    if both := sorted(set(listed) & set(own)):
        raise UsageError(
            "buckets are given twice",
            where=", ".join(both),
            seen=f"both in {os.fspath(bucket_file or '')} and as a --bucket option for the function",
            remedy="keep one of the two",
        )
    wrong: list[tuple[str, str]] = []
    grid: dict[str, tuple[Bucket, ...]] = {}
    missing: list[tuple[str, str]] = []
    for name, function in functions.items():
        if name in listed:
            grid[name] = _ordered(listed[name])
            continue
        sizes = {
            dim: own.get(name, {}).get(dim) or general.get(dim) or function.buckets.get(dim, ())
            for dim in function.signature.dims
        }
        missing += [(name, dim) for dim, values in sizes.items() if not values]
        faults = [(dim, size) for dim, values in sizes.items() for size in values if not _is_size(size)]
        if faults:
            wrong += [(f"buckets of {name}, dimension {dim!r}", _shown(size)) for dim, size in faults]
            continue
        combinations = product(*([(dim, size) for size in values] for dim, values in sorted(sizes.items())))
        grid[name] = _ordered([Bucket(tuple(combination)) for combination in combinations])
    if wrong:
        raise UsageError(
            "a bucket's size is not a positive integer that can be compiled",
            where="; ".join(dict.fromkeys(place for place, _ in wrong)),
            seen=", ".join(seen for _, seen in wrong),
            expected=f"integers from 1 to {MOST}",
        )
    if missing:
        dims = list(dict.fromkeys(dim for _, dim in missing))
        raise UsageError(
            "no sizes to compile for are given for " + ", ".join(f"{dim!r} of {name}" for name, dim in missing),
            expected="the sizes of every named dimension; the largest one is the limit of what is served",
            remedy=f"declare buckets={{{', '.join(f'{dim!r}: [...]' for dim in dims)}}} in the model, or pass "
            + " ".join(f"--bucket {dim}=SIZE,SIZE" for dim in dims),
        )
    return BucketGrid(grid)


def choose(buckets: Sequence[Bucket], sizes: Mapping[str, int]) -> Bucket:
    """The bucket of smallest volume that a request of these sizes fits into; of equal ones the first.

    Raises:
      TooLarge: none fits. A larger shape is never compiled.
    """
    chosen: Bucket | None = None
    smallest = 0
    for bucket in buckets:
        volume = 1
        for name, size in bucket.sizes:
            if sizes[name] > size:
                break
            volume *= size
        else:
            if chosen is None or volume < smallest:
                chosen, smallest = bucket, volume
    if chosen is None:
        raise _too_large(buckets, sizes)
    return chosen


def _too_large(buckets: Sequence[Bucket], sizes: Mapping[str, int]) -> TooLarge:
    largest = {name: max(bucket[name] for bucket in buckets) for name, _ in buckets[0].sizes}
    over = [name for name, most in largest.items() if sizes[name] > most]
    if over:
        return TooLarge(
            "the request is larger than the largest bucket in " + ", ".join(over),
            where=", ".join(over),
            seen=", ".join(f"{name}={sizes[name]}" for name in over),
            expected=", ".join(f"{name} at most {largest[name]}" for name in over),
            remedy="send less at a time, or build with a larger bucket: "
            + " ".join(f"--bucket {name}={sizes[name]}" for name in over),
        )
    dims = ", ".join(largest)
    return TooLarge(
        f"no bucket holds this combination of {dims}",
        where=dims,
        seen=", ".join(f"{name}={sizes[name]}" for name in largest),
        expected="at most one of " + "; ".join(bucket.label for bucket in _limits(buckets)),
        remedy="send less at a time, or build with a bucket for this combination",
    )


def _limits(buckets: Sequence[Bucket]) -> list[Bucket]:
    """The buckets that no other one contains."""
    return [
        bucket
        for bucket in buckets
        if not any(other is not bucket and other.fits(bucket.mapping()) for other in buckets)
    ]


def _ordered(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(set(buckets), key=lambda bucket: (bucket.volume(), bucket.sizes)))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _size(text: str) -> int | None:
    """The size that a text is; None where it is none. Python refuses to read numbers of thousands of digits."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdigit()) or not 1 <= len(digits) <= len(str(MOST)):
        return None
    return int(digits) if int(digits) <= MOST else None


def _shown(value: Any) -> str:
    """A value from outside as an error repeats it: in short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value) if isinstance(value, dict) else repr(value)
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass(slots=True)
class _Faults:
    """What is wrong in options or a file, collected so that all of it is said at once."""

    source: str
    expected: str
    lines: list[str] = field(default_factory=list[str])

    def check(self) -> None:
        if self.lines:
            raise UsageError(f"{self.source} cannot be used", seen="; ".join(self.lines), expected=self.expected)


def _read_options(
    functions: Mapping[str, Function], options: Sequence[Any] | str
) -> tuple[dict[str, list[int]], dict[str, dict[str, list[int]]]]:
    """Sizes by dimension, and the same by function for options that name one."""
    general: dict[str, list[int]] = {}
    own: dict[str, dict[str, list[int]]] = {}
    faults = _Faults("--bucket", "`batch=1,8` for all functions, or `prefill:chunk=128,512` for one")
    dims = {name: function.signature.dims for name, function in functions.items()}
    for option in (options,) if isinstance(options, str) else options:
        if not isinstance(option, str):
            faults.lines.append(f"{_shown(option)} is not a text")
            continue
        target, _, values = option.partition("=")
        function, _, dim = target.strip().rpartition(":")
        sizes = [text.strip() for text in values.split(",")]
        numbers = [_size(text) for text in sizes]
        if not dim or not all(text.isascii() and text.isdigit() and text.strip("0") for text in sizes):
            faults.lines.append(f"{_shown(option)} is not a dimension with positive sizes")
        elif None in numbers:
            faults.lines.append(f"{_shown(option)} has sizes over {MOST}")
        elif function and function not in functions:
            faults.lines.append(
                f"{_shown(option)} names the function {_shown(function)}; there are {', '.join(functions)}"
            )
        elif not any(dim in dims[name] for name in ([function] if function else functions)):
            known = sorted({dim for each in ([function] if function else functions) for dim in dims[each]})
            faults.lines.append(
                f"{_shown(option)} names the dimension {_shown(dim)}; there are {', '.join(known) or 'none'}"
            )
        else:
            into = own.setdefault(function, {}) if function else general
            into.setdefault(dim, []).extend(number for number in numbers if number is not None)
    faults.check()
    return general, own


def _read_file(functions: Mapping[str, Function], path: str | os.PathLike[str]) -> dict[str, list[Bucket]]:
    from etils import epath

    name = os.fspath(path)
    try:
        content: Any = json.loads(epath.Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            "the bucket file cannot be read", where=name, seen=f"{type(error).__name__}: {error}"
        ) from error
    faults = _Faults(f"the bucket file {name}", "JSON {function: [{dimension: size, ...}, ...]}")
    if not isinstance(content, dict):
        faults.lines.append(f"a {type(content).__name__} at the top")
        content = {}
    listed: dict[str, list[Bucket]] = {}
    for function, entries in content.items():
        if function not in functions:
            faults.lines.append(f"function {_shown(function)}; there are {', '.join(functions)}")
            continue
        dims = sorted(functions[function].signature.dims)
        if not isinstance(entries, list) or not entries:
            faults.lines.append(f"{function}: no list of buckets")
            continue
        for entry in entries:
            if not isinstance(entry, dict) or sorted(entry) != dims or not all(map(_is_size, entry.values())):
                faults.lines.append(
                    f"{function}: {_shown(entry)}; its dimensions are {', '.join(dims) or 'none'}, "
                    f"of sizes from 1 to {MOST}"
                )
            else:
                listed.setdefault(function, []).append(Bucket.of(**entry))
    faults.check()
    return listed
