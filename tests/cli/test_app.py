"""The command line: exit codes, errors without tracebacks, nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import numpy as np
import servax
model = servax.Model(
    lambda params, x: x @ params["w"], inputs={"x": "float32[batch, 4]"}, buckets={"batch": [1, 2]}, name="toy",
    params={"w": np.ones((4, 4), np.float32)},
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import numpy as np
    from orbax.checkpoint import v1

    (tmp_path / "toy.py").write_text(MODEL)
    v1.save(str(tmp_path / "checkpoint"), {"w": np.eye(4, dtype=np.float32)})
    return tmp_path


def servax(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servax", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_the_way_from_a_checkpoint_to_an_answer(folder: Path) -> None:
    built = servax(
        folder, "build", "toy.py:model", "--checkpoint", "checkpoint", "-t", "aot", "-o", "toy.bundle", "--json"
    )
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["proved"] is True
    assert "parity" in built.stderr
    answer = servax(folder, "predict", "toy.bundle", "-i", "x=[[1, 2, 3, 4]]", "--json")
    assert json.loads(answer.stdout) == {"output": [[1.0, 2.0, 3.0, 4.0]]}
    inspected = servax(folder, "inspect", "toy.bundle")
    assert "predict@batch=2" in inspected.stdout
    text = servax(folder, "inspect", "toy.bundle", "--stablehlo", "predict@batch=1")
    assert "stablehlo.dot_general" in text.stdout
    assert servax(folder, "inspect", "toy.bundle", "--diff", "toy.bundle").stdout == "no difference\n"
    compiled = servax(folder, "compile", "toy.bundle", "--json")
    assert json.loads(compiled.stdout)["present"] == 2
    verified = servax(folder, "verify", "toy.bundle", "-t", "aot")
    assert verified.returncode == 0, verified.stderr
    chosen = servax(folder, "choose", "toy.bundle", "--for", "startup", "--json")
    assert json.loads(chosen.stdout)[0]["target"] == "aot"
    assert json.loads(chosen.stdout)[0]["obstacles"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["build"], 2, "--output"),
        (["build", "toy.py:model", "-o", "out"], 2, "--checkpoint"),
        (["build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "out", "--dtype", "int32"], 2, "int32"),
        (["build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "out", "-t", "tflite"], 2, "tflite"),
        (["build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "out", "--platform", "abacus"], 2, "abacus"),
        (
            ["build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "out", "--max-precision-error", "nan"],
            2,
            "nan",
        ),
        (["build", "toy.py:model", "--checkpoint", "nowhere", "-o", "out"], 1, "nowhere"),
        (["build", "toy.py:none", "--checkpoint", "checkpoint", "-o", "out"], 1, "none"),
        (["build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "/proc/none/out"], 1, "/proc/none"),
        (["inspect", "nope.bundle"], 1, "nope.bundle"),
        (["predict", "nope.bundle"], 2, "nope.bundle"),
        (["predict", "checkpoint", "-i", "x"], 2, "x"),
        (["serve", "nope.bundle", "--http", "99999"], 2, "65535"),
        (["choose", "nope.bundle"], 2, "nope.bundle"),
        (["--nonsense"], 2, "nonsense"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(folder: Path, arguments: list[str], code: int, said: str) -> None:
    done = servax(folder, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob(".out*"))


def test_errors_are_json_when_asked(folder: Path) -> None:
    done = servax(folder, "inspect", "nope.bundle", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "BundleError"
    assert "nope.bundle" in error["where"]
    assert error["remedy"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_build_that_is_ended_leaves_nothing_behind(folder: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "servax", "build", "toy.py:model", "--checkpoint", "checkpoint", "-o", "out"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("compile"):  # the bundle's temporary directory is full by now, and children come next
                process.send_signal(number)
                break
        process.stderr.read()
        assert process.wait(60) == code
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["checkpoint", "toy.py"]
