"""The two networks that the servers are measured with, in JAX, and how a careful user calls them with `jax.jit`.

Every server computes these functions with these parameters; servax serves them from a bundle, the others import this
file. It needs jax and NumPy, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, LONGEST = 4, 256, 4, 1024, 8192, 128
LENGTHS = (16, 32, 64, 128)
"""Lengths that tokens are padded to by who calls the encoder with `Jitted`."""

Parameters = Mapping[str, jax.Array]


def mlp(params: Parameters, x: jax.Array) -> dict[str, jax.Array]:
    """784-512-512-10: `x` float32 `[batch, 784]` to logits float32 `[batch, 10]`."""
    hidden = jax.nn.relu(x @ params["kernel0"] + params["bias0"])
    hidden = jax.nn.relu(hidden @ params["kernel1"] + params["bias1"])
    return {"output": hidden @ params["kernel2"] + params["bias2"]}


def encoder(params: Parameters, tokens: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
    """`tokens` int32 `[batch, length]` of true lengths `n` int32 `[batch]` to the mean state float32 `[batch, 256]`."""
    batch, length = tokens.shape
    true = jnp.arange(length) < n[:, None]
    hidden = params["words"][tokens] + params["positions"][jnp.arange(length)]
    for layer in range(LAYERS):
        name = f"layer{layer}"
        normed = _norm(hidden, params[f"{name}_norm0"])
        projected = (normed @ params[f"{name}_qkv"]).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        scores = jnp.einsum("bqhd,bkhd->bhqk", projected[:, :, 0], projected[:, :, 1]) / (WIDTH // HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(true[:, None, None], scores, -1e9), axis=-1)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, projected[:, :, 2]).reshape(batch, length, WIDTH)
        hidden = hidden + attended @ params[f"{name}_output"]
        normed = _norm(hidden, params[f"{name}_norm1"])
        hidden = hidden + jax.nn.gelu(normed @ params[f"{name}_expand"]) @ params[f"{name}_contract"]
    total = jnp.sum(jnp.where(true[:, :, None], hidden, 0.0), axis=1)
    return {"output": total / jnp.maximum(n, 1)[:, None]}


def _norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    centred = hidden - jnp.mean(hidden, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6) * scale


class Jitted:
    """Either network under `jax.jit`, called with shapes padded to a few sizes so that it compiles seldom.

    Args:
      model: mlp or encoder.
      path: the parameters, an npz.
    """

    def __init__(self, model: str, path: str) -> None:
        with np.load(path) as arrays:
            self._params = {name: jax.device_put(array) for name, array in arrays.items()}
        self._run = jax.jit({"mlp": mlp, "encoder": encoder}[model])

    def mlp(self, x: np.ndarray) -> np.ndarray:
        """Logits of `x` `[rows, 784]`; rows are padded to the next power of two."""
        rows = x.shape[0]
        padded = np.zeros((_power_of_two(rows), 784), np.float32)
        padded[:rows] = x
        return np.asarray(self._run(self._params, padded)["output"])[:rows]

    def encoder(self, rows: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """States of rows of tokens; all are padded to the size in `LENGTHS` that holds the longest."""
        longest = max(len(row) for row in rows)
        tokens = np.zeros((_power_of_two(len(rows)), next(size for size in LENGTHS if size >= longest)), np.int32)
        n = np.zeros(len(tokens), np.int32)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
            n[number] = len(row)
        return np.asarray(self._run(self._params, tokens, n)["output"])[: len(rows)]

    def warm(self, model: str, largest: int) -> None:
        """Compiles every shape up to `largest` rows, as one does who has met his first slow request."""
        rows = 1
        while rows <= largest:
            if model == "mlp":
                self.mlp(np.zeros((rows, 784), np.float32))
            else:
                for length in LENGTHS:
                    self.encoder([np.zeros(length, np.int32)] * rows)
            rows *= 2


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
