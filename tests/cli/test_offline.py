"""The verbs that work on files: predict of rows, tune; as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

MODEL = """
import numpy as np
import servax
model = servax.Model(
    lambda params, x: x @ params["w"], inputs={"x": "float32[batch, 4]"}, buckets={"batch": [1, 2]}, name="toy",
    params={"w": np.ones((4, 4), np.float32)},
)
"""
X = np.arange(12_000, dtype=np.float32).reshape(3000, 4)
MODEL_OPTIONS = ("toy.py:model", "--checkpoint", "checkpoint")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from orbax.checkpoint import v1

    folder = tmp_path_factory.mktemp("offline")
    (folder / "toy.py").write_text(MODEL)
    v1.save(str(folder / "checkpoint"), {"w": 2 * np.eye(4, dtype=np.float32)})
    np.savez(folder / "rows.npz", x=X)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "servax", *arguments]


def servax(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_a_process_that_was_killed_goes_on(folder: Path) -> None:
    arguments = ("predict", *MODEL_OPTIONS, "-i", "rows.npz", "-o", "out.npz", "--chunk", "2")
    with subprocess.Popen(command(*arguments), cwd=folder, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 120
        while not (folder / "out.npz.partial" / "chunk-000020.npz").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.005)
        process.kill()
        process.communicate()
    assert not (folder / "out.npz").exists()
    kept = len(list((folder / "out.npz.partial").glob("chunk-*.npz")))
    assert 20 <= kept < 1500
    again = servax(folder, *arguments, "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert report["rows"] == 3000
    assert report["failed"] == 0
    assert report["resumed"] == 2 * kept
    with np.load(folder / "out.npz") as out:
        np.testing.assert_array_equal(out["output"], 2 * X)
    assert not (folder / "out.npz.partial").exists()


def test_rows_with_errors_exit_with_one(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.array([[1, 2, 3, 4], None, [1, 2, 3]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": rows}), folder / "rows.parquet")
    done = servax(folder, "predict", *MODEL_OPTIONS, "-i", "rows.parquet", "-o", "out.parquet")
    assert done.returncode == 1
    assert "2 rows have no answer; row 1: " in done.stderr
    table = pq.read_table(folder / "out.parquet").to_pylist()
    assert table[0]["output"] == [2, 4, 6, 8]
    assert [row["output"] for row in table[1:]] == [None, None]
    assert "expected float32[batch, 4]" in table[2]["error"]


def test_an_npz_without_an_output_is_one_call(folder: Path) -> None:
    np.savez(folder / "one.npz", x=X[:2])
    done = servax(folder, "predict", *MODEL_OPTIONS, "-i", "one.npz", "--json")
    assert json.loads(done.stdout) == {"output": (2 * X[:2]).tolist()}


def test_a_fitted_grid_loads(folder: Path) -> None:
    lines = [{"sizes": {"batch": 1}, "count": 5}, {"sizes": {"batch": 3}, "count": 5}]
    (folder / "shapes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tuned = servax(folder, "tune", *MODEL_OPTIONS, "--traffic", "shapes.jsonl", "-o", "buckets.json", "--json")
    assert tuned.returncode == 0, tuned.stderr
    result = json.loads(tuned.stdout)
    assert result["unit"] == "seconds"
    assert json.loads((folder / "buckets.json").read_text()) == result["grid"]
    assert {"batch": 2} in result["grid"]["predict"]  # three rows run as two and one
    plain = servax(folder, "tune", "toy.py:model", "--traffic", "shapes.jsonl", "--bucket", "batch=8")
    assert plain.returncode == 0, plain.stderr
    assert "padded elements" in plain.stdout
    loaded = servax(folder, "tune", "toy.py:model", "--traffic", "shapes.jsonl", "--bucket-file", "buckets.json")
    assert loaded.returncode == 0, loaded.stderr


def test_a_sweep_ends_in_a_line_to_paste(folder: Path) -> None:
    options = ("--sweep", "batch=1,2,4", "--seconds", "0.02")
    done = servax(folder, "bench", *MODEL_OPTIONS, *options)
    assert done.returncode == 0, done.stderr
    assert "batch=4" in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("--bucket batch=1")
    swept = servax(folder, "bench", *MODEL_OPTIONS, *options, "--json")
    assert [each["sizes"] for each in json.loads(swept.stdout)["buckets"]] == [{"batch": size} for size in (1, 2, 4)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "batch"), "--sweep"),
        (("--sweep", "batch=0"), "positive"),
        (("--sweep", "width=1"), "width"),
        (("--sweep", "batch=1", "--fix", "batch=2"), "--fix"),
        (("--concurrency", "x"), "--concurrency"),
        (("--function", "none"), "none"),
    ],
)
def test_a_bench_that_cannot_be(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    from typer.testing import CliRunner

    from servax.cli.app import app

    done = CliRunner().invoke(app, ["bench", str(folder / "toy.py:model"), "--checkpoint", "checkpoint", *arguments])
    assert isinstance(done.exception, Exception)
    assert said in str(done.exception)


def test_a_server_is_loaded_by_callers(folder: Path) -> None:
    import servax as package

    model = package.Model(
        lambda params, x: x * params["w"], inputs={"x": "float32[batch, length]"}, buckets={"batch": [4], "length": [8]}
    )
    with package.load(model, params={"w": np.float32(2)}) as servable, package.serve(servable, port=0) as server:
        options = ("--concurrency", "1,4", "--seconds", "2", "--json")
        done = servax(folder, "bench", server.url, *options, "--fix", "length=8")
        assert done.returncode == 0, done.stderr
        assert [load["concurrency"] for load in json.loads(done.stdout)] == [1, 4]
        assert all(load["requests"] > 0 and not load["failed"] for load in json.loads(done.stdout))
        failing = servax(folder, "bench", server.url, "--concurrency", "1", "--seconds", "0.5", "--fix", "length=9")
        assert failing.returncode == 1
        assert "TooLarge" in failing.stdout
        unsized = servax(folder, "bench", server.url)
        assert unsized.returncode == 2
        assert "--fix length=SIZE" in unsized.stderr
