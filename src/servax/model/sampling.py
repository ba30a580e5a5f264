"""Sampling as a traced function: one token for each row from its logits, on the device.

What a row draws depends on its own logits, parameters, seed and position alone, so that a seed gives the same text
whatever else is in the batch: the noise of (seed, position, token) is one block of Threefry 2x32 (Salmon et al. 2011),
and the token is the one whose logit plus Gumbel noise is largest (the Gumbel-max trick). Most rows are decided among
their `WINDOW` likeliest tokens; what cannot be decided there goes the exact way over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

WINDOW = 64
"""Candidates that most rows are decided among: a full sort of a vocabulary costs a hundred times as much."""

TOP = 20
"""Most alternatives whose log probabilities are given, as the OpenAI API has it."""

STOPS = 8
"""Most token ids that end a row."""

_NEVER = -1e30
"""A finite stand-in for minus infinity, whose differences are numbers."""

_COLDEST = 1e-6
"""Lowest temperature, under which quotients would leave float32; the likeliest token is drawn there anyway."""

ROW_INPUTS: Mapping[str, str] = {
    "temperature": "float32",  # 0 and below: the likeliest token
    "top_k": "int32",  # 0 and below: off
    "top_p": "float32",  # 1 and above: off
    "min_p": "float32",  # 0 and below: off
    "presence": "float32",
    "frequency": "float32",
    "repetition": "float32",  # 1: off
    "seeds": "uint32",
    "minimum": "int32",  # position before which a row does not end
    "biased": "bool",
    "constrained": "bool",
    "ranked": "bool",  # whether the alternatives are wanted
}
"""Inputs of a row, one value each, by dtype."""


class Rows(NamedTuple):
    """What is known of each row beside its logits; the fields of `ROW_INPUTS`, and those of more than one value.

    Attributes:
      stops: int32 `[batch, STOPS]`, ids that end the row; filled up with -1.
      forced: int32 `[batch]`, the token to take in place of a drawn one; -1: none.
      mask: uint32 `[batch, vocabulary / 32]`, the tokens a constrained row may take, lowest bit first.
      bias: float32 `[batch or more, vocabulary]`, added to the logits of a biased row.
      counts: int32 `[batch or more, vocabulary]`, twice how often a token was generated, plus 1 if it is in the prompt.
      positions: int32 `[batch]`, of the token that is to be drawn.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    seeds: jax.Array
    minimum: jax.Array
    biased: jax.Array
    constrained: jax.Array
    ranked: jax.Array
    stops: jax.Array
    forced: jax.Array
    mask: jax.Array
    bias: jax.Array
    counts: jax.Array
    positions: jax.Array


class Drawn(NamedTuple):
    """One token a row.

    Attributes:
      tokens: int32 `[batch]`.
      logprobs: float32 `[batch]`, of the tokens, by the model's own logits.
      top_tokens: int32 `[batch, TOP]`, likeliest first; zeros where not `ranked`, or where the token was forced.
      top_logprobs: float32 `[batch, TOP]`, of these.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def draw(logits: jax.Array, rows: Rows) -> Drawn:
    """A token for each row of `logits`, float32 `[batch, vocabulary]`."""
    scores = _penalised(logits, rows)
    scores = _ending_late(scores, rows)
    scores = jax.lax.cond(jnp.any(rows.biased), lambda s: _biased(s, rows), _same, scores)
    scores = jax.lax.cond(jnp.any(rows.constrained), lambda s: _constrained(s, rows), _same, scores)
    greedy = _best(scores)
    warm = rows.temperature > 0
    drawn = jax.lax.cond(jnp.any(warm), lambda: _sampled(scores, rows), lambda: greedy)
    tokens = jnp.where(rows.forced >= 0, rows.forced, jnp.where(warm, drawn, greedy))
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    own = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0] - total
    ranked = rows.ranked & (rows.forced < 0)
    top_tokens, top_logprobs = _alternatives(shifted, total, ranked)
    return Drawn(tokens, own, top_tokens, top_logprobs)


def noise(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Gumbel noise, float32 `[batch, tokens]`, of `(seed, position, token)`: the same bits wherever it is asked for.

    Args:
      seeds: uint32 `[batch]`.
      positions: int32 `[batch]`.
      tokens: int32 `[batch, tokens]`.
    """

    def of_row(seed: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
        key = jnp.stack([seed, position.astype(jnp.uint32)])
        # Threefry gives two words for two: the second count is the complement, so that no token's pair is another's.
        count = row.astype(jnp.uint32)
        return threefry_2x32(key, jnp.concatenate([count, ~count]))[: row.shape[0]]

    bits = jax.vmap(of_row)(seeds, positions, tokens)
    # 24 bits, in the middle of their steps: neither 0 nor 1, so that both logarithms are finite.
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24 + 2.0**-25
    return -jnp.log(-jnp.log(uniform))


def _best(scores: jax.Array) -> jax.Array:
    """The first index of the largest value of each row, int32 `[batch]`; of a row with a NaN, its last index.

    As `argmax`, which XLA's CPU backend reduces element by element: two plain reductions take a tenth of its time.
    """
    last = scores.shape[1] - 1
    most = jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(scores == most, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def _same(scores: jax.Array) -> jax.Array:
    return scores


def _penalised(logits: jax.Array, rows: Rows) -> jax.Array:
    """Repetition (Keskar et al. 2019) over prompt and answer, presence and frequency (OpenAI) over the answer."""

    def apply(scores: jax.Array) -> jax.Array:
        counts = rows.counts[: scores.shape[0]]
        generated = (counts >> 1).astype(jnp.float32)
        repetition = jnp.where(counts > 0, rows.repetition[:, None], 1.0)
        scores = jnp.where(scores > 0, scores / repetition, scores * repetition)
        return scores - rows.frequency[:, None] * generated - rows.presence[:, None] * (generated > 0)

    used = (rows.presence != 0) | (rows.frequency != 0) | (rows.repetition != 1)
    return jax.lax.cond(jnp.any(used), apply, _same, logits)


def _ending_late(scores: jax.Array, rows: Rows) -> jax.Array:
    """Rules out what ends a row before its minimum."""
    early = (rows.positions < rows.minimum)[:, None] & (rows.stops >= 0)
    row = jnp.arange(scores.shape[0])[:, None]
    ids = jnp.where(early, rows.stops, scores.shape[1])  # out of bounds: dropped
    return scores.at[row, ids].set(_NEVER, mode="drop")


def _biased(scores: jax.Array, rows: Rows) -> jax.Array:
    return scores + jnp.where(rows.biased[:, None], rows.bias[: scores.shape[0]], 0)


def _constrained(scores: jax.Array, rows: Rows) -> jax.Array:
    bits = (rows.mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(scores.shape[0], -1)[:, : scores.shape[1]] == 1
    return jnp.where(allowed | ~rows.constrained[:, None], scores, _NEVER)


def _sampled(scores: jax.Array, rows: Rows) -> jax.Array:
    """The token of each row by the Gumbel-max trick, under top-k, then top-p, then min-p."""
    temperature = jnp.where(rows.temperature > 0, jnp.maximum(rows.temperature, _COLDEST), 1.0)
    scaled = scores / temperature[:, None]
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    window = min(WINDOW, scores.shape[1])
    values, ids = jax.lax.top_k(scaled, window)
    limit = jnp.where(rows.top_k > 0, rows.top_k, scores.shape[1])
    few = limit <= window
    # The mass that top-p is a share of: of the top-k where they are few, else of the whole vocabulary.
    inside = jnp.where(jnp.arange(window)[None] < limit[:, None], jnp.exp(values), 0.0)
    mass = jnp.where(few, jnp.sum(inside, axis=-1), jnp.sum(jnp.exp(scaled), axis=-1))
    kept = _kept(values, inside, mass, limit, rows)
    known = few | (limit >= scores.shape[1]) | (rows.top_p >= 1)  # else the mass of the top-k is not
    decided = few | (known & ~kept[:, -1]) | (window == scores.shape[1])
    chosen = jnp.argmax(jnp.where(kept, values + noise(rows.seeds, rows.positions, ids), _NEVER), axis=-1)
    near = jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0].astype(jnp.int32)
    exact = jax.lax.cond(jnp.all(decided | (rows.temperature <= 0)), lambda: near, lambda: _exact(scaled, limit, rows))
    return jnp.where(decided, near, exact)


def _kept(values: jax.Array, weights: jax.Array, mass: jax.Array, limit: jax.Array, rows: Rows) -> jax.Array:
    """Which of a row's values, likeliest first, may be drawn; the first always may."""
    before = jnp.cumsum(weights, axis=-1) - weights
    kept = jnp.arange(values.shape[1])[None] < limit[:, None]
    kept &= (before < rows.top_p[:, None] * mass[:, None]) | (rows.top_p >= 1)[:, None]
    kept &= (values >= jnp.log(jnp.maximum(rows.min_p, 1e-30))[:, None]) | (rows.min_p <= 0)[:, None]
    return kept.at[:, 0].set(True)


def _exact(scaled: jax.Array, limit: jax.Array, rows: Rows) -> jax.Array:
    """As `_sampled`, over the whole vocabulary; values that are equal to the last one that may be drawn may be too."""
    vocabulary = scaled.shape[1]
    below = jnp.abs(scaled)  # how much less likely than the likeliest: whole numbers can stand in for these floats

    def of_few() -> jax.Array:
        counts = jnp.ones_like(below)
        return _last(below, counts, jnp.where(limit < vocabulary, limit, jnp.inf))

    def of_mass() -> jax.Array:
        weights = jnp.where(below <= farthest[:, None], jnp.exp(-below), 0.0)
        return _last(below, weights, jnp.where(rows.top_p < 1, rows.top_p * jnp.sum(weights, axis=-1), jnp.inf))

    everything = jnp.full(scaled.shape[:1], jnp.inf)
    farthest = jax.lax.cond(jnp.any(limit < vocabulary), of_few, lambda: everything)
    farthest = jnp.minimum(farthest, jax.lax.cond(jnp.any(rows.top_p < 1), of_mass, lambda: everything))
    farthest = jnp.where(rows.min_p > 0, jnp.minimum(farthest, -jnp.log(jnp.maximum(rows.min_p, 1e-30))), farthest)
    ids = jnp.broadcast_to(jnp.arange(vocabulary, dtype=jnp.int32), scaled.shape)
    perturbed = scaled + noise(rows.seeds, rows.positions, ids)
    kept = (below <= farthest[:, None]) | (below == 0)
    return _best(jnp.where(kept, perturbed, _NEVER))


def _last(below: jax.Array, weights: jax.Array, share: jax.Array) -> jax.Array:
    """The largest number such that what lies nearer than it weighs less than `share`, float32 `[batch]`.

    By halving an interval of whole numbers: floats that are not negative are ordered as their bits are, and 31 sums
    over the vocabulary cost a fraction of sorting it.

    Args:
      below: float32 `[batch, vocabulary]`, not negative.
      weights: float32 `[batch, vocabulary]`.
      share: float32 `[batch]`, more than 0.
    """
    bits = jax.lax.bitcast_convert_type(below, jnp.int32)
    infinite = jnp.int32(0x7F800000)

    def halve(_: jax.Array, interval: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = interval
        middle = low + (high - low + 1) // 2
        light = jnp.sum(jnp.where(bits < middle[:, None], weights, 0.0), axis=-1) < share
        return jnp.where(light, middle, low), jnp.where(light, high, middle - 1)

    low = jnp.zeros(share.shape, jnp.int32)
    found, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.broadcast_to(infinite, share.shape)))
    return jax.lax.bitcast_convert_type(found, jnp.float32)


def _alternatives(shifted: jax.Array, total: jax.Array, ranked: jax.Array) -> tuple[jax.Array, jax.Array]:
    count = min(TOP, shifted.shape[1])

    def find() -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(shifted, count)
        return (
            jnp.where(ranked[:, None], ids.astype(jnp.int32), 0),
            jnp.where(ranked[:, None], values - total[:, None], 0.0),
        )

    def none() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((shifted.shape[0], count), jnp.int32), jnp.zeros((shifted.shape[0], count), jnp.float32)

    return jax.lax.cond(jnp.any(ranked), find, none)
