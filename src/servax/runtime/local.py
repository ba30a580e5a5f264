"""A servable in this process, built from plain parts by the `workflow` room."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from servax.core import monitoring
from servax.core.device import Device
from servax.core.errors import NotFound, ServaxError, UsageError
from servax.core.events import RequestFailed, emit
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import KeyPath
from servax.runtime import executor as executors
from servax.runtime.answers import Answer, FutureAnswer, ThreadAnswer
from servax.runtime.batch import Equipment
from servax.runtime.batcher import Batcher, shares_core
from servax.runtime.batching import DEFAULT as DEFAULT_BATCHING
from servax.runtime.batching import Batching
from servax.runtime.buffers import BufferPool
from servax.runtime.costs import Costs, Key
from servax.runtime.lane import Lane
from servax.runtime.lifecycle import Lifecycle
from servax.runtime.memory import require_room
from servax.runtime.pending import PendingRequest
from servax.runtime.processors import Processing
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.runner import Runner, ServedFunction
from servax.runtime.servable import (
    Outputs,
    Progress,
    Servable,
    State,
    default_function,
    flat_inputs,
    no_attribute,
)
from servax.runtime.split import SplitRequest, split
from servax.runtime.stages_table import StagesTable
from servax.runtime.swap import SwapReport, drift, require_finite
from servax.runtime.warmup import label, require_all, warm_up
from servax.runtime.watch import Watch
from servax.stages.buckets import BucketGrid
from servax.stages.joining import nbytes
from servax.stages.padding import CheckedTensors, check
from servax.targets.target import FlatArrays, ProgramTable


class Swapper(Protocol):
    """Restores a checkpoint of the present structure: path and options (`step`, `select`) -> flat parameters."""

    def __call__(self, checkpoint: str, /, **options: Any) -> Mapping[KeyPath, Any]: ...


AppFactory = Callable[[Servable], Any]
"""Makes an ASGI application of a servable; supplied from above, so that this room knows no server."""


class LocalServable:
    """A model on one device, every program compiled; refuses requests unless READY.

    Call `warm` once; it runs every program and makes the servable READY. Arrays given to `predict_async` belong to
    the request until it is answered.

    Args:
      name: the name it is served under.
      platform: the wrapper's name on the wire: `jax_jit`, `jax_executable`, `jax_stablehlo`.
      functions: by name.
      grid: the buckets that requests are padded to.
      table: a program for every bucket of the grid.
      params: by key path, in sorted order, as `core.trees.flatten` gives them. Committed to `device` here.
      state: specs of the state shared by the stateful functions.
      device: where everything runs.
      swapper: restores another checkpoint for `swap`; None: a swap is refused.
      app_factory: makes `app`; None: there is none.
      version: the version it is served under.
      batching: how requests are joined, and how many may wait.

    Raises:
      StartupError: a bucket has no program, or a tokenizer cannot be read.
    """

    def __init__(
        self,
        name: str,
        *,
        platform: str,
        functions: Mapping[str, ServedFunction],
        grid: BucketGrid,
        table: ProgramTable,
        params: Mapping[KeyPath, Any],
        state: Sequence[TensorSpec] = (),
        device: Device,
        swapper: Swapper | None = None,
        app_factory: AppFactory | None = None,
        version: str = "1",
        batching: Batching = DEFAULT_BATCHING,
    ) -> None:
        monitoring.register()
        require_all(table, grid)
        self._name = name
        self._platform = platform
        self._version = version
        self._device = device
        self._functions = dict(functions)
        self._signatures = {name: function.signature for name, function in functions.items()}
        self._processing = {name: Processing.of(function) for name, function in functions.items()}
        self._grid = grid
        self._table = table
        self._swapper = swapper
        self._swapping = threading.Lock()
        self._closing = threading.Lock()
        self._app_factory = app_factory
        self._costs = Costs()
        self._warmed: tuple[Key, ...] = ()
        self._lifecycle = Lifecycle(name)
        with monitoring.thread_role(monitoring.LOADING):
            self._runner = Runner(table, functions, params, state, device)
        self._executor = executors.acquire(device)
        # The device's thread outlives a servable that is dropped without `close`, so it holds no reference to it.
        self._forget = self._executor.on_death(_weakly(self._on_death))
        watch = Watch(self._runner, self._functions, grid, _weakly(self._lifecycle.fail))
        self._lanes = {
            name: Lane(name, function.signature, grid[name], self._costs, stateful=function.stateful)
            for name, function in functions.items()
        }
        self._batcher = Batcher(
            self._lanes,
            Equipment(name, version, watch, self._costs, BufferPool()),
            batching,
            self._executor.queue,
            shares_core=shares_core(device.platform),
        )
        self._executor.queue.join(self._batcher)
        self._dropped = weakref.finalize(self, _let_go, self._executor, self._batcher, self._forget)
        self._dropped.atexit = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    @property
    def platform(self) -> str:
        return self._platform

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._device

    @property
    def signatures(self) -> Mapping[str, Signature]:
        return self._signatures

    @property
    def grid(self) -> BucketGrid:
        """The buckets that requests are padded to."""
        return self._grid

    @property
    def table(self) -> ProgramTable:
        """Its programs; another version whose programs are the same may be given them."""
        return self._table

    @property
    def texts(self) -> Mapping[str, Mapping[str, str]]:
        return {name: processing.texts for name, processing in self._processing.items()}

    @property
    def stateful(self) -> frozenset[str]:
        """Functions whose answers depend on the calls before."""
        return frozenset(name for name, function in self._functions.items() if function.stateful)

    @property
    def state(self) -> State:
        return self._lifecycle.state

    @property
    def reason(self) -> str | None:
        return self._lifecycle.reason

    @property
    def progress(self) -> Progress:
        warmed = self._warmed
        return Progress(tuple(map(label, warmed)), tuple(label(key) for key in self._grid if key not in warmed))

    @property
    def in_flight(self) -> int:
        """How many requests are accepted and not yet answered."""
        return self._lifecycle.in_flight

    @property
    def queued(self) -> int:
        """How many accepted requests wait for the device."""
        return self._batcher.waiting

    @property
    def running(self) -> int:
        """How many requests are on the device."""
        return self._batcher.running

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters on the device."""
        return self._runner.parameter_bytes

    @property
    def executable_bytes(self) -> int:
        """Bytes of the programs' code and of the largest scratch space, by XLA's memory analysis."""
        memory = [self._table[key].memory for key in self._table]
        return sum(each.get("code", 0) for each in memory) + max((each.get("temp", 0) for each in memory), default=0)

    @property
    def costs(self) -> Mapping[Key, float]:
        """Seconds of a warm run, by function and bucket, with copies to and from the device.

        Medians of the runs of warming, then corrected by what real batches take.
        """
        return self._costs.measured()

    @property
    def stages(self) -> StagesTable:
        """What each layer took for each program; a table that shows itself."""
        return StagesTable.of(self._name, self._table, self.costs)

    @property
    def app(self) -> Any:
        """An ASGI application that serves this alone; it can be mounted: `app.mount("/v2", servable.app)`."""
        if self._app_factory is None:
            raise UsageError(
                f"{self._name} was built without an application",
                remedy="use servax.load, or make one: servax.server.create_app(servable)",
            )
        return self._app_factory(self)

    def warm(self) -> Self:
        """Runs every program and becomes READY; does nothing when READY already.

        Raises:
          StartupError: a program failed or would have compiled; the state is FAILED.
        """
        if self.state is State.READY:
            return self
        self._lifecycle.move(State.WARMING)
        try:
            self._costs.set(warm_up(self._executor, self._runner, self._functions, self._grid, self._on_warmed))
            self._warm_further()
        except ServaxError as error:
            self._lifecycle.fail(error.sentence())
            raise
        self._lifecycle.move(State.READY)
        return self

    def predict(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        return self.infer(InferRequest(default_function(function, self._signatures), flat_inputs(inputs))).tensors

    async def predict_async(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        request = InferRequest(default_function(function, self._signatures), flat_inputs(inputs))
        return (await self.infer_async(request)).tensors

    def infer(self, request: InferRequest) -> InferResult:
        came, pending = time.perf_counter(), None
        try:
            answer = ThreadAnswer()
            pending = self._submit(request, self._prepare(request), answer, came)
            result = answer.wait(pending.remaining())
            if result is None:
                pending.expire()  # without effect on a request that runs: its answer is nearly there
                result = answer.wait(None)
            assert result is not None
            return result
        except BaseException as error:
            self._tell_failure(request, error, came, pending)
            answer = None  # it holds the error, whose traceback holds this frame
            raise
        finally:
            if pending is not None:
                self._lifecycle.release(pending)
                pending = None

    async def infer_async(self, request: InferRequest) -> InferResult:
        came, pending, timer = time.perf_counter(), None, None
        try:
            processing = self._processing.get(request.function)
            if processing is not None and processing.needed(request.tensors):
                checked = await asyncio.to_thread(self._prepare, request)  # tokenizing would hold up the event loop
            else:
                checked = self._prepare(request)
            loop = asyncio.get_running_loop()
            answer = FutureAnswer(loop)
            # Queued here and not on the other thread, which goes on when this task is cancelled meanwhile.
            pending = self._submit(request, checked, answer, came)
            if request.deadline is not None:
                timer = loop.call_later(pending.remaining() or 0.0, pending.expire)
            return await answer.future
        except BaseException as error:
            self._tell_failure(request, error, came, pending)
            answer = None  # it holds the error, whose traceback holds this frame
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if pending is not None:
                self._lifecycle.release(pending)
                pending = None

    async def process_async(self, function: str, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors as the function takes them: texts are replaced by token ids, a row each; nothing runs.

        Raises:
          NotFound: there is no such function.
          InvalidInput: a text tensor is not a list of texts.
        """
        processing = self._processing.get(function)
        if processing is None:
            raise NotFound(f"{self._name} has no function {function!r}", expected=" or ".join(sorted(self._functions)))
        return await asyncio.to_thread(processing, tensors)

    def swap(self, checkpoint: str | os.PathLike[str], *, allow_nonfinite: bool = False, **options: Any) -> SwapReport:
        """Takes the parameters of another checkpoint of the same structure, with no compilation.

        Requests that run finish on the old parameters, later ones see the new; none fails. Before that each stateless
        function runs once with old and once with new parameters, for the report's drift.

        Args:
          checkpoint: where the new parameters are.
          allow_nonfinite: whether leaves may hold NaN or infinity where the present ones are finite.
          options: those of restoring (`step`, `select`, `item`).

        Raises:
          NotReady: the servable is not READY.
          MemoryShortage: old and new do not fit beside one another.
          CheckpointError: the checkpoint cannot be read, its leaves differ in path, shape or dtype, or they are not
            finite.
          ExecutionError: a program failed with the new parameters.
        """
        if self._swapper is None:
            raise UsageError(f"{self._name} cannot swap", remedy="load it from a bundle or a checkpoint")
        path, runner = os.fspath(checkpoint), self._runner
        with self._swapping, monitoring.thread_role(monitoring.LOADING):
            began = time.perf_counter()
            self._lifecycle.require(State.READY)
            require_room(self._device, runner.parameter_bytes)
            fresh = runner.fit(self._swapper(path, **options))
            finite = require_finite(runner.paths, fresh, runner.params, allow=allow_nonfinite, checkpoint=path)
            self._lifecycle.require(State.READY)
            moved = drift(self._executor, runner, self._functions, self._grid, fresh)
            size = self._replace(fresh)
            return SwapReport(path, runner.parameter_count, size, time.perf_counter() - began, finite, moved)

    def drain(self, timeout: float | None = None) -> int:
        """Refuses new requests and waits for the accepted ones, at most `timeout` seconds; returns how many are left.

        Those that still wait for the device then are answered with NotReady.
        """
        return self._lifecycle.drain(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drains, then frees device memory and, with the last servable on the device, its thread."""
        self.drain(timeout)
        if not self._closing.acquire(blocking=False):
            return  # another thread closes it, or has: what it held is given back once
        self._dropped.detach()
        self._forget()
        self._lifecycle.move(State.UNLOADED)
        self._batcher.leave()
        executors.release(self._executor)
        self._runner.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        """`servable.embed(...)` calls the function `embed`."""
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            return functools.partial(self.predict, name)
        raise no_attribute(self, name, functions)

    def __repr__(self) -> str:
        functions = ", ".join(self._functions)
        return f"<LocalServable {self._name} ({functions}) on {self._device.platform}:{self._device.id}, {self.state}>"

    def _warm_further(self) -> None:
        """What else must run before READY; the state starts anew afterwards."""

    def _replace(self, fresh: FlatArrays) -> int:
        """Puts new parameters in place; returns their bytes."""
        return self._runner.replace(fresh)

    def _prepare(self, request: InferRequest) -> CheckedTensors:
        """The request as the device takes it: tokenized and checked, but neither accepted nor queued."""
        self._lifecycle.require(State.READY)
        lane = self._lanes.get(request.function)
        if lane is None:
            raise NotFound(
                f"{self._name} has no function {request.function!r}", expected=" or ".join(sorted(self._functions))
            )
        self._batcher.refuse_if_full()
        tensors = self._processing[request.function](request.tensors)
        quick = lane.quick(tensors, owned=request.owned)
        return check(lane.signature, tensors, owned=request.owned) if quick is None else quick

    def _submit(
        self, request: InferRequest, checked: CheckedTensors, answer: Answer, came: float
    ) -> PendingRequest | SplitRequest:
        """Accepts a request and queues it; from here on it gets exactly one answer."""
        lane = self._lanes[request.function]
        shape, most = lane.classify(checked)
        rows = lane.joiner.rows(checked)
        pending: PendingRequest | SplitRequest
        if rows <= most:
            pending = PendingRequest(
                self._batcher, lane, request, checked, answer, came=came, nbytes=nbytes(checked), rows=rows, shape=shape
            )
            queued = (pending,)
        else:
            pending = split(self._batcher, lane, request, checked, answer, came=came, shape=shape, most=most)
            queued = pending.parts
        self._executor.require_here()
        self._lifecycle.admit(pending)
        try:
            self._batcher.put(queued)
        except ServaxError:
            self._lifecycle.release(pending)
            raise
        return pending

    def _tell_failure(
        self,
        request: InferRequest,
        error: BaseException,
        came: float,
        pending: PendingRequest | SplitRequest | None,
    ) -> None:
        """Takes out what nobody waits for any more, and tells of it."""
        if pending is not None:
            pending.cancel()
        status = type(error).__name__ if isinstance(error, ServaxError) else "Cancelled"
        emit(RequestFailed(self._name, self._version, request.function, status, time.perf_counter() - came))

    def _on_warmed(self, key: Key) -> None:
        self._warmed = (*self._warmed, key)

    def _on_death(self, reason: str) -> None:
        self._lifecycle.fail(f"the thread that runs the device has died: {reason}")


def _weakly(method: Callable[[str], None]) -> Callable[[str], None]:
    """A listener that calls `method` as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def listener(reason: str) -> None:
        if (live := reference()) is not None:
            live(reason)

    return listener


def _let_go(executor: executors.Executor, batcher: Batcher, forget: Callable[[], None]) -> None:
    """Gives back what a servable held that nobody closed."""

    def release() -> None:
        forget()
        batcher.leave()
        executors.release(executor)

    # The collector may run at any point of this thread, also where it holds the executors' lock.
    threading.Thread(target=release, name="servax-release", daemon=True).start()
