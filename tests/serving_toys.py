"""Toy servables of real, compiled JAX programs, built by hand so that the serving rooms are tested without the others.

`predict`: `y = w * x + b` over `x: float32[batch, length]`. `total`: the sum of each row up to its true length.
`count`: stateful, adds `x: float32[4]` to what it has seen and gives the sum so far.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from servax.core.tensors import Signature, TensorSpec
from servax.model.processors import Text
from servax.runtime.local import LocalServable
from servax.runtime.runner import ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import LoadedProgram, ProgramTable

X = TensorSpec.parse("x", "float32[batch, length]")
PREDICT = Signature((X,), (TensorSpec.parse("y", "float32[batch, length]"),))
TOTAL = Signature(
    (TensorSpec.parse("n", "int32[batch]"), X), (TensorSpec.parse("sum", "float32[batch]"),), lengths={"n": "length"}
)
COUNT = Signature((TensorSpec.parse("x", "float32[4]"),), (TensorSpec.parse("seen", "float32[4]"),), batch=None)
STATE = (TensorSpec.parse("seen", "float32[4]"),)

FUNCTIONS = {"predict": ServedFunction(PREDICT), "total": ServedFunction(TOTAL), "count": ServedFunction(COUNT, True)}
GRID = BucketGrid(
    {
        "predict": tuple(Bucket.of(batch=b, length=n) for b in (1, 4) for n in (8, 16)),
        "total": tuple(Bucket.of(batch=b, length=16) for b in (1, 4)),
        "count": (Bucket(()),),
    }
)


def params(w: float = 2.0, b: float = 1.0) -> dict[tuple[str, ...], np.ndarray]:
    """Flat parameters, in the order of their paths."""
    return {("layer", "bias"): np.float32(b).reshape(()), ("layer", "scale"): np.float32(w).reshape(())}


def predict_flat(params, state, inputs):
    bias, scale = params
    return (), (inputs[0] * scale + bias,)


def total_flat(params, state, inputs):
    n, x = inputs
    inside = jnp.arange(x.shape[1])[None] < n[:, None]
    return (), (jnp.where(inside, x, 0).sum(1),)


def count_flat(params, state, inputs):
    seen = state[0] + inputs[0]
    return (seen,), (seen,)


FLAT = {"predict": predict_flat, "total": total_flat, "count": count_flat}


def compiled(flat, signature: Signature, bucket: Bucket, device, *, stateful: bool = False) -> LoadedProgram:
    """A program compiled for committed arguments, as the targets make them."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def aval(spec: TensorSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.concrete(bucket.mapping()), spec.numpy_dtype, sharding=sharding)

    scalar = jax.ShapeDtypeStruct((), np.float32, sharding=sharding)
    began = time.perf_counter()
    traced = jax.jit(flat, donate_argnums=1, keep_unused=True).trace(
        (scalar, scalar),
        tuple(map(aval, STATE)) if stateful else (),
        tuple(map(aval, sorted(signature.inputs, key=lambda spec: spec.name))),
    )
    lowered = traced.lower()
    program = lowered.compile()
    return LoadedProgram(
        program, "jit", {"compile": time.perf_counter() - began}, {"flops": 2.0}, {"argument": 8}, lowered.as_text
    )


_TABLES: dict[object, ProgramTable] = {}


def table(device=None) -> ProgramTable:
    """Every program of the toy; compiled once a process."""
    device = device or jax.devices()[0]
    if device not in _TABLES:
        _TABLES[device] = ProgramTable(
            {
                (name, bucket): compiled(
                    FLAT[name], FUNCTIONS[name].signature, bucket, device, stateful=FUNCTIONS[name].stateful
                )
                for name, bucket in GRID
            }
        )
    return _TABLES[device]


def swapper(checkpoint: str, /, **options: float) -> dict[tuple[str, ...], np.ndarray]:
    """Reads "W,B", so that a test says which parameters it wants."""
    w, b = map(float, checkpoint.split(","))
    return params(w, b)


class Toy(LocalServable):
    """A servable whose programs cost what is said here, so that no plan depends on the machine."""

    def warm(self) -> LocalServable:
        super().warm()
        self._costs.set({key: 1e-6 * key[1].volume() for key in self.grid})
        return self


def toy(name: str = "toy", **changes) -> LocalServable:
    """The toy, not yet warm; `changes` replace constructor arguments."""
    device = jax.devices()[0]
    arguments = {
        "platform": "jax_jit",
        "functions": FUNCTIONS,
        "grid": GRID,
        "params": params(),
        "state": STATE,
        "device": device,
        "swapper": swapper,
    } | changes
    arguments.setdefault("table", None)
    if arguments["table"] is None:
        arguments["table"] = table(device)
    return Toy(name, **arguments)


class Held:
    """A program that waits on the device's thread until it is let go: a busy device, without sleeping."""

    def __init__(self, loaded: LoadedProgram) -> None:
        self.loaded = loaded
        self.holding = False
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(self, params, state, inputs):
        if self.holding:
            self.entered.set()
            assert self.release.wait(60)
        return self.loaded.program(params, state, inputs)


def with_program(key: tuple[str, Bucket], program) -> ProgramTable:
    """The toy's table with another program at `key`."""
    whole = table()
    old = whole[key]
    new = LoadedProgram(program, old.target, old.seconds, old.cost, old.memory, old.stablehlo)
    return ProgramTable({**{each: whole[each] for each in whole}, key: new})


def held_toy(**changes) -> tuple[LocalServable, Held]:
    """A warm toy whose `predict@batch=1,length=8` can be held."""
    key = ("predict", Bucket.of(batch=1, length=8))
    held = Held(table()[key])
    servable = toy(table=with_program(key, held), **changes).warm()
    held.holding = True
    return servable, held


def word_tokenizer(folder: Path, words: dict[str, int]) -> Path:
    """A word-level `tokenizer.json`, written by hand: each word is its own number."""
    path = folder / "tokenizer.json"
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model, **empty}
    path.write_text(json.dumps(whole))
    return path


def reading_toy(tokenizer: Path) -> LocalServable:
    """A warm servable whose one function, `total`, adds up the token ids of each text."""
    spec = TensorSpec("x", "int32", ("batch", "length"))
    outputs = (TensorSpec.parse("sum", "int32[batch]"),)
    signature = Signature((TOTAL.input("n"), spec), outputs, lengths={"n": "length"})
    bucket = Bucket.of(batch=4, length=16)
    return toy(
        functions={"total": ServedFunction(signature, processors={"x": Text(tokenizer, 16)})},
        grid=BucketGrid({"total": (bucket,)}),
        table=ProgramTable({("total", bucket): compiled(total_flat, signature, bucket, jax.devices()[0])}),
        state=(),
    ).warm()
