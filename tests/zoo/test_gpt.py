import jax
import numpy as np
import pytest
from flax import nnx

from servax.zoo.gpt import GPT, GPTConfig, decode, encode

CONFIG = GPTConfig(context=16, width=8, layers=2, heads=2, vocabulary=11)


@pytest.fixture(scope="module")
def network() -> GPT:
    network = GPT(CONFIG, rngs=nnx.Rngs(3))
    state = nnx.state(network)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(state))))
    nnx.update(network, jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * 0.4, state))
    return network


def reference(parameters: dict, tokens: np.ndarray) -> np.ndarray:
    """Logits of one row `[length]`, written out position by position in float64 NumPy."""

    def norm(x: np.ndarray, weights: dict) -> np.ndarray:
        centred = x - x.mean()
        return centred / np.sqrt((centred**2).mean() + 1e-6) * weights["scale"] + weights["bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def dense(x: np.ndarray, weights: dict) -> np.ndarray:
        return x @ weights["kernel"] + weights["bias"]

    table = parameters["tokens"]["embedding"]
    hidden = [table[token] + parameters["positions"]["embedding"][at] for at, token in enumerate(tokens)]
    size = CONFIG.width // CONFIG.heads
    for _, block in sorted(parameters["blocks"].items()):
        projected = [dense(norm(x, block["attention_norm"]), block["query_key_value"]) for x in hidden]
        following = []
        for at, x in enumerate(hidden):
            heads = []
            for head in range(CONFIG.heads):
                query, key, value = (
                    [p[part * CONFIG.width + head * size :][:size] for p in projected[: at + 1]] for part in range(3)
                )
                scores = np.array([query[at] @ each for each in key]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                heads.append(weights / weights.sum() @ np.array(value))
            attended = x + dense(np.concatenate(heads), block["output"])
            fed = dense(gelu(dense(norm(attended, block["dense_norm"]), block["expand"])), block["contract"])
            following.append(attended + fed)
        hidden = following
    return np.array([norm(x, parameters["norm"]) @ table.T for x in hidden])


def test_logits_equal_those_of_numpy(network: GPT) -> None:
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], np.int32)
    parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(network)))
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(network(tokens))
    expected = np.stack([reference(parameters, row) for row in tokens])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_a_position_sees_nothing_on_its_right(network: GPT) -> None:
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
    changed = tokens.copy()
    changed[0, 4] = 10
    logits, after = np.asarray(network(tokens)), np.asarray(network(changed))
    np.testing.assert_array_equal(logits[:, :4], after[:, :4])
    assert not np.allclose(logits[:, 4:], after[:, 4:])


@pytest.mark.parametrize("filler", [0, 10])
def test_padding_on_the_right_changes_no_true_position(network: GPT, filler: int) -> None:
    tokens = np.array([[3, 1, 4, 1, 5]], np.int32)
    padded = np.concatenate([tokens, np.full((1, 11), filler, np.int32)], axis=1)
    np.testing.assert_allclose(np.asarray(network(padded))[:, :5], np.asarray(network(tokens)), rtol=1e-5, atol=1e-5)


def test_a_sequence_longer_than_the_table_is_refused(network: GPT) -> None:
    with pytest.raises(ValueError, match="17 tokens a row, but the position table ends at 16"):
        network(np.zeros((1, 17), np.int32))


def test_text_is_its_bytes() -> None:
    assert encode("a é").tolist() == [97, 32, 0xC3, 0xA9]
    assert decode(np.array([97, 32, 0xC3, 0xA9])) == "a é"
    assert decode(np.array([0xC3])) == "\N{REPLACEMENT CHARACTER}"
