"""A JAX wrapper of a bundle as a child of parity sees it: on one device, its parameters there."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np

from servax.checkpoint.restoring import restore
from servax.core.device import Device
from servax.core.errors import PlatformError, first_line
from servax.core.trees import flatten
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.targets.bundle import PARAMETERS, Bundle
from servax.targets.child_protocol import Answer, Answering, Job
from servax.targets.samples import Sample
from servax.targets.target import FlatArrays, LoadedProgram

Load = Callable[[Bundle, str, Bucket, Device], LoadedProgram]
"""The program of a function at a bucket, for a device."""


class JaxPart:
    """The `jit`, `aot` or `export` wrapper of a bundle, on the first device of the job's platform."""

    def __init__(self, job: Job, load: Load) -> None:
        """Opens the bundle and puts its parameters on the device; `load` gives its programs.

        Raises:
          PlatformError: JAX has no device of this platform here.
          BundleError: the bundle, or a file of its parameters, is damaged.
        """
        for name, value in job.settings.items():
            if getattr(jax.config, name, None) != value:
                jax.config.update(name, value)
        self._load = load
        self._device = _device(job.platform)
        self._bundle = Bundle.open(job.bundle)
        self._params = _restore(self._bundle, self._device)

    def load(self, function: str, bucket: Bucket) -> Answering:
        """The program of a bucket; `Part.load`."""
        program = self._load(self._bundle, function, bucket, self._device)
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
                after = {
                    name: step.state[name].like(np.asarray(array)) for name, array in zip(names, held, strict=True)
                }
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
            seen=first_line(error),
            expected=name,
        ) from error


def _restore(bundle: Bundle, device: Device) -> FlatArrays:
    bundle.check(PARAMETERS)
    restored = restore(bundle.path(PARAMETERS), like=bundle.manifest.abstract_params(), placement=device)
    return tuple(flatten(restored.params).values())
