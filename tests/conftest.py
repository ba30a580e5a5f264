"""What several rooms' tests share. Expensive things are made once a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def minilm_golden() -> Sequence[dict[str, Any]]:
    """Sentences with the token ids and embeddings that another implementation (transformers, torch) gives them."""
    return json.loads((DATA / "minilm_golden.json").read_text())


@pytest.fixture(scope="session")
def minilm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real weights of all-MiniLM-L6-v2 as an Orbax checkpoint."""
    from servax.zoo import minilm

    path = tmp_path_factory.mktemp("minilm") / "checkpoint"
    minilm.convert(minilm.package_file("model.safetensors"), path)
    return path
