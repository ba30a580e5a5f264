"""The compiled functions of a language model as the engine calls them, without waiting for what comes out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from servax.core.tensors import Signature
from servax.generation.params import SamplingParams
from servax.generation.sequence import Sequence as Row
from servax.model.language import BEGIN, COPY, DECODE, EXCHANGE, MOST_BIASES, PREFILL, LanguageSpec
from servax.model.sampling import STOPS
from servax.stages.buckets import Bucket, BucketGrid

Array = np.ndarray[Any, Any]

STATIC = Bucket(())


class Dispatcher(Protocol):
    """Calls a program on the device's thread and returns before it has run."""

    def dispatch(self, function: str, bucket: Bucket, buffers: Sequence[Array]) -> Sequence[Any]:
        """Outputs in order of name, on the device; the state goes from call to call.

        The buffers are the program's until its outputs are read.

        Raises:
          ExecutionError: the call failed, and the state is lost and starts again at zeros.
        """
        ...

    def fetch(self, outputs: Sequence[Any]) -> Sequence[Array]:
        """Waits for outputs that `dispatch` gave, and gives them on the host.

        Raises:
          ExecutionError: the program failed, and the state is lost and starts again at zeros.
        """
        ...


@dataclass(frozen=True, slots=True)
class Burst:
    """A call of `decode` whose outputs are not read yet.

    Attributes:
      rows: the sequences it was for, by slot.
      steps: most tokens that each got.
      batch: of the bucket.
      outputs: on the device, by name.
      began: when it was called, on `time.perf_counter`'s clock.
      undisturbed: whether nothing else was called since the burst before.
    """

    rows: Mapping[int, Row]
    steps: int
    batch: int
    outputs: Mapping[str, Any]
    began: float
    undisturbed: bool


class Programs:
    """The functions of one language model.

    Attributes:
      chunks: sizes of `prefill`, ascending.
      batches: sizes of `decode`, ascending.
    """

    def __init__(
        self, dispatcher: Dispatcher, spec: LanguageSpec, signatures: Mapping[str, Signature], grid: BucketGrid
    ) -> None:
        self._dispatcher = dispatcher
        self._spec = spec
        self._inputs = {name: sorted(spec.name for spec in each.inputs) for name, each in signatures.items()}
        self._outputs = {name: sorted(spec.name for spec in each.outputs) for name, each in signatures.items()}
        self.chunks = sorted(bucket["chunk"] for bucket in grid[PREFILL])
        self.batches = sorted(bucket["batch"] for bucket in grid[DECODE])
        self._words = -(-spec.vocabulary // 32)
        self._nothing = {size: np.zeros((size, self._words), np.uint32) for size in self.batches}

    @property
    def length(self) -> int:
        """Positions that the cache has at least."""
        return self._spec.context + self.chunks[0]

    def copy(self, source: int, target: int, n: int) -> None:
        """Copies a slot's row, of `n` tokens."""
        self._call(COPY, STATIC, source=np.int32(source), target=np.int32(target), n=np.int32(n))

    def exchange(self, one: int, other: int) -> None:
        """Has two slots change places."""
        self._call(EXCHANGE, STATIC, one=np.int32(one), other=np.int32(other))

    def batch(self, rows: int) -> int:
        """The size of `decode` for so many rows."""
        return next(size for size in self.batches if size >= rows)

    def prefill(self, tokens: Sequence[int], slot: int, start: int) -> Mapping[str, Any]:
        """Writes a chunk of a prompt, as many tokens as a chunk has, or fewer; gives what `wait` takes."""
        size = next(size for size in self.chunks if size >= len(tokens))
        buffer = np.zeros(size, np.int32)
        buffer[: len(tokens)] = tokens
        return self._call(PREFILL, Bucket.of(chunk=size), tokens=buffer, slot=np.int32(slot), start=np.int32(start))

    def wait(self, outputs: Mapping[str, Any]) -> None:
        """Waits until a call has run."""
        self._dispatcher.fetch(list(outputs.values()))

    def chunk(self, left: int, start: int) -> int:
        """How many of `left` tokens the next chunk at `start` takes; only the smallest is more than half padding."""
        fitting = [size for size in self.chunks if start + size <= self.length]
        above = next((size for size in fitting if size >= left), None)
        if above is not None and (left > above // 2 or above == fitting[0]):
            return left  # little of the chunk is padding
        return max((size for size in fitting if size <= left), default=min(left, fitting[-1]))

    def begin(self, row: Row, slot: int) -> Mapping[str, Any]:
        """Starts the answer of a sequence whose prompt, but for its last token, is in the slot; as `prefill`."""
        prompt = np.full(self._spec.context, -1, np.int32)
        prompt[: len(row.prompt)] = row.prompt
        ids = np.full(MOST_BIASES, -1, np.int32)
        values = np.zeros(MOST_BIASES, np.float32)
        bias = row.params.logit_bias
        ids[: len(bias)] = list(bias)
        values[: len(bias)] = np.maximum(list(bias.values()) or np.zeros(0), -1e30)
        return self._call(
            BEGIN,
            STATIC,
            slot=np.int32(slot),
            token=np.int32(row.prompt[-1]),
            position=np.int32(len(row.prompt) - 1),
            prompt=prompt,
            bias_ids=ids,
            bias_values=values,
        )

    def decode(
        self,
        rows: Mapping[int, Row],
        steps: int,
        masks: Mapping[int, Array] | None = None,
        *,
        undisturbed: bool = False,
    ) -> Burst:
        """Draws up to `steps` tokens for each of these rows, under its mask if it has one."""
        began = time.perf_counter()
        batch = self.batch(max(rows) + 1)
        inputs: dict[str, Array] = {
            "live": np.zeros(batch, bool),
            "limit": np.zeros(batch, np.int32),
            "stops": np.full((batch, STOPS), -1, np.int32),
            "forced": np.full((batch, self._spec.burst), -1, np.int32),
            "mask": self._nothing[batch] if masks is None else np.zeros((batch, self._words), np.uint32),
            "temperature": np.zeros(batch, np.float32),
            "top_k": np.zeros(batch, np.int32),
            "top_p": np.ones(batch, np.float32),
            "min_p": np.zeros(batch, np.float32),
            "presence": np.zeros(batch, np.float32),
            "frequency": np.zeros(batch, np.float32),
            "repetition": np.ones(batch, np.float32),
            "seeds": np.zeros(batch, np.uint32),
            "minimum": np.zeros(batch, np.int32),
            "biased": np.zeros(batch, bool),
            "constrained": np.zeros(batch, bool),
            "ranked": np.zeros(batch, bool),
        }
        for slot, row in rows.items():
            params = row.params
            inputs["live"][slot] = True
            inputs["limit"][slot] = row.limit(self._spec.context)
            ends = params.ends(self._spec)
            inputs["stops"][slot, : len(ends)] = ends
            inputs["temperature"][slot] = params.temperature
            inputs["top_k"][slot] = params.top_k
            inputs["top_p"][slot] = params.top_p
            inputs["min_p"][slot] = params.min_p
            inputs["presence"][slot] = params.presence_penalty
            inputs["frequency"][slot] = params.frequency_penalty
            inputs["repetition"][slot] = params.repetition_penalty
            inputs["seeds"][slot] = row.seed
            inputs["minimum"][slot] = len(row.prompt) + params.min_tokens
            inputs["biased"][slot] = bool(params.logit_bias)
            inputs["ranked"][slot] = bool(params.logprobs)
        for slot, mask in (masks or {}).items():
            inputs["constrained"][slot] = True
            inputs["mask"][slot] = mask
        outputs = self._call(DECODE, Bucket.of(batch=batch), steps=np.int32(steps), **inputs)
        return Burst(dict(rows), steps, batch, outputs, began, undisturbed)

    def read(self, burst: Burst) -> dict[str, Array]:
        """Waits for a burst's outputs, by name."""
        return dict(zip(burst.outputs, self._dispatcher.fetch(list(burst.outputs.values())), strict=True))

    def warm(self, runs: int) -> dict[int, float]:
        """Runs whole bursts of every size, likeliest tokens and drawn ones; gives the seconds of a step, by size."""
        seconds: dict[int, float] = {}
        for batch in self.batches:
            for temperature in (1.0, 0.0):
                params = SamplingParams(temperature=temperature, ignore_eos=True, logprobs=1 if temperature else None)
                rows = {slot: Row((0,), params, lambda delta: None) for slot in range(batch)}
                for _ in range(runs):
                    for slot, row in rows.items():
                        self.begin(row, slot)
                    self.wait(self.begin(rows[0], 0))
                    began = time.perf_counter()
                    host = self.read(self.decode(rows, self._spec.burst))
                    ran = max(1, int((host["tokens"] >= 0).sum(axis=1).max()))
                    seconds[batch] = (time.perf_counter() - began) / ran
        return seconds

    def probe(self) -> None:
        """One step of generation in an empty cache, to see whether the device still works; raises if it does not."""
        row = Row((0,), SamplingParams(max_tokens=1, temperature=0), lambda delta: None)
        self.begin(row, 0)
        self.read(self.decode({0: row}, 1))

    def _call(self, function: str, bucket: Bucket, **inputs: Any) -> dict[str, Any]:
        buffers = [np.asarray(inputs[name]) for name in self._inputs[function]]
        return dict(zip(self._outputs[function], self._dispatcher.dispatch(function, bucket, buffers), strict=True))
