"""A small GPT over bytes in Flax NNX: the network of the tutorial "from notebook to production".

Architecture: Radford et al. 2019, GPT-2 (blocks that normalise first, a learned position table, the head tied to the
embeddings). The vocabulary is the 256 bytes, so there is no tokenizer to ship.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
      context: longest sequence, in bytes.
      width: size of the hidden state of one byte.
      layers: number of blocks.
      heads: attention heads; `width` is a multiple of it.
      vocabulary: number of token ids.
    """

    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    vocabulary: int = 256


class Block(nnx.Module):
    """Attention to this and earlier positions, then two dense layers, each added to what came in."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.query_key_value = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.output = nnx.Linear(config.width, config.width, rngs=rngs)
        self.dense_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.expand = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.contract = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        batch, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = jnp.moveaxis(projected.reshape(batch, length, 3, self.heads, width // self.heads), 2, 0)
        # Causal: a position sees itself and what is left of it. What a row is padded with on the right changes nothing
        # at its true positions. "xla" is the implementation that exports for every platform.
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
        hidden = hidden + self.output(attended.reshape(batch, length, width))
        return hidden + self.contract(jax.nn.gelu(self.expand(self.dense_norm(hidden))))


class GPT(nnx.Module):
    """Token ids in, for each position the logits of the next token out."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        small = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits `[batch, length, vocabulary]`.

        Args:
          tokens: ids, int32 `[batch, length]`, filled up on the right with anything.

        Raises:
          ValueError: the sequence is longer than the position table.
        """
        length = tokens.shape[1]
        # A symbolic dimension is not an int, whatever its annotation says.
        if isinstance(length, int) and length > self.config.context:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{length} tokens a row, but the position table ends at {self.config.context}")
        hidden = self.tokens(tokens) + self.positions(jnp.arange(length))[None]
        for block in self.blocks:
            hidden = block(hidden)
        return self.tokens.attend(self.norm(hidden))


def encode(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The bytes of a text as token ids, int32 `[length]`."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(ids: np.ndarray[tuple[int], np.dtype[np.integer]]) -> str:
    """The text of these token ids; bytes that are not UTF-8 show as replacement characters."""
    return ids.astype(np.uint8).tobytes().decode(errors="replace")
