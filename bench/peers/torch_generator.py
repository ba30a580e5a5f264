"""`transformers` on torch with its cache of keys and values, greedy. Arguments: a folder, and a dtype."""

from __future__ import annotations

import copy
import sys
import time

import torch
from generator import CORES, serve
from transformers import AutoModelForCausalLM, DynamicCache


class Torch:
    def __init__(self, folder: str, dtype: str) -> None:
        torch.set_num_threads(CORES)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def first(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        self._step(torch.tensor([prompt]), DynamicCache()).tolist()
        return time.perf_counter() - began

    @torch.inference_mode()
    def decode(self, prompt: list[int], batch: int, steps: int, seconds: float) -> tuple[int, float]:
        cache = DynamicCache()
        tokens = self._step(torch.tensor([prompt]), cache).repeat(batch)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(batch)
        done, began = 0, 0.0
        for step in range(steps):
            tokens = self._step(tokens[:, None], cache)
            tokens.tolist()
            now = time.perf_counter()
            if step == 0:
                began = now
                continue
            done += batch
            if now - began > seconds:
                break
        return done, time.perf_counter() - began

    def _step(self, tokens, cache):
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)


if __name__ == "__main__":
    serve(lambda: Torch(*sys.argv[1:]))
