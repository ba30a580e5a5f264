"""JAX as one writes it first: the whole sequence again for every token, one `jax.jit` a shape. Argument: a checkpoint.

The network is the same one, in float32, on sequences padded to a multiple of 128.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from generator import serve

from measure import smollm2


class Naive:
    def __init__(self, checkpoint: str) -> None:
        graph, self.state = smollm2.network(checkpoint, "float32")

        @jax.jit
        def likeliest(state, tokens, last):
            return jnp.argmax(nnx.merge(graph, state)(tokens)[:, last], axis=-1)

        self.likeliest = likeliest

    def first(self, prompt: list[int]) -> float:
        tokens = np.zeros((1, -(-len(prompt) // 128) * 128), np.int32)
        tokens[0, : len(prompt)] = prompt
        began = time.perf_counter()
        np.asarray(self.likeliest(self.state, tokens, len(prompt) - 1))
        return time.perf_counter() - began

    def decode(self, prompt: list[int], batch: int, steps: int, seconds: float) -> tuple[int, float]:
        tokens = np.zeros((batch, -(-(len(prompt) + steps) // 128) * 128), np.int32)
        tokens[:, : len(prompt)] = prompt
        done, began = 0, 0.0
        for step in range(steps):
            at = len(prompt) + step
            tokens[:, at] = np.asarray(self.likeliest(self.state, tokens, at - 1))
            now = time.perf_counter()
            if step == 0:
                began = now  # the first step compiles
                continue
            done += batch
            if now - began > seconds:
                break
        return done, time.perf_counter() - began


if __name__ == "__main__":
    serve(lambda: Naive(sys.argv[1]))
