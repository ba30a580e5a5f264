"""What weights of fewer bits cost: how often the likeliest token stays the same, and how far the distribution moves.

python -m measure.quality CHECKPOINT TOKENS
"""

from __future__ import annotations

import json
import sys
from pydoc_data.topics import topics
from typing import Any

import jax
import numpy as np
from flax import nnx

from measure import smollm2
from servax.zoo.gguf_tokenizer import tokenizer_of_gguf
from servax.zoo.smollm2 import package_file

WINDOW = 250
TEXT = "compound"
"""A chapter of Python's language reference, which every Python carries."""


def compared(exact: np.ndarray, other: np.ndarray, follows: np.ndarray) -> dict[str, float]:
    """Agreement, divergence of `other` from `exact`, and each one's mean surprise at what follows, in nats.

    Args:
      exact: logits `[tokens, vocabulary]`.
      other: likewise.
      follows: the token that the text has after each.
    """
    own, theirs = _log_probabilities(exact), _log_probabilities(other)
    rows = np.arange(len(follows))
    return {
        "agreement": float(np.mean(own.argmax(-1) == theirs.argmax(-1))),
        "divergence": float(np.mean(np.sum(np.exp(own) * (own - theirs), axis=-1))),
        "surprise exact": float(-own[rows, follows].mean()),
        "surprise": float(-theirs[rows, follows].mean()),
    }


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def main() -> None:
    checkpoint, count = sys.argv[1], int(sys.argv[2])
    ids = tokenizer_of_gguf(package_file()).encode(topics[TEXT]).ids[: count + 1]
    networks: dict[str, Any] = {}
    for weights in ("float32", "bfloat16", "int8"):
        graph, state = smollm2.network(checkpoint, weights)
        networks[weights] = jax.jit(lambda state, tokens, graph=graph: nnx.merge(graph, state)(tokens)), state
    found: dict[str, list[dict[str, float]]] = {"bfloat16": [], "int8": []}
    for start in range(0, count, WINDOW):
        tokens = np.array(ids[start : start + WINDOW], np.int32)
        follows = np.array(ids[start + 1 : start + WINDOW + 1])
        logits = {name: np.asarray(run(state, tokens[None]))[0] for name, (run, state) in networks.items()}
        for weights, windows in found.items():
            windows.append(compared(logits["float32"], logits[weights], follows))
    means = {
        weights: {key: float(np.mean([window[key] for window in windows])) for key in windows[0]}
        for weights, windows in found.items()
    }
    print(json.dumps({"tokens": count, **means}))


if __name__ == "__main__":
    main()
