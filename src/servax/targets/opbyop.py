"""The source function run op by op: no fusion, no rewriting by a compiler, highest matmul precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from servax.core.tensors import TensorSpec
from servax.core.trees import Tree, flatten
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.targets.samples import STATE, Expected, kept

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
State = dict[str, Expected]


class Source:
    """A function with its parameters, run on the device that holds them.

    Control flow runs in Python: a `scan` of n steps costs n times its body.

    Attributes:
      function: with its outputs inferred.
    """

    def __init__(self, function: Function, params: Tree) -> None:
        self.function = function
        self._params = params
        leaves = [leaf for leaf in flatten(params).values() if isinstance(leaf, jax.Array)]
        self._device = next(iter(leaves[0].devices())) if leaves else None

    def run(self, tensors: Mapping[str, Array], bucket: Bucket | None) -> Arrays:
        """Outputs, cut to the tensors' own sizes, of a run padded up to `bucket`, from the initial state.

        Without a bucket it runs at the tensors' own sizes, unpadded.
        """
        return self._run(tensors, bucket, self._initial_state())[0]

    def chain(self, steps: Sequence[Mapping[str, Array]], bucket: Bucket | None) -> list[tuple[Arrays, State]]:
        """Outputs as of `run` and what is kept of the new state, one step after another, from the initial state."""
        state = self._initial_state()
        results: list[tuple[Arrays, State]] = []
        for tensors in steps:
            outputs, state = self._run(tensors, bucket, state)
            results.append((outputs, kept({name: np.asarray(array) for name, array in state.items()})))
        return results

    def _initial_state(self) -> dict[str, Any]:
        """Zeros for every tensor of the state, on the device; empty for a stateless function."""
        return {
            spec.name: jax.device_put(np.zeros(spec.concrete({}), spec.numpy_dtype), self._device)
            for spec in self.function.state or ()
        }

    def _run(
        self, tensors: Mapping[str, Array], bucket: Bucket | None, before: Mapping[str, Any]
    ) -> tuple[Arrays, dict[str, Any]]:
        signature = self.function.signature
        checked = check(signature, tensors)
        bucket = Bucket.of(**checked.sizes) if bucket is None else bucket
        names = sorted(spec.name for spec in signature.inputs)
        padded = dict(zip(names, pad(signature, bucket, checked), strict=True))
        with jax.disable_jit(), jax.default_matmul_precision("highest"):
            inputs = {name: jax.device_put(array, self._device) for name, array in padded.items()}
            after, outputs = self.function.call(
                self._params, before if self.function.state is not None else None, inputs
            )
        flat = [np.asarray(outputs[spec.name]) for spec in sorted(signature.outputs, key=lambda spec: spec.name)]
        return cut(signature, checked.sizes, flat), dict(after or {})

    def jaxpr(self, bucket: Bucket) -> tuple[Any, dict[str, int], list[str]]:
        """The closed jaxpr at a bucket, the position of each input among its arguments, and its results' names.

        Traced at the precision that programs are traced at, not at the highest.
        """
        sizes = bucket.mapping()

        def shaped(specs: Sequence[TensorSpec]) -> dict[str, Any]:
            return {spec.name: jax.ShapeDtypeStruct(spec.concrete(sizes), spec.numpy_dtype) for spec in specs}

        state = None if self.function.state is None else shaped(self.function.state)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(self._params))
        inputs = shaped(self.function.signature.inputs)
        traced = jax.make_jaxpr(self.function.call, return_shape=True)
        jaxpr, (after, outputs) = traced(params, state, inputs)
        first = len(jax.tree.leaves(params)) + len(state or ())
        positions = {name: first + number for number, name in enumerate(sorted(inputs))}
        return jaxpr, positions, [*(STATE + name for name in sorted(after or {})), *sorted(outputs)]
