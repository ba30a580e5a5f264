import jax
import numpy as np
import pytest
from flax import nnx
from jax import export

from servax.zoo.bert import BertConfig, SentenceEncoder

CONFIG = BertConfig(
    vocabulary=50, positions=16, token_types=2, width=8, layers=2, heads=2, feed_forward=12, epsilon=1e-12
)


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder(CONFIG, rngs=nnx.Rngs(0))


def embed(encoder: SentenceEncoder, tokens: np.ndarray, n: list[int]) -> np.ndarray:
    return np.asarray(encoder(tokens, np.array(n, np.int32))["embedding"])


def test_embeddings_have_length_one(encoder: SentenceEncoder) -> None:
    tokens = np.arange(15, dtype=np.int32).reshape(3, 5)
    np.testing.assert_allclose((embed(encoder, tokens, [5, 3, 1]) ** 2).sum(axis=-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("filler", [0, 49])
def test_padding_changes_nothing(encoder: SentenceEncoder, filler: int) -> None:
    tokens = np.arange(1, 6, dtype=np.int32)[None]
    padded = np.full((3, 16), filler, np.int32)
    padded[1, :5] = tokens
    alone = embed(encoder, tokens, [5])
    np.testing.assert_allclose(embed(encoder, padded, [1, 5, 16])[1:2], alone, rtol=1e-5, atol=1e-6)


def test_a_row_of_padding_alone_is_finite(encoder: SentenceEncoder) -> None:
    assert np.isfinite(embed(encoder, np.zeros((2, 4), np.int32), [0, 2])).all()


def test_segments_have_embeddings_of_their_own(encoder: SentenceEncoder) -> None:
    tokens, n = np.arange(6, dtype=np.int32)[None], np.array([6], np.int32)
    first = encoder.bert(tokens, n)
    np.testing.assert_array_equal(encoder.bert(tokens, n, np.zeros_like(tokens)), first)
    assert not np.allclose(encoder.bert(tokens, n, np.ones_like(tokens)), first)


def test_a_sequence_longer_than_the_table_is_refused(encoder: SentenceEncoder) -> None:
    with pytest.raises(ValueError, match="17 tokens a row, but the position table ends at 16"):
        embed(encoder, np.zeros((1, 17), np.int32), [17])


def test_traces_at_symbolic_sizes(encoder: SentenceEncoder) -> None:
    batch, length = export.symbolic_shape("batch, length")
    graph, state = nnx.split(encoder)
    exported = export.export(jax.jit(lambda state, tokens, n: nnx.merge(graph, state)(tokens, n)["embedding"]))(
        jax.eval_shape(lambda: state),
        jax.ShapeDtypeStruct((batch, length), np.int32),
        jax.ShapeDtypeStruct((batch,), np.int32),
    )
    assert exported.out_avals[0].shape == (batch, CONFIG.width)
