"""The `jit` wrapper: a function traced, lowered and compiled in this process, every bucket before ready.

With `enable_cache` a second start finds its programs in the persistent compilation cache; it still traces and lowers.
"""

from __future__ import annotations

from typing import cast

import jax

from servax.core.device import Device
from servax.core.trees import Tree
from servax.model.function import Function
from servax.stages import cost, pipeline, stablehlo
from servax.stages.buckets import Bucket
from servax.stages.constants import check_constants
from servax.targets.compilation_cache import enable_cache
from servax.targets.target import LoadedProgram

__all__ = ["enable_cache", "load"]


def load(function: Function, bucket: Bucket, params: Tree, device: Device) -> LoadedProgram:
    """The program of a bucket, made from the function itself.

    Args:
      function: what to compile.
      bucket: the sizes of its dimensions.
      params: nested dictionary of arrays or `jax.ShapeDtypeStruct`; arrays are compared with what the function
        closes over.
      device: that it will run on.

    Raises:
      ModelError: the function does not trace, or closes over weights or large arrays.
      BuildError: it does not lower or compile for the device.
    """
    traced = pipeline.trace_function(function, bucket, params, device)
    check_constants(traced.traced, params, where=traced.where)
    stages = pipeline.compile(traced)
    # `compile` has filled in both stages; their types say that other callers may be earlier.
    lowered = cast("jax.stages.Lowered", stages.lowered)
    compiled = cast("jax.stages.Compiled", stages.compiled)
    return LoadedProgram(
        program=compiled,
        target="jit",
        seconds=stages.seconds,
        cost=cost.cost(compiled),
        memory=cost.memory(compiled),
        stablehlo=lambda: stablehlo.text(lowered),
    )
