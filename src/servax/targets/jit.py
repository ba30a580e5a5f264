"""The `jit` wrapper: a function traced, lowered and compiled in this process, every bucket before ready.

Its part of a bundle is the reference to the model's source, which whoever serves or proves it names again.
"""

from __future__ import annotations

import functools
from typing import cast

import jax

from servax.core.device import Device
from servax.core.errors import ModelError
from servax.core.events import Notice, emit
from servax.core.trees import Tree
from servax.model.function import Function
from servax.model.language import LanguageModel
from servax.model.model import Model
from servax.model.reference import load_model
from servax.stages import cost, pipeline, stablehlo
from servax.stages.buckets import Bucket
from servax.stages.constants import check_constants
from servax.targets.bundle import Bundle, amend
from servax.targets.child_protocol import Job
from servax.targets.jaxpart import JaxPart
from servax.targets.manifest import TargetName
from servax.targets.target import LoadedProgram, Materials, corners

NAME: TargetName = "jit"
FROM_EXPORTS: bool = False
PORTABLE: bool = False


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
        target=NAME,
        seconds=stages.seconds,
        cost=cost.cost(compiled),
        memory=cost.memory(compiled),
        stablehlo=lambda: stablehlo.text(lowered),
    )


def check(_materials: Materials) -> None:
    """Nothing to refuse: `Target.check`."""


def make(bundle: Bundle, _materials: Materials) -> Bundle:
    """The bundle that says it can be served from the model's source; `Target.make`."""
    if bundle.manifest.provenance.source is None:
        emit(
            Notice(
                "no jit part is written: the model is defined in a notebook or script, which a server cannot import; "
                "move it into a file to get one",
                "warning",
            )
        )
        return bundle
    return amend(bundle, {}, lambda manifest: manifest.with_target(NAME))


def buckets(bundle: Bundle, *, full: bool) -> dict[str, tuple[Bucket, ...]]:
    """The corners, since each is compiled; `Target.buckets`."""
    return corners(bundle, full=full)


def open_part(job: Job) -> JaxPart:
    """The model's source, imported by the job's reference; `Target.open_part`."""
    return JaxPart(job, functools.partial(_load_source, job.model))


def obstacles(bundle: Bundle, _device: Device) -> tuple[str, ...]:
    """A source that is not known; `Target.obstacles`."""
    if bundle.manifest.provenance.source is None:
        return ("the model was defined in a notebook or script; put it into a file and build again",)
    if NAME not in bundle.manifest.targets:
        return ("the bundle has no jit part; build with -t jit from a model in a file",)
    return ()


def _load_source(reference: str | None, bundle: Bundle, function: str, bucket: Bucket, device: Device) -> LoadedProgram:
    if reference is None:
        raise ModelError(
            "the jit wrapper cannot be proved: a child process cannot import the model",
            expected="a model in a file or package, MODEL.py:NAME",
            remedy="move the model out of the notebook or script into a file of its own",
        )
    structure = bundle.manifest.abstract_params()
    model = with_weights(load_model(reference), bundle).bind(structure)
    return load(model.functions[function], bucket, structure, device)


def with_weights(model: Model, bundle: Bundle) -> Model:
    """The model with the kind of weights that the bundle was built with."""
    record = bundle.manifest.language
    if record is None or record.weights is None or not isinstance(model, LanguageModel):
        return model
    return model.with_weights(record.weights)
