"""Tiny language models with every program compiled, for the tests of the rooms that generate."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from servax.core import trees
from servax.core.errors import ExecutionError
from servax.generation.engine import Engine
from servax.generation.params import SamplingParams
from servax.generation.programs import Programs
from servax.generation.sequence import Delta, Finish, Sequence
from servax.generation.servable import LanguageServable
from servax.model.language import LanguageModel
from servax.runtime.guard import guarded
from servax.runtime.runner import Runner, ServedFunction
from servax.stages.buckets import Bucket
from servax.targets import jit
from servax.targets.target import ProgramTable
from servax.workflow.source import CheckpointChoice, Source, prepare
from servax.zoo.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocabulary=320,
    width=32,
    layers=2,
    heads=4,
    key_value_heads=2,
    head_size=8,
    feed_forward=64,
    context=256,
    tied=True,
    cache_dtype="float32",
)
"""All of it float32: rows come out the same whatever they are batched with, up to rounding."""


@dataclass(frozen=True, slots=True)
class Toy:
    """A model, its live network, and the programs of all its buckets."""

    net: Any
    model: LanguageModel
    source: Source
    table: ProgramTable

    def over(self, net: Any) -> Toy:
        """The same programs over another network's parameters."""
        source = prepare(self.model, CheckpointChoice(), params=net, device=jax.devices()[0], grid=self.source.grid)
        return Toy(net, self.model, source, self.table)

    def servable(self, **options: Any) -> LanguageServable:
        """A new servable of it, warm; `options` as `LanguageServable` takes them."""
        states = [function.state for function in self.source.functions.values() if function.state is not None]
        return LanguageServable(
            options.pop("name", self.model.name),
            spec=self.model.spec,
            platform="jax_jit",
            functions={
                name: ServedFunction(function.signature, function.state is not None)
                for name, function in self.source.functions.items()
            },
            grid=self.source.grid,
            table=self.table,
            params=trees.flatten(self.source.params),
            state=states[0],
            device=jax.devices()[0],
            **options,
        ).warm()


def compiled(net: Any, **sizes: Any) -> Toy:
    """A network as a language model, compiled."""
    device = jax.devices()[0]
    defaults = {"slots": 4, "context": 96, "chunks": (8, 32), "batches": (1, 2, 4), "burst": 4, "end": (0,)}
    model = LanguageModel(net, name="toy", **defaults | sizes)
    source = prepare(model, CheckpointChoice(), params=net, device=device)
    programs = {key: jit.load(source.functions[key[0]], key[1], source.params, device) for key in source.grid}
    return Toy(net, source.model, source, ProgramTable(programs))


def network(seed: int = 0) -> Llama:
    """A network whose weights are large enough that its answers vary."""
    net = Llama(CONFIG, rngs=nnx.Rngs(seed))
    net.embedding.weight[...] = net.embedding.weight[...] * 20
    return net


@functools.cache
def llama() -> Toy:
    """The Llama of `CONFIG`: 4 slots of 96 tokens, chunks of 8 and 32, bursts of up to 4; token 0 ends an answer."""
    return compiled(network())


def prompt(seed: int, length: int) -> list[int]:
    """Random ids without the one that ends an answer."""
    return np.random.default_rng(seed).integers(1, CONFIG.vocabulary, length).tolist()


@functools.cache
def _plain(net: Any) -> Any:
    return nnx.jit(lambda net, tokens: net(tokens))


def logits(net: Any, ids: list[int], length: int = 128) -> np.ndarray:
    """Of the token after `ids`, by the network's plain call over all of them; float32 `[vocabulary]`."""
    padded = jnp.asarray([ids + [0] * (length - len(ids))], jnp.int32)
    return np.asarray(_plain(net)(net, padded)[0, len(ids) - 1], np.float32)


def greedy(net: Any, ids: list[int], count: int, length: int = 128) -> tuple[list[int], list[float]]:
    """The likeliest continuation with the margin of each token, each step by the network's plain call."""
    found, margins = list[int](), list[float]()
    for _ in range(count):
        scores = logits(net, ids + found, length)
        second, first = np.sort(scores)[-2:]
        found.append(int(np.argmax(scores)))
        margins.append(float(first - second))
    return found, margins


def agrees(tokens: list[int], expected: list[int], margins: list[float], close: float = 0.01) -> bool:
    """Whether tokens are those expected, up to the first step that rounding may decide."""
    for token, right, margin in zip(tokens, expected, margins, strict=True):
        if margin < close:
            return True
        if token != right:
            return False
    return True


class Loop:
    """An engine that is stepped by hand, and what it called.

    Attributes:
      calls: functions in the order in which they were called, `decode@batch=2`.
      fails: a function's name, whose next call fails.
    """

    def __init__(self, toy: Toy, **options: Any) -> None:
        signatures = {name: function.signature for name, function in toy.source.functions.items()}
        states = [function.state for function in toy.source.functions.values() if function.state is not None]
        self.runner = Runner(
            toy.table,
            {name: ServedFunction(signature, True) for name, signature in signatures.items()},
            trees.flatten(toy.source.params),
            states[0],
            jax.devices()[0],
        )
        self.calls: list[str] = []
        self.fails: str | None = None
        self.steps = 0
        programs = Programs(self, toy.model.spec, signatures, toy.source.grid)
        self.engine = Engine("toy", "1", toy.model.spec, programs, lambda: None, **options)
        self.engine.expect(dict.fromkeys(programs.batches, 1e-9), 1e-9, 1.0)  # whole bursts, and copies for nothing

    def dispatch(self, function: str, bucket: Bucket, buffers: Any) -> Any:
        self.calls.append(f"{function}@{bucket.label}")
        if self.fails == function:
            self.fails = None
            self.runner.reset_state()
            raise ExecutionError("it was to fail")
        return self.runner.dispatch(function, bucket, buffers)

    def fetch(self, outputs: Any) -> Any:
        return self.runner.fetch(outputs)

    def ask(self, prompt: list[int], *, constraint: Any = None, **options: Any) -> Asked:
        """A request, not stepped yet; `options` are fields of `SamplingParams`, or of `Sequence`."""
        own = {name: options.pop(name) for name in ("priority", "deadline", "loop") if name in options}
        deltas: list[Delta] = []
        params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | options)
        sequence = Sequence(tuple(prompt), params, deltas.append, constraint=constraint, **own)
        self.engine.submit(sequence)
        return Asked(sequence, deltas)

    def step(self) -> None:
        """One step, under the guard of the device's thread."""
        self.steps += 1
        with guarded():
            self.engine.step()

    def run(self, most: int = 2000) -> None:
        """Steps until there is nothing to do, which takes no more than `most` steps."""
        for _ in range(most):
            if not self.engine.busy:
                return
            self.step()
        raise AssertionError(f"busy after {most} steps")

    def answer(self, prompt: list[int], **options: Any) -> list[int]:
        """The tokens of a request that has the engine to itself."""
        asked = self.ask(prompt, **options)
        self.run()
        return asked.ids

    @property
    def idle(self) -> bool:
        """Whether no sequence has a row or waits for one."""
        status = self.engine.status
        return not self.engine.busy and status.running == 0 and status.waiting == 0 and status.silent == 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what it was told."""

    sequence: Sequence
    deltas: list[Delta]

    @property
    def ids(self) -> list[int]:
        """Tokens that it was told."""
        return [token.id for delta in self.deltas for token in delta.tokens]

    @property
    def finish(self) -> Finish | None:
        """Why it ended, as it was told."""
        return self.deltas[-1].finish if self.deltas else None

    @property
    def error(self) -> Any:
        """The error it was told."""
        return self.deltas[-1].error if self.deltas else None
