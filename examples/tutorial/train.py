"""Trains the tutorial's GPT on `text.txt`: `python train.py --steps 1000 --output runs/gpt`.

Nothing here knows of servax: this is the notebook's side of the way to production.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from net import CONFIG, network

from servax.zoo.gpt import encode

TEXT = Path(__file__).parent / "text.txt"
BATCH = 16
EMA_DECAY = 0.99


def windows(ids: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Batches of random windows, int32 `[BATCH, context + 1]`: each position's target is the one after it."""
    generator = np.random.default_rng(seed)
    offsets = np.arange(CONFIG.context + 1)
    while True:
        starts = generator.integers(0, len(ids) - CONFIG.context, BATCH)
        yield ids[starts[:, None] + offsets]


def train(output: str | Path, *, steps: int, saves: int = 4, seed: int = 0) -> dict[int, dict[str, float]]:
    """Trains for `steps` steps and saves `saves` times on the way, the last step included.

    Each save holds the parameters (`model`), their moving average (`ema`) and AdamW's state (`optimizer`), with
    the loss on the text's last tenth, which is not trained on, as its metric.

    Args:
      output: folder of the `CheckpointManager`.
      steps: number of batches to train on.
      saves: number of checkpoints, evenly spaced.
      seed: of the batches.

    Returns:
      By step that was saved: `train_loss` and `loss`, in nats a byte.
    """
    ids = encode(TEXT.read_text())
    cut = len(ids) * 9 // 10
    held_out = ids[cut:][: (len(ids) - cut - 1) // CONFIG.context * CONFIG.context + 1]
    inputs, targets = (part.reshape(-1, CONFIG.context) for part in (held_out[:-1], held_out[1:]))

    graph, params = nnx.split(network())
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(50, steps // 4), steps), weight_decay=0.1)

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def update(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["model"], batch[:, :-1], batch[:, 1:])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["model"])
        params = optax.apply_updates(state["model"], updates)
        ema = optax.incremental_update(params, state["ema"], 1 - EMA_DECAY)
        return {"model": params, "ema": ema, "optimizer": moments}, value

    evaluate = jax.jit(loss)
    state = {"model": params, "ema": params, "optimizer": optimizer.init(params)}
    history: dict[int, dict[str, float]] = {}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(Path(output).absolute(), options=options) as manager:
        for step, batch in zip(range(1, steps + 1), windows(ids[:cut], seed), strict=False):
            state, value = update(state, jnp.asarray(batch))
            if step % max(1, steps // saves) == 0 or step == steps:
                held_out_loss = float(evaluate(state["model"], inputs, targets))
                history[step] = {"train_loss": float(value), "loss": held_out_loss}
                manager.save(step, args=ocp.args.StandardSave(state), metrics={"loss": held_out_loss})
                print(f"step {step:5d}  loss {value:.3f}  on held-out text {held_out_loss:.3f}", flush=True)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tutorial's GPT.")
    parser.add_argument("--steps", type=int, default=1000, help="number of batches (1000)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpt"), help="folder of the checkpoints (runs/gpt)")
    arguments = parser.parse_args()
    start = time.perf_counter()
    train(arguments.output, steps=arguments.steps)
    print(f"{time.perf_counter() - start:.0f} s; checkpoints in {arguments.output}")


if __name__ == "__main__":
    main()
