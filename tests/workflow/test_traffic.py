"""Shapes of traffic: what is counted, how it is bounded, what is read back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servax.core.errors import UsageError
from servax.core.events import BatchDone
from servax.workflow.traffic import Shape, ShapeCounts, lines, read


def run(*sizes: dict[str, int], rows: int | None = None) -> BatchDone:
    rows = sum(each.get("batch", 1) for each in sizes) if rows is None else rows
    zeros = (0.0,) * len(sizes)
    return BatchDone("net", "1", "predict", "batch=8,length=32", 8, rows, {}, zeros, zeros, sizes)


def test_a_run_is_its_rows_together_and_its_largest_request() -> None:
    counts = ShapeCounts(100)
    counts.add_batch(run({"batch": 1, "length": 17}, {"batch": 2, "length": 9}, {"batch": 1, "length": 17}))
    assert dict(counts) == {
        Shape("request", "net", "predict", (("batch", 1), ("length", 17))): 2,
        Shape("request", "net", "predict", (("batch", 2), ("length", 9))): 1,
        Shape("run", "net", "predict", (("batch", 2), ("length", 17)), 4): 1,
    }


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    counts = ShapeCounts(100)
    counts.add_batch(run({"batch": 1, "length": 17}, {"batch": 2, "length": 9}))
    file = tmp_path / "shapes.jsonl"
    file.write_bytes(b"".join(lines(counts, {"started": "now"})))
    assert dict(read(file)) == dict(counts)


def test_lines_written_by_hand_are_requests(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    file.write_text(
        '{"function": "embed", "sizes": {"length": 3, "batch": 1}, "count": 4, "time": 1.5}\n\n{"sizes": {}}'
    )
    assert read(file) == [
        (Shape("request", "", "embed", (("batch", 1), ("length", 3))), 4),
        (Shape("request", "", "predict", ()), 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        '{"sizes": {"batch": 0}}',
        '{"sizes": {"batch": "1"}}',
        '{"sizes": {"batch": 2147483648}}',
        '{"kind": "header", "format": 2}',
        '{"sizes": {}, "count": 0}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "shapes.jsonl"
    file.write_text('{"kind": "header", "format": 1}\n' + line)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert caught.value.where == f"{file}:2"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read") as caught:
        read(tmp_path / "none")
    assert str(tmp_path / "none") in str(caught.value.where)


@settings(deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=200), st.integers(4, 20))
def test_counts_are_bounded_and_still_hold_what_came(sizes: list[tuple[int, int]], limit: int) -> None:
    counts = ShapeCounts(limit)
    for batch, length in sizes:
        counts.add(Shape("request", "net", "predict", (("batch", batch), ("length", length))))
    assert len(counts) <= limit
    assert sum(count for _, count in counts) == len(sizes)
    kept = [dict(shape.sizes) for shape, _ in counts]
    for dim, index in (("batch", 0), ("length", 1)):
        assert max(each[dim] for each in kept) <= max(size[index] for size in sizes)
    for batch, length in sizes:
        assert any(each["batch"] >= batch and each["length"] >= length for each in kept)
