"""The bundle of MiniLM that the end-to-end tests share: all four wrappers, built once a session."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from servax.targets.bundle import Bundle

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def minilm_bundle(minilm_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    from servax.workflow.build import build

    return build(
        "servax.zoo.minilm:model",
        checkpoint=str(minilm_checkpoint),
        targets=["jit", "aot", "export", "saved_model"],
        platforms=["cpu", "cuda", "tpu"],
        output=tmp_path_factory.mktemp("bundles") / "minilm.bundle",
    )


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Bundle], Path]:
    """Copies a bundle, so that a test may damage it."""

    def copy(bundle: Bundle) -> Path:
        path = tmp_path / "copy.bundle"
        shutil.copytree(bundle.root, path)
        return path

    return copy
