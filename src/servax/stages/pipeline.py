"""A function at a bucket through JAX's three stages: trace, lower, compile; many of them at once.

Two calling forms of a function: nested, `f(params, inputs)` or `f(params, state, inputs)` over dictionaries, which is
what an export holds; and flat, `f(params, state, inputs)` over tuples, which is what a `Program` runs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax

from servax.core import events
from servax.core.device import Device
from servax.core.errors import BuildError, ModelError, ServaxError, first_line
from servax.core.monitoring import LOADING, thread_role
from servax.core.tensors import TensorSpec
from servax.core.trees import KeyPath, Tree, flatten, unflatten
from servax.model.function import Function
from servax.stages import cost, stablehlo
from servax.stages.buckets import Bucket
from servax.stages.settings import settings_here

T = TypeVar("T")
FlatArrays = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StageReport:
    """What is known of one function at one bucket.

    Attributes:
      seconds: by stage: `trace`, `lower`, `compile`.
      cost: `flops`, `transcendentals` and `bytes accessed` of a run, by XLA.
      memory: `argument`, `output`, `temp`, `code` and `alias` bytes, by XLA.
      operations: how often each StableHLO operation stands in the module.
      constant_bytes: of the arrays that stand in the module.
      donated: how many argument arrays it may overwrite; `alias` of `memory` says how many bytes it does.
    """

    function: str
    bucket: Bucket
    seconds: Mapping[str, float]
    cost: Mapping[str, float]
    memory: Mapping[str, int]
    operations: Mapping[str, int]
    constant_bytes: int
    donated: int


@dataclass(frozen=True, slots=True)
class Stages:
    """JAX's own stages of one function at one bucket, as far as it has come, and how long each took in seconds."""

    function: str
    bucket: Bucket
    traced: jax.stages.Traced
    lowered: jax.stages.Lowered | None = None
    compiled: jax.stages.Compiled | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def where(self) -> str:
        """`function@bucket`."""
        return f"{self.function}@{self.bucket.label}"

    def report(self) -> StageReport:
        """A look inside; what needs a stage that has not run is empty."""
        lowered, compiled = self.lowered, self.compiled
        return StageReport(
            function=self.function,
            bucket=self.bucket,
            seconds=self.seconds,
            cost={} if compiled is None else cost.cost(compiled),
            memory={} if compiled is None else cost.memory(compiled),
            operations={} if lowered is None else stablehlo.operations(lowered),
            constant_bytes=0 if lowered is None else stablehlo.constant_bytes(lowered),
            donated=sum(argument.donated for argument in jax.tree.leaves(self.traced.args_info)),
        )


def nested_callable(function: Function) -> Callable[..., Any]:
    """`f(params, inputs) -> outputs`, for a stateful function `f(params, state, inputs) -> (state, outputs)`.

    The callable bears the function's name, which JAX shows in its messages and writes into the module.
    """

    def stateless(params: Tree, inputs: Mapping[str, Any]) -> dict[str, Any]:
        _, outputs = function.call(params, None, inputs)
        return dict(outputs)

    def stateful(params: Tree, state: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        after, outputs = function.call(params, state, inputs)
        return _checked_state(function, after), dict(outputs)

    return _named(function.name, stateless if function.state is None else stateful)


def flat_callable(function: Function, paths: Sequence[KeyPath]) -> Callable[..., tuple[FlatArrays, FlatArrays]]:
    """`f(params, state, inputs) -> (state, outputs)` over tuples; without state, state is `()`.

    Args:
      function: to call.
      paths: of the parameters, in leaf order. State, inputs and outputs are in order of name.
    """
    states = sorted(spec.name for spec in function.state or ())
    names = sorted(spec.name for spec in function.signature.inputs)

    def call(params: FlatArrays, state: FlatArrays, inputs: FlatArrays) -> tuple[FlatArrays, FlatArrays]:
        tree = unflatten(dict(zip(paths, params, strict=True)))
        before = None if function.state is None else dict(zip(states, state, strict=True))
        after, outputs = function.call(tree, before, dict(zip(names, inputs, strict=True)))
        kept = {} if function.state is None else _checked_state(function, after)
        return tuple(kept[name] for name in states), tuple(outputs[name] for name in sorted(outputs))

    return _named(function.name, call)


def jitted(function: Function, paths: Sequence[KeyPath]) -> jax.stages.Wrapped:
    """`flat_callable` under `jax.jit`: state donated, and every argument kept whether the program reads it or not."""
    return jax.jit(flat_callable(function, paths), donate_argnums=1, keep_unused=True)


def nested_avals(function: Function, bucket: Bucket, params: Tree) -> tuple[Any, ...]:
    """Abstract arguments of `nested_callable`, bound to no device.

    Args:
      function: whose signature and state give the rest.
      bucket: the sizes of its dimensions.
      params: nested dictionary of arrays or `jax.ShapeDtypeStruct`.

    Raises:
      ModelError: the function has 64-bit tensors and JAX's 64-bit mode is off.
    """
    _check_wide(function)
    sizes = bucket.mapping()
    tree = unflatten({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flatten(params).items()})
    inputs = _avals(function.signature.inputs, sizes, None)
    return (tree, inputs) if function.state is None else (tree, _avals(function.state, {}, None), inputs)


def flat_avals(
    function: Function, bucket: Bucket, params: Tree, device: Device
) -> tuple[FlatArrays, FlatArrays, FlatArrays]:
    """Abstract arguments of `flat_callable`, committed to `device` as the arrays of real calls are.

    Raises:
      ModelError: the function has 64-bit tensors and JAX's 64-bit mode is off.
    """
    _check_wide(function)
    return committed_avals(params, function.state or (), function.signature.inputs, bucket, device)


def committed_avals(
    params: Tree, state: Sequence[TensorSpec], inputs: Sequence[TensorSpec], bucket: Bucket, device: Device
) -> tuple[FlatArrays, FlatArrays, FlatArrays]:
    """Abstract parameters, state and inputs of a program as flat tuples, committed to `device`."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in flatten(params).values())
    before, given = _avals(state, {}, sharding), _avals(inputs, bucket.mapping(), sharding)
    return leaves, tuple(before.values()), tuple(given.values())


def too_wide(dtypes: Mapping[str, str]) -> list[str]:
    """Names of the tensors of 64 bits a component, where JAX's 64-bit mode is off: it would narrow them in silence."""
    if jax.config.jax_enable_x64:
        return []
    return [name for name, dtype in dtypes.items() if dtype in ("int64", "uint64", "float64", "complex128")]


def trace_function(function: Function, bucket: Bucket, params: Tree, device: Device) -> Stages:
    """A model's function traced in the flat form for one bucket and device.

    Args:
      function: to trace.
      bucket: the sizes of its dimensions.
      params: nested dictionary of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes are read.
      device: that it will run on.

    Raises:
      ModelError: the function does not trace.
    """
    arguments = flat_avals(function, bucket, params, device)
    return trace(jitted(function, tuple(flatten(params))), arguments, function=function.name, bucket=bucket)


def trace(wrapped: jax.stages.Wrapped, arguments: Sequence[Any], *, function: str, bucket: Bucket) -> Stages:
    """Any jitted callable traced with abstract arguments.

    Args:
      wrapped: the callable, a function's own or a deserialized export's.
      arguments: `jax.ShapeDtypeStruct` in the callable's form.
      function: name of the function, for reports and errors.
      bucket: whose sizes the arguments have.

    Raises:
      ModelError: the function does not trace.
    """
    start = time.perf_counter()
    try:
        traced = wrapped.trace(*arguments)
    except ServaxError as error:
        _label(error, f"{function}@{bucket.label}")
        raise
    except Exception as error:
        # The user's own code runs here and may raise anything; its traceback stays attached.
        raise ModelError(
            f"the function {function!r} does not trace",
            where=f"{function}@{bucket.label}",
            seen=first_line(error),
            remedy="the cause, with the line of the model's code, is in the traceback above",
        ) from error
    return Stages(function, bucket, traced, seconds={"trace": time.perf_counter() - start})


def lower(stages: Stages) -> Stages:
    """The traced function lowered to StableHLO.

    Raises:
      BuildError: JAX has no lowering of an operation for the device.
    """
    start = time.perf_counter()
    try:
        lowered = stages.traced.lower()
    except Exception as error:
        # Lowering rules, custom ones too, raise what they like; the kind does not tell more than the text.
        raise BuildError(
            f"the function {stages.function!r} cannot be lowered", where=stages.where, seen=first_line(error)
        ) from error
    return replace(stages, lowered=lowered, seconds={**stages.seconds, "lower": time.perf_counter() - start})


def compile(stages: Stages) -> Stages:
    """The lowered function compiled by XLA; lowers it first where that has not been done.

    Raises:
      BuildError: XLA does not compile it.
    """
    if stages.lowered is None:
        return compile(lower(stages))
    start = time.perf_counter()
    try:
        compiled = stages.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise BuildError(
            f"XLA cannot compile the function {stages.function!r}", where=stages.where, seen=first_line(error)
        ) from error
    return replace(stages, compiled=compiled, seconds={**stages.seconds, "compile": time.perf_counter() - start})


def run_parallel(jobs: Mapping[str, Callable[[], T]], step: str, workers: int | None = None) -> list[T]:
    """The results of all jobs, in their order, run on threads: XLA compiles outside Python's lock.

    Emits `StepStarted`, a `StepAdvanced` as each job ends, and `StepFinished`, all on the calling thread. The threads
    have the role of loaders, and the JAX settings that contexts have changed on the calling thread.

    Args:
      jobs: by label, `function@bucket`.
      step: name of the step.
      workers: number of threads; None: as many as there are cores.

    Raises:
      Exception: the first error of a job, with the job's label in it; jobs that have not begun are then dropped.
    """
    if not jobs:
        return []
    settings = settings_here()

    def run(job: Callable[[], T]) -> tuple[T, float]:
        with thread_role(LOADING), _same_settings(settings):
            start = time.perf_counter()
            return job(), time.perf_counter() - start

    count = min(workers or os.cpu_count() or 1, len(jobs))
    with events.step(step, len(jobs)), ThreadPoolExecutor(count, thread_name_prefix=f"servax-{step}") as pool:
        futures = {pool.submit(run, job): label for label, job in jobs.items()}
        try:
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    _label(error, futures[future])
                    raise error
                events.emit(events.StepAdvanced(step, futures[future], future.result()[1]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result()[0] for future in futures]


@contextlib.contextmanager
def _same_settings(wanted: Mapping[str, Any]) -> Generator[None]:
    """JAX's settings as another thread had them: contexts such as `jax.enable_x64(True)` hold on their thread alone."""
    here = settings_here()
    with contextlib.ExitStack() as stack:
        for name, value in wanted.items():
            context = getattr(jax, name.removeprefix("jax_"), None)
            if context is not None and here[name] != value:
                stack.enter_context(context(value))
        yield


def _label(error: BaseException, label: str) -> None:
    """Makes an error say the `function@bucket` it came from."""
    if not isinstance(error, ServaxError):
        error.add_note(f"at {label}")
    elif error.where is None:
        error.where = label
    elif label not in error.where:
        error.where = f"{label}: {error.where}"


def _named(name: str, call: Callable[..., T]) -> Callable[..., T]:
    call.__name__ = call.__qualname__ = name
    return call


def _avals(
    specs: Sequence[TensorSpec], sizes: Mapping[str, int], sharding: jax.sharding.Sharding | None
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        spec.name: jax.ShapeDtypeStruct(spec.concrete(sizes), spec.numpy_dtype, sharding=sharding)
        for spec in sorted(specs, key=lambda spec: spec.name)
    }


def _check_wide(function: Function) -> None:
    specs = {spec.name: spec for spec in (*function.signature.inputs, *(function.state or ()))}
    if wide := too_wide({name: spec.dtype for name, spec in specs.items()}):
        raise ModelError(
            f"the function {function.name!r} has 64-bit tensors, and JAX's 64-bit mode is off",
            where=", ".join(wide),
            seen=", ".join(f"{name}: {specs[name].text()}" for name in wide),
            expected="types of at most 32 bits a component",
            remedy="declare 32-bit types, or set JAX_ENABLE_X64=1",
        )


def _checked_state(function: Function, after: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The state that a call returned, when it has the declared names, shapes and dtypes; seen while it traces."""
    declared = {spec.name: (spec.concrete({}), spec.dtype) for spec in function.state or ()}
    returned = {name: (tuple(value.shape), str(value.dtype)) for name, value in (after or {}).items()}
    names = sorted(name for name in {*declared, *returned} if declared.get(name) != returned.get(name))
    if after is None or names:
        raise ModelError(
            f"the function {function.name!r} does not return the state that it takes",
            where=", ".join(names),
            seen="; ".join(f"{name}: {_shape_text(returned.get(name))}" for name in names),
            expected="; ".join(f"{name}: {_shape_text(declared.get(name))}" for name in names),
            remedy="return (state, outputs), the state with every name, shape and dtype as declared",
        )
    return after


def _shape_text(shape_and_dtype: tuple[tuple[int, ...], str] | None) -> str:
    if shape_and_dtype is None:
        return "nothing"
    return f"{shape_and_dtype[1]}[{', '.join(map(str, shape_and_dtype[0]))}]"
