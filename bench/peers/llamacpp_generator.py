"""llama.cpp by its batch API: several sequences in one call of `llama_decode`, greedy. Argument: a GGUF file."""

from __future__ import annotations

import sys
import time

import llama_cpp as llama
import numpy as np
from generator import CORES, serve


class LlamaCpp:
    def __init__(self, path: str) -> None:
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.use_extra_bufts = False  # its repacked Q4_1 for AMX ends the process on some CPUs
        self.model = llama.llama_model_load_from_file(path.encode(), options)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.shape: tuple[int, int] | None = None
        self.context = None
        self.batch = llama.llama_batch_init(2048, 0, 1)

    def first(self, prompt: list[int]) -> float:
        self._open(1, len(prompt))
        began = time.perf_counter()
        self._decode(prompt, range(len(prompt)), [0] * len(prompt), wanted={len(prompt) - 1})
        self._likeliest(len(prompt) - 1)
        return time.perf_counter() - began

    def decode(self, prompt: list[int], batch: int, steps: int, seconds: float) -> tuple[int, float]:
        self._open(batch, len(prompt) + steps)
        self._decode(prompt, range(len(prompt)), [0] * len(prompt), wanted={len(prompt) - 1})
        last = self._likeliest(len(prompt) - 1)
        memory = llama.llama_get_memory(self.context)
        for row in range(1, batch):
            llama.llama_memory_seq_cp(memory, 0, row, -1, -1)
        tokens, done, began, rows = [last] * batch, 0, 0.0, range(batch)
        for step in range(steps):
            self._decode(tokens, [len(prompt) + step] * batch, rows, wanted=set(rows))
            tokens = [self._likeliest(row) for row in rows]
            now = time.perf_counter()
            if step == 0:
                began = now  # the copies of the prompt are made within the first step
                continue
            done += batch
            if now - began > seconds:
                break
        return done, time.perf_counter() - began

    def _open(self, rows: int, length: int) -> None:
        """A context for so many sequences of such a length; empty."""
        if self.shape != (rows, length):
            if self.context is not None:
                llama.llama_free(self.context)
            options = llama.llama_context_default_params()
            options.n_ctx = rows * (-(-length // 256) * 256)
            options.n_seq_max = rows
            options.n_batch, options.n_ubatch = 2048, 512
            options.n_threads = options.n_threads_batch = CORES
            options.no_perf = True
            self.context = llama.llama_init_from_model(self.model, options)
            self.shape = rows, length
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def _decode(self, tokens, positions, rows, *, wanted: set[int]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for number, (token, position, row) in enumerate(zip(tokens, positions, rows, strict=True)):
            batch.token[number], batch.pos[number] = token, position
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, row
            batch.logits[number] = number in wanted
        status = llama.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")

    def _likeliest(self, number: int) -> int:
        logits = llama.llama_get_logits_ith(self.context, number)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1]))
