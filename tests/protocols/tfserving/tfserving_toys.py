"""A model for TensorFlow Serving's clients: its own documentation's, and what that one lacks.

`predict`: half of x plus three, `float32[batch]`. `split`: two outputs of two inputs, one optional. `whole`: the sum
over everything, without axes. `echo_DTYPE`: each row twice, `[batch, 2]`. `divide`: 1 / x. `complex`: x as a complex.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import serving_toys as toys
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.dataplane import DataPlane
from servax.runtime.catalog import Catalog, ServedModel
from servax.runtime.local import LocalServable
from servax.runtime.runner import ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import ProgramTable

ECHOED = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32")


def signature(inputs: dict[str, str], outputs: dict[str, str], **rest) -> Signature:
    return Signature(
        tuple(TensorSpec.parse(name, text) for name, text in sorted(inputs.items())),
        tuple(TensorSpec.parse(name, text) for name, text in sorted(outputs.items())),
        **rest,
    )


def half_plus_three(params, state, inputs):
    plus, times = params
    return (), (inputs[0] * times + plus,)


def split(params, state, inputs):
    scale, x = inputs
    return (), (x * scale[:, None], x.sum(1) * scale)


def whole(params, state, inputs):
    return (), (inputs[0].sum(),)


def echo(params, state, inputs):
    return (), (jnp.stack([inputs[0], inputs[0]], 1),)


def divide(params, state, inputs):
    return (), (1 / inputs[0],)


def as_complex(params, state, inputs):
    return (), (jax.lax.complex(inputs[0], inputs[0]),)


X = {"x": "float32[batch]"}
MADE = {
    "predict": (half_plus_three, signature(X, {"y": "float32[batch]"})),
    "split": (
        split,
        signature(
            {"x": "float32[batch, 2]", "scale": "float32[batch] = 1.0"},
            {"total": "float32[batch]", "scaled": "float32[batch, 2]"},
        ),
    ),
    "whole": (whole, signature({"x": "float32[3]"}, {"sum": "float32[]"}, batch=None)),
    "divide": (divide, signature(X, {"y": "float32[batch]"})),
    "complex": (as_complex, signature(X, {"y": "complex64[batch]"})),
    **{f"echo_{dtype}": (echo, signature({"x": f"{dtype}[batch]"}, {"y": f"{dtype}[batch, 2]"})) for dtype in ECHOED},
}


@functools.cache
def _programs() -> ProgramTable:
    device = jax.devices()[0]
    return ProgramTable(
        {
            (name, bucket): toys.compiled(flat, made, bucket, device)
            for name, (flat, made) in MADE.items()
            for bucket in _grid()[name]
        }
    )


def _grid() -> BucketGrid:
    free = Bucket.of(batch=4)
    return BucketGrid({name: (Bucket(()) if made.batch is None else free,) for name, (_, made) in MADE.items()})


def servable(
    version: str = "1", *, times: float = 0.5, plus: float = 3.0, name: str = "half_plus_three"
) -> LocalServable:
    """A warm one; its parameters tell versions apart."""
    return toys.toy(
        name,
        functions={each: ServedFunction(made) for each, (_, made) in MADE.items()},
        grid=_grid(),
        table=_programs(),
        params=toys.params(times, plus),
        state=(),
        version=version,
    ).warm()


def plane(*servables: LocalServable, labels: dict[str, str] | None = None) -> DataPlane:
    """A data plane with several versions of one model."""
    catalog = Catalog()
    catalog.put(ServedModel(servables[0].name, {each.version: each for each in servables}, labels=labels or {}))
    return DataPlane(catalog=catalog)
