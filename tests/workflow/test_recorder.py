"""The recorder of shapes: what reaches the file, when, and what keeps it bounded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import servax
from servax.core.errors import UsageError
from servax.core.events import BatchDone, Notice, emit, listening
from servax.workflow import recorder as recorders
from servax.workflow.recorder import ShapeRecorder
from servax.workflow.traffic import Shape, read


def run(length: int, batch: int = 1) -> BatchDone:
    sizes = ({"batch": batch, "length": length},)
    return BatchDone("net", "1", "predict", "batch=8,length=32", 8, batch, {}, (0.0,), (0.0,), sizes)


def test_shapes_are_in_the_file_once_closed_and_nothing_else_is_there(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    with ShapeRecorder(file):
        assert file.exists()
        for length in (3, 5, 3):
            emit(run(length))
    emit(run(7))  # nobody listens any more
    assert dict(read(file)) == {
        Shape("request", "net", "predict", (("batch", 1), ("length", 3))): 2,
        Shape("request", "net", "predict", (("batch", 1), ("length", 5))): 1,
        Shape("run", "net", "predict", (("batch", 1), ("length", 3)), 1): 2,
        Shape("run", "net", "predict", (("batch", 1), ("length", 5)), 1): 1,
    }
    assert os.listdir(tmp_path) == ["shapes.jsonl"]


def test_a_second_start_goes_on_counting(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    for _ in range(2):
        with ShapeRecorder(file):
            emit(run(3))
    assert {count for _, count in read(file)} == {2}


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "shapes.jsonl"
    with ShapeRecorder(file, limit=16):
        for length in range(1, 500):
            emit(run(length))
    header, *rest = map(json.loads, file.read_text().splitlines())
    assert len(rest) <= 16
    assert header["rounded"] > 1
    assert max(line["sizes"]["length"] for line in rest) == 499
    assert sum(line["count"] for line in rest if line["kind"] == "request") == 499


def test_runs_beyond_what_may_wait_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_WAITING", 4)
    recorder = ShapeRecorder(tmp_path / "shapes.jsonl")
    for length in range(1, 11):
        recorder._hear(run(length))  # not started: nobody counts meanwhile
    recorder._count()
    recorder._write()
    header, *rest = map(json.loads, (tmp_path / "shapes.jsonl").read_text().splitlines())
    assert header["lost"] == 6
    assert sorted(line["sizes"]["length"] for line in rest if line["kind"] == "run") == [7, 8, 9, 10]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "important.txt"
    file.write_text("not shapes")
    with pytest.raises(UsageError):
        ShapeRecorder(file).start()
    assert file.read_text() == "not shapes"


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        ShapeRecorder(tmp_path / "none" / "shapes.jsonl").start()


def test_a_disk_that_fails_later_is_told_of_once(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    notices: list[Notice] = []
    with listening(lambda event: notices.append(event) if isinstance(event, Notice) else None):
        recorder = ShapeRecorder(folder / "shapes.jsonl").start()
        (folder / "shapes.jsonl").unlink()
        folder.rmdir()
        emit(run(3))
        recorder.close()
    (notice,) = notices
    assert notice.level == "warning"
    assert "shapes.jsonl" in notice.message


def test_real_requests_are_recorded_by_their_own_sizes(tmp_path: Path) -> None:
    model = servax.Model(
        lambda params, x: x * params["w"],
        inputs={"x": "float32[batch, length]"},
        buckets={"batch": [4], "length": [16]},
        name="net",
    )
    file = tmp_path / "shapes.jsonl"
    with ShapeRecorder(file), servax.load(model, params={"w": np.float32(2)}) as servable:
        servable.predict(x=np.ones((2, 5), np.float32))
        servable.predict(x=np.ones((1, 9), np.float32))
    shapes = dict(read(file))
    assert shapes[Shape("request", "net", "predict", (("batch", 2), ("length", 5)))] == 1
    assert shapes[Shape("run", "net", "predict", (("batch", 1), ("length", 9)), 1)] == 1
