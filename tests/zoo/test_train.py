import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training run, made as the tutorial makes it."""
    path = tmp_path_factory.mktemp("train") / "run"
    command = [sys.executable, str(TUTORIAL / "train.py"), "--steps", "4", "--output", str(path)]
    finished = subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    return path


def restored(run: Path, step: int) -> Any:
    from orbax.checkpoint import v1

    return v1.load(str(run / str(step)))


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_each_save_has_model_average_and_optimizer_state(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir() if path.name.isdigit()) == ["1", "2", "3", "4"]
    saved = restored(run, 4)
    assert sorted(saved) == ["ema", "model", "optimizer"]
    shapes = [leaf.shape for leaf in leaves(saved["model"])]
    assert [leaf.shape for leaf in leaves(saved["ema"])] == shapes
    assert len(leaves(saved["optimizer"])) == 2 * len(shapes) + 2  # both moments, and the counts of Adam and schedule


def test_each_save_has_its_loss_as_metric(run: Path) -> None:
    losses = [json.loads((run / str(step) / "metrics" / "metrics").read_text())["loss"] for step in (1, 2, 3, 4)]
    assert losses[-1] < losses[0]


def test_the_average_moves_a_hundredth_of_the_way_each_step(run: Path) -> None:
    before, after = restored(run, 3), restored(run, 4)
    for model, average, earlier in zip(
        leaves(after["model"]), leaves(after["ema"]), leaves(before["ema"]), strict=True
    ):
        np.testing.assert_allclose(average, 0.99 * earlier + 0.01 * model, rtol=1e-5, atol=1e-6)


def test_the_text_is_plain_and_of_the_stated_size() -> None:
    text = (TUTORIAL / "text.txt").read_text()
    assert text.isascii()
    assert 15_000 <= len(text) <= 30_000
