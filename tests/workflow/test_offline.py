"""Files of rows: what comes out is what NumPy and a call in process give, row by row, in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import servax
from servax.core.errors import ExecutionError, NotReady, UsageError
from servax.runtime.local import LocalServable
from servax.workflow import offline
from servax.workflow.offline import predict_rows
from servax.workflow.offline_plan import OfflineOptions
from serving_toys import reading_toy, word_tokenizer

W = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def total(params, x, n):
    inside = np.arange(x.shape[1])[None] < n[:, None]
    return {"sum": (x * inside).sum(1), "doubled": x * 2}


@pytest.fixture(scope="module")
def servable():
    model = servax.Model(
        lambda params, x: {"y": x @ params["w"], "first": x[:, 0]},
        inputs={"x": "float32[batch, 3]"},
        buckets={"batch": [1, 8]},
        name="net",
    )
    model.function(
        inputs={"x": "float32[batch, length]"}, lengths={"n": "length"}, name="total", buckets={"length": [4, 16]}
    )(total)

    @model.function(inputs={"x": "float32[batch, 2, length]"}, name="wide", buckets={"length": [8]})
    def wide(params, x):
        return {"y": x + 1}

    with servax.load(model, params={"w": W}) as servable:
        yield servable


RNG = np.random.RandomState(0)
# Small whole numbers: every sum is exact, in whatever order it is made.
X = RNG.randint(-8, 9, size=(100, 3)).astype(np.float32)
X[:, 0] = np.arange(100)
LENGTHS = RNG.randint(1, 17, size=60)
RAGGED = [np.arange(length, dtype=np.float32) + row for row, length in enumerate(LENGTHS)]


def save_joined(path: Path, rows: list[np.ndarray]) -> None:
    np.savez(path, **{"x": np.concatenate(rows), "x.offsets": np.cumsum([0, *map(len, rows)])})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("chunk", [None, 1, 7, 100, 1000])
def test_dense_rows(servable, tmp_path: Path, save, chunk: int | None) -> None:
    save(tmp_path / "rows.npz", x=X)
    report = predict_rows(
        servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"), options=OfflineOptions(chunk=chunk)
    )
    assert (report.rows, report.failed, report.resumed) == (100, 0, 0)
    with np.load(tmp_path / "out.npz") as out:
        assert sorted(out) == ["first", "y"]
        assert out["y"].dtype == np.float32
        np.testing.assert_array_equal(out["y"], X @ W)
        np.testing.assert_array_equal(out["first"], X[:, 0])
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "rows.npz"]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_rows_of_different_length(servable, tmp_path: Path, kind: str) -> None:
    source = tmp_path / f"rows.{kind}"
    if kind == "npz":
        save_joined(source, RAGGED)
    else:
        pq.write_table(pa.table({"id": range(60), "x": pa.array(map(list, RAGGED), pa.list_(pa.float32()))}), source)
    for name in ("out.npz", "out.parquet"):
        options = OfflineOptions(chunk=13)
        predict_rows(servable, str(source), str(tmp_path / name), function="total", options=options)
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["sum"], [row.sum() for row in RAGGED])
        parts = np.split(out["doubled"], out["doubled.offsets"][1:-1])
        assert all(np.array_equal(part, row * 2) for part, row in zip(parts, RAGGED, strict=True))
        assert out["doubled.offsets"].tolist() == [0, *np.cumsum(LENGTHS)]
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("doubled").to_pylist() == [(row * 2).tolist() for row in RAGGED]
    assert table.column("sum").to_pylist() == [row.sum() for row in RAGGED]


def test_the_axis_that_differs_need_not_be_the_first(servable, tmp_path: Path) -> None:
    rows = [RNG.standard_normal((2, length)).astype(np.float32) for length in (3, 8, 1, 5)]
    save_joined(tmp_path / "rows.npz", [np.ascontiguousarray(row.T) for row in rows])
    predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"), function="wide")
    with np.load(tmp_path / "out.npz") as out:
        parts = np.split(out["y"], out["y.offsets"][1:-1])
    assert all(np.array_equal(part, row.T + 1) for part, row in zip(parts, rows, strict=True))
    nested = pa.array([row.tolist() for row in rows], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table({"x": nested}), tmp_path / "rows.parquet")
    predict_rows(servable, str(tmp_path / "rows.parquet"), str(tmp_path / "again.npz"), function="wide")
    with np.load(tmp_path / "again.npz") as again, np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(again["y"], out["y"])


def test_fixed_size_lists_are_dense(servable, tmp_path: Path) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 3)
    pq.write_table(pa.table({"x": column}), tmp_path / "rows.parquet", row_group_size=9)
    options = OfflineOptions(chunk=20, outputs=["y"])
    predict_rows(servable, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"), options=options)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["y"]
    assert table.schema.field("y").type == pa.list_(pa.float32(), 2)
    np.testing.assert_array_equal(np.array(table.column("y").to_pylist()), X @ W)


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_a_row_that_cannot_be_computed_has_an_error_and_the_others_their_answers(
    servable, tmp_path: Path, kind: str
) -> None:
    rows = [*RAGGED[:20], np.arange(17, dtype=np.float32), *RAGGED[20:40], np.zeros(0, np.float32)]
    lists = [*map(list, rows), None]
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array(lists, pa.list_(pa.float32()))}), source)
    out = tmp_path / f"out.{kind}"
    report = predict_rows(servable, str(source), str(out), function="total", options=OfflineOptions(chunk=15))
    assert (report.rows, report.failed) == (43, 3)
    assert report.first_error is not None
    assert report.first_error.startswith("row 20: ")
    expected = [row.sum() for row in rows]
    if kind == "parquet":
        table = pq.read_table(out)
        errors = table.column("error").to_pylist()
        assert [row for row, text in enumerate(errors) if text] == [20, 41, 42]
        assert table.column("sum").to_pylist() == [None if errors[row] else expected[row] for row in range(43)]
        assert [value is None for value in table.column("doubled").to_pylist()] == [bool(text) for text in errors]
        messages = [errors[20], errors[41], errors[42]]
    else:
        with np.load(out) as arrays:
            assert arrays["error.rows"].tolist() == [20, 41, 42]
            messages = arrays["error"].tolist()
            fine = [row for row in range(43) if row not in (20, 41, 42)]
            np.testing.assert_array_equal(arrays["sum"][fine], [expected[row] for row in fine])
            assert np.isnan(arrays["sum"][[20, 41, 42]]).all()
            lengths = np.diff(arrays["doubled.offsets"])
        assert lengths[[20, 41, 42]].tolist() == [0, 0, 0]
    assert "larger than the largest bucket" in messages[0]
    assert "length=17" in messages[0]
    assert "x" in messages[1]
    assert "null" in messages[2]


def test_nulls_of_fixed_size_rows_are_errors(servable, tmp_path: Path) -> None:
    column = pa.array([[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]], pa.list_(pa.float32(), 3))
    pq.write_table(pa.table({"x": column}), tmp_path / "rows.parquet")
    report = predict_rows(servable, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"))
    assert report.failed == 1
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("y").to_pylist() == [[22.0, 28.0], None, [49.0, 64.0]]
    assert table.column("first").to_pylist() == [1.0, None, 4.0]


class Ending:
    """A servable that is gone after a number of requests."""

    def __init__(self, servable: LocalServable, requests: int, error: Exception) -> None:
        self._servable = servable
        self._left = requests
        self._error = error

    def __getattr__(self, name: str):
        return getattr(self._servable, name)

    async def infer_async(self, request):
        self._left -= 1
        if self._left < 0:
            raise self._error
        return await self._servable.infer_async(request)


def test_a_run_that_was_ended_goes_on(servable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_PATIENCE", 0.0)
    np.savez(tmp_path / "rows.npz", x=X)
    source, output = str(tmp_path / "rows.npz"), str(tmp_path / "out.npz")
    options = OfflineOptions(chunk=8, request=8, in_flight=1)
    error = NotReady("gone")
    error.retry_after = 0.001
    with pytest.raises(NotReady, match="gone"):
        predict_rows(Ending(servable, 6, error), source, output, options=options)
    assert sorted(os.listdir(tmp_path)) == ["out.npz.partial", "rows.npz"]
    counted = Ending(servable, 8, AssertionError("more than what was left"))
    report = predict_rows(counted, source, output, options=options)
    assert report.resumed in (
        40,
        48,
    )  # the sixth may have been answered, but not yet stored, when the seventh ended it all
    with np.load(output) as out:
        np.testing.assert_array_equal(out["y"], X @ W)
    assert sorted(os.listdir(tmp_path)) == ["out.npz", "rows.npz"]


def test_partial_results_of_another_task_are_refused(servable, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=X)
    source, output = str(tmp_path / "rows.npz"), str(tmp_path / "out.npz")
    options = OfflineOptions(chunk=8, request=8, in_flight=1)
    with pytest.raises(NotFoundHere):
        predict_rows(Ending(servable, 6, NotFoundHere("x")), source, output, options=options, identity="one")
    with pytest.raises(UsageError, match="begun with another model"):
        predict_rows(servable, source, output, options=options, identity="two")
    np.savez(tmp_path / "rows.npz", x=X * 2)
    with pytest.raises(UsageError, match="begun with another input"):
        predict_rows(servable, source, output, options=options, identity="one")
    again = OfflineOptions(chunk=8, restart=True)
    assert predict_rows(servable, source, output, options=again, identity="two").resumed == 0
    with np.load(output) as out:
        np.testing.assert_array_equal(out["y"], X * 2 @ W)


class NotFoundHere(Exception):
    """Ends a run at once."""


def test_a_device_that_fails_on_a_row_spares_the_others(servable, tmp_path: Path) -> None:
    class Failing(Ending):
        async def infer_async(self, request):
            if (request.tensors["x"][:, 0] == X[33, 0]).any():
                raise ExecutionError("the device failed")
            return await self._servable.infer_async(request)

    np.savez(tmp_path / "rows.npz", x=X)
    report = predict_rows(Failing(servable, 0, ValueError()), str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"))
    assert (report.failed, report.first_error) == (1, "row 33: the device failed.")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"z": X}, "no column is an input"),
        ({"x": np.array([[1], [2, 3]], object)}, "unpickled"),
        ({"x": np.asfortranarray(X)}, "column by column"),
        ({"x": np.zeros(3, np.float32), "x.offsets": np.array([1, 3])}, "does not begin with 0"),
        ({"x": np.zeros(3, np.float32), "x.offsets": np.array([0, 2, 1, 3])}, "does not rise"),
        ({"x": np.zeros(3, np.float32), "x.offsets": np.array([0, 4])}, "does not rise"),
    ],
)
def test_files_that_cannot_be_used(servable, tmp_path: Path, arrays, said: str) -> None:
    np.savez(tmp_path / "rows.npz", **arrays)
    with pytest.raises(UsageError, match=said):
        predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"), function="total")


def test_files_that_are_none(servable, tmp_path: Path) -> None:
    (tmp_path / "rows.npz").write_text("nothing")
    (tmp_path / "rows.parquet").write_text("nothing")
    np.savez(tmp_path / "fine.npz", x=X)
    for source in ("rows.npz", "rows.parquet", "rows.csv", "none.npz"):
        with pytest.raises(UsageError):
            predict_rows(servable, str(tmp_path / source), str(tmp_path / "out.npz"))
    for output in ("out.csv", "none/out.npz"):
        with pytest.raises(UsageError):
            predict_rows(servable, str(tmp_path / "fine.npz"), str(tmp_path / output))


def test_columns_of_different_length(servable, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((4, 3), np.float32), n=np.ones(3, np.int32))
    with pytest.raises(UsageError, match="differ in their number of rows"):
        predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"), function="total")


def test_parquet_without_pyarrow_names_the_extra(servable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="pyarrow") as caught:
        predict_rows(servable, str(tmp_path / "rows.parquet"), str(tmp_path / "out.npz"))
    assert "servax[parquet]" in str(caught.value.remedy)


def test_an_empty_file_gives_an_empty_one(servable, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.zeros((0, 3), np.float32))
    report = predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"))
    assert report.rows == 0
    with np.load(tmp_path / "out.npz") as out:
        assert out["y"].shape == (0, 2)


def test_a_function_with_a_state_is_not_for_files(tmp_path: Path) -> None:
    model = servax.Model(lambda params, x: x, state={"seen": "float32[3]"}, name="net")

    @model.function(inputs={"x": "float32[3]"}, stateful=True)
    def count(params, state, x):
        return {"seen": state["seen"] + x}, {"seen": state["seen"] + x}

    np.savez(tmp_path / "rows.npz", x=X)
    with (
        servax.load(model, params={"w": W}) as servable,
        pytest.raises(UsageError, match="has a state"),
    ):
        predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"))


def test_a_function_without_a_batch_has_a_request_a_row(tmp_path: Path) -> None:
    model = servax.Model(
        lambda params, x: {"y": x @ params["w"], "same": x}, inputs={"x": "float32[3]"}, batch=None, name="net"
    )
    np.savez(tmp_path / "rows.npz", x=X)
    with servax.load(model, params={"w": W}) as servable:
        predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["y"], X @ W)
        np.testing.assert_array_equal(out["same"], X)


def test_texts_are_rows_too(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
    texts = ["one", "two three", "three three three", "two", "one one one one"]
    with reading_toy(word_tokenizer(tmp_path, words)) as servable:
        np.savez(tmp_path / "rows.npz", text=np.array(texts))
        pq.write_table(pa.table({"text": [*texts, None]}), tmp_path / "rows.parquet")
        predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / "out.npz"))
        report = predict_rows(servable, str(tmp_path / "rows.parquet"), str(tmp_path / "out.parquet"))
    with np.load(tmp_path / "out.npz") as out:
        assert out["sum"].tolist() == [1, 5, 9, 2, 4]
    assert report.failed == 1
    assert pq.read_table(tmp_path / "out.parquet").column("sum").to_pylist() == [1, 5, 9, 2, 4, None]


def test_what_only_jax_has_is_read_and_written_wider(tmp_path: Path) -> None:
    model = servax.Model(
        lambda params, x: x + params["w"], inputs={"x": "bfloat16[batch, 2]"}, buckets={"batch": [4]}, name="net"
    )
    half = np.array([[0.5, 1], [2, -4]], ml_dtypes.bfloat16)
    np.savez(tmp_path / "rows.npz", x=half)
    with servax.load(model, params={"w": ml_dtypes.bfloat16(1)}) as servable:
        for name in ("out.npz", "out.parquet"):
            predict_rows(servable, str(tmp_path / "rows.npz"), str(tmp_path / name))
    with np.load(tmp_path / "out.npz") as out:
        assert out["output"].dtype == np.float32
        assert out["output"].tolist() == [[1.5, 2], [3, -3]]
    assert pq.read_table(tmp_path / "out.parquet").column("output").to_pylist() == [[1.5, 2], [3, -3]]


def test_through_a_server(servable, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array(map(list, RAGGED), pa.list_(pa.float32()))}), tmp_path / "rows.parquet")
    with servax.serve(servable, port=0) as server, servax.load(server.url) as client:
        predict_rows(client, str(tmp_path / "rows.parquet"), str(tmp_path / "out.npz"), function="total")
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["sum"], [row.sum() for row in RAGGED])


MEMORY = """
import resource, sys
import numpy as np
import servax
from servax.workflow.offline import predict_rows
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
folder = sys.argv[1]
model = servax.Model(
    lambda params, x: {"sum": x.sum(1), "same": x * params["w"]},
    inputs={"x": "float32[batch, 1024]"}, buckets={"batch": [256]}, name="net",
)
with servax.load(model, params={"w": np.float32(1)}) as servable:
    predict_rows(servable, folder + "/small.npz", folder + "/small_out.npz")
    before = peak()
    predict_rows(servable, folder + "/large.npz", folder + "/large_out.npz")
    print(peak() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    x = np.arange(55_000, dtype=np.float32)[:, None].repeat(1024, 1)  # 225 MB
    np.savez(tmp_path / "large.npz", x=x)
    np.savez(tmp_path / "small.npz", x=x[:3000])
    del x
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 40 * 2**20
    with np.load(tmp_path / "large_out.npz") as out:
        np.testing.assert_array_equal(out["sum"], np.arange(55_000, dtype=np.float32) * 1024)
        assert out["same"].shape == (55_000, 1024)
