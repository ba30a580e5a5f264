"""A BERT encoder in Flax NNX, and a sentence encoder on top of it.

Architecture: Devlin et al. 2018, https://arxiv.org/abs/1810.04805 (post-layer-norm blocks); pooling: Reimers and
Gurevych 2019, https://arxiv.org/abs/1908.10084 (mean over tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes of a BERT encoder.

    Attributes:
      vocabulary: number of token ids.
      positions: longest sequence, in tokens.
      token_types: number of segments that the embeddings tell apart.
      width: size of the hidden state of one token.
      layers: number of blocks.
      heads: attention heads; `width` is a multiple of it.
      feed_forward: width of the hidden layer between blocks' two dense layers.
      epsilon: what layer normalisation adds to the variance.
    """

    vocabulary: int
    positions: int
    token_types: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    epsilon: float


class SelfAttention(nnx.Module):
    """Attention of every token to the true tokens of its own row."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        # One product for query, key and value: the same numbers in a third of the calls.
        self.query_key_value = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.output = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, hidden: jax.Array, n: jax.Array) -> jax.Array:
        batch, length, width = hidden.shape
        projected = self.query_key_value(hidden).reshape(batch, length, 3, self.heads, width // self.heads)
        # Keys at and after `n` get a large negative finite score: their weight is exactly 0, and a row of padding
        # alone still gives numbers. "xla" is the implementation that exports for every platform.
        attended = jax.nn.dot_product_attention(
            projected[:, :, 0],
            projected[:, :, 1],
            projected[:, :, 2],
            key_value_seq_lengths=n,
            implementation="xla",
        )
        return self.output(attended.reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and two dense layers, each followed by a residual sum and layer normalisation."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = SelfAttention(config, rngs=rngs)
        self.attention_norm = _norm(config, rngs)
        self.expand = nnx.Linear(config.width, config.feed_forward, rngs=rngs)
        self.contract = nnx.Linear(config.feed_forward, config.width, rngs=rngs)
        self.output_norm = _norm(config, rngs)

    def __call__(self, hidden: jax.Array, n: jax.Array) -> jax.Array:
        hidden = self.attention_norm(hidden + self.attention(hidden, n))
        fed = self.contract(jax.nn.gelu(self.expand(hidden), approximate=False))
        return self.output_norm(hidden + fed)


class Bert(nnx.Module):
    """Token ids in, one hidden state a token out."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.words = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.positions, config.width, rngs=rngs)
        self.token_types = nnx.Embed(config.token_types, config.width, rngs=rngs)
        self.norm = _norm(config, rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])

    def __call__(self, tokens: jax.Array, n: jax.Array, token_types: jax.Array | None = None) -> jax.Array:
        """Hidden states `[batch, length, width]`; those at and after `n` mean nothing.

        Args:
          tokens: ids, int32 `[batch, length]`, filled up on the right.
          n: true lengths, int32 `[batch]`.
          token_types: segments, int32 `[batch, length]`; None: all of segment 0.

        Raises:
          ValueError: the sequence is longer than the position table.
        """
        length = tokens.shape[1]
        # A symbolic dimension is not an int, whatever its annotation says.
        if isinstance(length, int) and length > self.config.positions:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{length} tokens a row, but the position table ends at {self.config.positions}")
        if token_types is None:
            token_types = jnp.zeros_like(tokens)
        hidden = self.words(tokens) + self.positions(jnp.arange(length))[None] + self.token_types(token_types)
        hidden = self.norm(hidden)
        for block in self.blocks:
            hidden = block(hidden, n)
        return hidden


class SentenceEncoder(nnx.Module):
    """Token ids in, one vector of length 1 a sentence out."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.bert = Bert(config, rngs=rngs)

    def __call__(self, tokens: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
        """`embedding`, float32 `[batch, width]`: the mean of the true tokens' hidden states, scaled to length 1."""
        hidden = self.bert(tokens, n).astype(jnp.float32)
        true = jnp.arange(tokens.shape[1]) < n[:, None]
        total = jnp.sum(jnp.where(true[:, :, None], hidden, 0.0), axis=1)
        mean = total / jnp.maximum(n, 1)[:, None]
        norm = jnp.sqrt(jnp.sum(mean * mean, axis=-1, keepdims=True))
        return {"embedding": mean / jnp.maximum(norm, 1e-12)}


def _norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance, E[x^2] - E[x]^2, loses digits that an epsilon of 1e-12 does not hide.
    return nnx.LayerNorm(config.width, epsilon=config.epsilon, use_fast_variance=False, rngs=rngs)
