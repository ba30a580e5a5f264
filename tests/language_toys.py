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
from servax.generation.servable import LanguageServable
from servax.model.language import LanguageModel
from servax.runtime.runner import ServedFunction
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
