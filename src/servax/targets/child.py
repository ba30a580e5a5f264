"""A child process that proves one JAX wrapper of a bundle: `python -m servax.targets.child JOB.json`.

It imports the model's source for the `jit` wrapper only; `aot` and `export` are proved with what the bundle holds.
`child_protocol.py` says what goes in and out.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from servax.core.device import Device
from servax.core.errors import ModelError, PlatformError
from servax.core.tensors import dtype_of
from servax.core.trees import flatten, path_of, unflatten
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.targets.bundle import PARAMETERS, Bundle
from servax.targets.child_protocol import Answer, Answering, Job, main
from servax.targets.samples import Sample
from servax.targets.target import FlatArrays, LoadedProgram


class JaxPart:
    """The `jit`, `aot` or `export` wrapper of a bundle, on the first device of the job's platform."""

    def __init__(self, job: Job) -> None:
        """Opens the bundle and puts its parameters on the device.

        Raises:
          PlatformError: JAX has no device of this platform here.
          BundleError: the bundle, or a file of its parameters, is damaged.
        """
        for name, value in job.settings.items():
            if getattr(jax.config, name, None) != value:
                jax.config.update(name, value)
        self._job = job
        self._device = _device(job.platform)
        self._bundle = Bundle.open(job.bundle)
        self._params = _restore(self._bundle, self._device)

    def load(self, function: str, bucket: Bucket) -> Answering:
        """The program of a bucket; `Part.load`."""
        program = self._program(function, bucket)
        record = self._bundle.manifest.functions[function]
        signature = record.signature()
        state = [each.spec() for each in self._bundle.manifest.state] if record.stateful else []
        names = sorted(spec.name for spec in state)

        def answering(sample: Sample) -> Sequence[Answer]:
            held = self._put([np.zeros(spec.concrete({}), spec.numpy_dtype) for spec in sorted(state, key=_name)])
            answers: list[Answer] = []
            for step in sample.steps:
                checked = check(signature, step.inputs)
                inputs = self._put(pad(signature, bucket, checked))
                held, outputs = program.program(self._params, held, inputs)
                # Copies: the next step donates this state.
                after = {name: np.array(array) for name, array in zip(names, jax.device_get(held), strict=True)}
                answers.append(Answer(cut(signature, checked.sizes, outputs), after))
            return answers

        return answering

    def device(self) -> str:
        """The kind of device; `Part.device`."""
        return f"{self._device.platform}:{self._device.id} {self._device.device_kind}"

    def versions(self) -> dict[str, str]:
        """Versions of Python, JAX and NumPy; `Part.versions`."""
        packages = ("jax", "jaxlib", "numpy")
        return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}

    def _program(self, function: str, bucket: Bucket) -> LoadedProgram:
        if self._job.target == "aot":
            from servax.targets import aot

            return aot.load(self._bundle, function, bucket, self._device)
        if self._job.target == "export":
            from servax.targets import exported

            return exported.load(self._bundle, function, bucket, self._device)
        return self._traced(function, bucket)

    def _traced(self, function: str, bucket: Bucket) -> LoadedProgram:
        from servax.model.reference import load_model
        from servax.targets import jit

        if self._job.model is None:
            raise ModelError(
                "the jit wrapper cannot be proved: a child process cannot import the model",
                expected="a model in a file or package, MODEL.py:NAME",
                remedy="move the model out of the notebook or script into a file of its own",
            )
        structure = unflatten(
            {
                path_of(each.path): jax.ShapeDtypeStruct(each.shape, dtype_of(each.dtype))
                for each in self._bundle.manifest.parameters
            }
        )
        model = load_model(self._job.model).bind(structure)
        return jit.load(model.functions[function], bucket, structure, self._device)

    def _put(self, arrays: Sequence[np.ndarray[Any, Any]]) -> FlatArrays:
        return tuple(jax.device_put(array, self._device) for array in arrays)


def _name(spec: Any) -> str:
    return spec.name


def _device(name: str) -> Device:
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        raise PlatformError(
            f"JAX has no {name} device on this machine",
            seen=str(error).splitlines()[0],
            expected=name,
        ) from error


def _restore(bundle: Bundle, device: Device) -> FlatArrays:
    from servax.checkpoint.restoring import restore

    bundle.check(PARAMETERS)
    like = unflatten(
        {
            path_of(each.path): jax.ShapeDtypeStruct(each.shape, dtype_of(each.dtype))
            for each in bundle.manifest.parameters
        }
    )
    return tuple(flatten(restore(bundle.path(PARAMETERS), like=like, placement=device).params).values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], JaxPart))
