"""The Llama family in Flax NNX: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

Architecture: Touvron et al. 2023, https://arxiv.org/abs/2302.13971 (blocks that normalise first by RMSNorm, SwiGLU),
with grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245) and rotary positions (Su et al.
2021, https://arxiv.org/abs/2104.09864) whose pairs are a head's two halves, as Hugging Face has them.

Every layer has leaves of its own and the layers are unrolled: `lax.scan` over stacked weights copies each layer's
weights, which costs ten times the products on a CPU. Matrices are kept `[output, input]`, products accumulate in
float32: the one form of a bfloat16 product that XLA's CPU backend hands to its fast library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Weights = Literal["float", "int8"]

BLOCK = 128
"""Positions of the cache that attention reads at a time."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3 stretches rotary positions beyond the context it was first trained with.

    Source: `rope_type: llama3` of Hugging Face, after https://arxiv.org/abs/2407.21783.

    Attributes:
      factor: by which low frequencies are slowed.
      low, high: wavelengths over `context / low` are slowed, those under `context / high` are kept.
      context: the first context, in tokens.
    """

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a decoder of the Llama family.

    Attributes:
      vocabulary: number of token ids.
      width: size of the hidden state of one token.
      layers: number of blocks.
      heads: query heads.
      key_value_heads: heads of keys and values; `heads` is a multiple of it.
      head_size: size of one head.
      feed_forward: width of the hidden layer of a block's SwiGLU.
      context: longest sequence, in tokens.
      rope_base: of rotary positions.
      epsilon: what RMSNorm adds to the mean square.
      tied: whether the head is the table of embeddings.
      attention_bias: whether query, key and value have biases (Qwen2).
      query_key_norm: whether each head of query and key is normalised (Qwen3).
      rope_scaling: None unless the context was stretched (Llama 3.1).
      cache_dtype: of keys and values that are kept.
      weights: `int8`: matrices of 8 bits, and inputs of products brought to 8 bits row by row (W8A8).
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    context: int
    rope_base: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = False
    attention_bias: bool = False
    query_key_norm: bool = False
    rope_scaling: RopeScaling | None = None
    cache_dtype: str = "bfloat16"
    weights: Weights = "float"


class Matrix(nnx.Module):
    """A matrix `[output, input]`; as int8, with a float32 scale for each output, where `weights` says so."""

    def __init__(self, inputs: int, outputs: int, *, weights: Weights = "float", deviation: float, rngs: nnx.Rngs):
        values = deviation * jax.random.normal(rngs.params(), (outputs, inputs))
        if weights == "int8":
            scale = jnp.max(jnp.abs(values), axis=1) / 127
            self.weight = nnx.Param(jnp.round(values / scale[:, None]).astype(jnp.int8))
            self.scale = nnx.Param(scale)
        else:
            self.weight = nnx.Param(values)
            self.scale = None

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows of the matrix, float32 `[..., input]`."""
        found = self.weight[...][ids].astype(jnp.float32)
        return found if self.scale is None else found * self.scale[...][ids][..., None]

    def product(self, left: jax.Array) -> jax.Array:
        """`left [..., input]` times the matrix, float32 `[..., output]`."""
        if self.scale is None:
            return product(left, self.weight[...])
        return quantized_product(left, self.weight[...], self.scale[...])


class Dense(Matrix):
    """A product with a matrix, and a bias if asked for."""

    def __init__(
        self, inputs: int, outputs: int, *, weights: Weights = "float", bias: bool = False, rngs: nnx.Rngs
    ) -> None:
        super().__init__(inputs, outputs, weights=weights, deviation=1 / math.sqrt(inputs), rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, hidden: jax.Array) -> jax.Array:
        found = self.product(hidden)
        return found if self.bias is None else found + self.bias[...]


class RMSNorm(nnx.Module):
    """Division by the root of the mean square, computed in float32, and a scale."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        wide = hidden.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(hidden.dtype) * self.scale[...]


class Attention(nnx.Module):
    """Grouped-query attention to this and earlier positions, its heads side by side."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        queries, pairs = config.heads * config.head_size, config.key_value_heads * config.head_size
        self.query = Dense(config.width, queries, weights=config.weights, bias=config.attention_bias, rngs=rngs)
        self.key = Dense(config.width, pairs, weights=config.weights, bias=config.attention_bias, rngs=rngs)
        self.value = Dense(config.width, pairs, weights=config.weights, bias=config.attention_bias, rngs=rngs)
        self.output = Dense(queries, config.width, weights=config.weights, rngs=rngs)
        self.query_norm = RMSNorm(config.head_size, config.epsilon) if config.query_key_norm else None
        self.key_norm = RMSNorm(config.head_size, config.epsilon) if config.query_key_norm else None

    def project(self, hidden: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query `[batch, length, heads, size]`, key and value `[batch, length, key_value_heads, size]`, turned."""
        batch, length, _ = hidden.shape
        size = self.config.head_size
        query = self.query(hidden).reshape(batch, length, self.config.heads, size)
        key = self.key(hidden).reshape(batch, length, self.config.key_value_heads, size)
        value = self.value(hidden).reshape(batch, length, self.config.key_value_heads, size)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        cosine, sine = rotation(self.config, positions)
        return rotate(query, cosine, sine), rotate(key, cosine, sine), value

    def __call__(self, hidden: jax.Array, positions: jax.Array) -> jax.Array:
        query, key, value = self.project(hidden, positions)
        # "xla" is the implementation that exports for every platform.
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")
        return attended.reshape(*hidden.shape[:2], -1)


class FeedForward(nnx.Module):
    """SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = Dense(config.width, config.feed_forward, weights=config.weights, rngs=rngs)
        self.up = Dense(config.width, config.feed_forward, weights=config.weights, rngs=rngs)
        self.down = Dense(config.feed_forward, config.width, weights=config.weights, rngs=rngs)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(hidden)) * self.up(hidden))


def _traced_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a block by way of a function that all blocks share: a network is traced as fast as one of its layers.

    XLA puts the function's body where it is called, so the program is the same.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def shared(graph: Any, state: Any, *arguments: Any) -> Any:
        return method(nnx.merge(graph, state), *arguments)

    @functools.wraps(method)
    def call(block: nnx.Module, *arguments: Any) -> Any:
        return shared(*nnx.split(block), *arguments)

    return call


class Block(nnx.Module):
    """Attention, then SwiGLU, each added to what came in."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = RMSNorm(config.width, config.epsilon)
        self.feed_forward = FeedForward(config, rngs=rngs)

    @_traced_once
    def __call__(self, hidden: jax.Array, positions: jax.Array) -> jax.Array:
        return self._rest(hidden, self.attention(self.attention_norm(hidden), positions))

    @_traced_once
    def prefill(
        self, hidden: jax.Array, keys: jax.Array, values: jax.Array, slot: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A chunk `[1, chunk, width]` of a sequence through the block, and the block's cache with it."""
        positions = start + jnp.arange(hidden.shape[1])
        query, key, value = self.attention.project(self.attention_norm(hidden), positions[None])
        keys, values = (
            jax.lax.dynamic_update_slice(held, jnp.swapaxes(new, 1, 2).astype(held.dtype), (slot, 0, start, 0))
            for held, new in ((keys, key), (values, value))
        )
        blocks = (start + hidden.shape[1] + BLOCK - 1) // BLOCK
        attended = attend(query, keys, values, positions[None], blocks, first=slot)
        return self._rest(hidden, attended), keys, values

    @_traced_once
    def decode(
        self, hidden: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, running: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One token of each row, `[batch, 1, width]`, through the block, and the block's cache with it."""
        rows = jnp.arange(hidden.shape[0])
        place = jnp.where(running, positions, keys.shape[2])  # out of bounds: dropped
        query, key, value = self.attention.project(self.attention_norm(hidden), positions[:, None])
        keys, values = (
            held.at[rows, :, place].set(new[:, 0].astype(held.dtype), mode="drop")
            for held, new in ((keys, key), (values, value))
        )
        blocks = (jnp.max(jnp.where(running, positions, 0)) + BLOCK) // BLOCK
        attended = attend(query, keys, values, positions[:, None], blocks)
        return self._rest(hidden, attended), keys, values

    def _rest(self, hidden: jax.Array, attended: jax.Array) -> jax.Array:
        """What follows attention, whose heads `[batch, length, heads * head_size]` are `attended`."""
        hidden = hidden + self.attention.output(attended)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Llama(nnx.Module):
    """Token ids in, for each position the logits of the next token out."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = Matrix(config.width, config.vocabulary, weights=config.weights, deviation=0.02, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.epsilon)
        self.head = None if config.tied else Dense(config.width, config.vocabulary, weights=config.weights, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits, float32 `[batch, length, vocabulary]`.

        Args:
          tokens: ids, int32 `[batch, length]`, filled up on the right with anything.
        """
        hidden = self.embedding.rows(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        for block in self.blocks:
            hidden = block(hidden, positions)
        return self.logits(hidden)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.config.vocabulary

    def cache(self, slots: int, length: int) -> dict[str, str]:
        """Specs of keys and values by layer, `[slots, key_value_heads, length, head_size]`."""
        length = -(-length // BLOCK) * BLOCK
        spec = f"{self.config.cache_dtype}[{slots}, {self.config.key_value_heads}, {length}, {self.config.head_size}]"
        return {f"{kind}{layer:02d}": spec for layer in range(self.config.layers) for kind in ("key", "value")}

    def prefill(
        self, cache: Mapping[str, jax.Array], tokens: jax.Array, slot: jax.Array, start: jax.Array
    ) -> dict[str, jax.Array]:
        """As `servax.model.language.Decoder.prefill`."""
        written = dict(cache)
        hidden = self.embedding.rows(tokens)[None]
        for layer, block in enumerate(self.blocks):
            key, value = f"key{layer:02d}", f"value{layer:02d}"
            hidden, written[key], written[value] = block.prefill(hidden, written[key], written[value], slot, start)
        return written

    def decode(
        self, cache: Mapping[str, jax.Array], tokens: jax.Array, positions: jax.Array, running: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """As `servax.model.language.Decoder.decode`."""
        written = dict(cache)
        hidden = self.embedding.rows(tokens)[:, None]
        for layer, block in enumerate(self.blocks):
            key, value = f"key{layer:02d}", f"value{layer:02d}"
            hidden, written[key], written[value] = block.decode(
                hidden, written[key], written[value], positions, running
            )
        return written, self.logits(hidden)[:, 0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of the last block's `[..., width]`."""
        head = self.embedding if self.head is None else self.head
        return head.product(self.norm(hidden))


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    blocks: jax.Array,
    *,
    first: jax.Array | int = 0,
) -> jax.Array:
    """Grouped-query attention to a cache, block by block: what is read is what is used, not what is allocated.

    Softmax as the blocks come, after Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867. The cache is read
    where it lies, a block at a time: a slice of it for the batch would be a copy, and XLA then writes the new keys
    twice, the second time into a copy of the whole cache.

    Args:
      query: `[batch, queries, heads, size]`.
      keys: `[slots, key_value_heads, length, size]`; `length` is a multiple of `BLOCK`.
      values: as `keys`.
      positions: int32 `[batch, queries]`, the last position that each query sees.
      blocks: int32 `[]`, how many blocks hold what any query sees.
      first: the slot of the first row of the batch; the others follow.

    Returns:
      float32 `[batch, queries, heads * size]`.
    """
    batch, queries, heads, size = query.shape
    groups = keys.shape[1]
    query = query.astype(jnp.float32).reshape(batch, queries, groups, heads // groups, size) / math.sqrt(size)
    query = query.transpose(0, 2, 3, 1, 4).reshape(batch, groups, -1, size)  # heads of a group beside its queries
    sees = jnp.tile(positions, (1, heads // groups))[:, None, :, None]

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        most, total, mixed = carry
        start = index * BLOCK
        block_keys, block_values = (
            jax.lax.dynamic_slice(each, (first, 0, start, 0), (batch, groups, BLOCK, size)).astype(jnp.float32)
            for each in (keys, values)
        )
        scores = jnp.einsum("bgqd,bgkd->bgqk", query, block_keys)
        scores = jnp.where(start + jnp.arange(BLOCK) <= sees, scores, -1e30)
        peak = jnp.maximum(most, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - peak[..., None])
        faded = jnp.exp(most - peak)
        mixed = mixed * faded[..., None] + jnp.einsum("bgqk,bgkd->bgqd", weights, block_values)
        return peak, total * faded + jnp.sum(weights, axis=-1), mixed

    nothing = jnp.zeros(query.shape[:3], jnp.float32)
    _, total, mixed = jax.lax.fori_loop(0, blocks, body, (nothing - 1e30, nothing, jnp.zeros_like(query)))
    mixed = mixed / total[..., None]
    return mixed.reshape(batch, heads, queries, size).transpose(0, 2, 1, 3).reshape(batch, queries, heads * size)


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left [..., input]` times `right [output, input]`, in the dtype of `right`, accumulated and given in float32."""
    return _by_rows(left, lambda rows: _dot(rows.astype(right.dtype), right, jnp.float32))


def quantized_product(left: jax.Array, right: jax.Array, scale: jax.Array) -> jax.Array:
    """`left [..., input]` times int8 `right [output, input]` times `scale [output]`, float32.

    Each row of `left` is brought to 8 bits by its largest value, so that the product is one of small integers, summed
    up exactly (Dettmers et al. 2022, https://arxiv.org/abs/2208.07339, without its outliers).
    """

    def quantized(rows: jax.Array) -> jax.Array:
        step = jnp.maximum(jnp.max(jnp.abs(rows), axis=-1, keepdims=True), 1e-30) / 127
        whole = jnp.round(rows / step).astype(jnp.int8)
        return _dot(whole, right, jnp.int32).astype(jnp.float32) * step * scale

    return _by_rows(left, quantized)


def _by_rows(left: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`function` of `left` as rows; of a single row as two, since XLA's CPU backend is slow with one."""
    rows = left.astype(jnp.float32).reshape(-1, left.shape[-1])
    single = rows.shape[0] == 1
    found = function(jnp.concatenate([rows, jnp.zeros_like(rows)]) if single else rows)
    return (found[:1] if single else found).reshape(*left.shape[:-1], -1)


def _dot(left: jax.Array, right: jax.Array, accumulated: jax.typing.DTypeLike) -> jax.Array:
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=accumulated)


def rotation(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of rotary positions, float32 `[..., head_size / 2]` for positions `[...]`."""
    half = config.head_size // 2
    frequencies = config.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if (scaling := config.rope_scaling) is not None:
        waves = 2 * math.pi / frequencies
        kept = jnp.clip((scaling.context / waves - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns each pair of `heads [..., length, heads, size]`, a head's two halves, by its position's angle."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(heads.dtype)
