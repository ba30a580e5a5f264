"""servax by its engine, in this process.

Arguments: a bundle and the wrapper to take; or a checkpoint, the weights, and maybe a context. Sequences are submitted
to the engine of a `LanguageServable`, which is warm: what is measured is what a server has before it has a protocol.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from generator import serve

import servax
from servax.generation.params import SamplingParams
from servax.generation.sequence import Delta, Sequence


class Engine:
    def __init__(self, servable) -> None:
        self.servable = servable  # the engine ends with it
        self.engine = servable.engine

    def first(self, prompt: list[int]) -> float:
        began, arrivals = self._run([prompt], 1)
        return arrivals[0][0][0] - began

    def decode(self, prompt: list[int], batch: int, steps: int, seconds: float) -> tuple[int, float]:
        self._run([prompt] * batch, 1)  # every slot has the prompt now
        _, arrivals = self._run([prompt] * batch, steps)
        began = max(row[0][0] for row in arrivals)
        ended = min(row[-1][0] for row in arrivals)
        tokens = sum(count for row in arrivals for when, count in row if began < when <= ended)
        return tokens, ended - began

    def _run(self, prompts: list[list[int]], steps: int) -> tuple[float, list[list[tuple[float, int]]]]:
        """When it began, and for each sequence when how many of its tokens came; bursts are read as a whole."""
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        over = threading.Semaphore(0)
        failed: list[Exception] = []

        def receiver(row: list[tuple[float, int]]):
            def receive(delta: Delta) -> None:
                if delta.error is not None:
                    failed.append(delta.error)
                if delta.tokens:
                    row.append((time.perf_counter(), len(delta.tokens)))
                if delta.finish is not None or delta.error is not None:
                    over.release()

            return receive

        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        began = time.perf_counter()
        for prompt, row in zip(prompts, arrivals, strict=True):
            self.engine.submit(Sequence(prompt, params, receiver(row)))
        for _ in prompts:
            over.acquire()
        if failed:
            raise failed[0]
        return began, arrivals


def load(source: str, how: str, window: str | None = None):
    """A bundle by one of its wrappers, or a checkpoint with some weights, compiled here; `window` is its context."""
    if how in ("aot", "export", "jit"):
        return servax.load(source, require=how)
    from servax.zoo import smollm2

    model = smollm2.model
    if window is not None:
        model = servax.LanguageModel(
            smollm2.network, name="smollm2", slots=16, context=int(window), chunks=(128,), batches=(16,)
        )
    return servax.load(model, checkpoint=source, weights=how, cache_dir=Path(source).parent / "jax_cache")


if __name__ == "__main__":
    serve(lambda: Engine(load(*sys.argv[1:])))
