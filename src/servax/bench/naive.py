"""The server that everybody writes first: `jax.jit` at whatever shape a request has, compiled when it comes.

It stands behind the same HTTP as servax and answers with the same numbers, so that what differs is when programs
compile. `python -m servax.bench.naive MODEL.py:NAME CHECKPOINT` serves it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np

from servax.core import monitoring
from servax.core.errors import NotFound, UsageError
from servax.core.events import CompileEvent, Event, listening
from servax.core.tensors import Signature
from servax.runtime.processors import Processing
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.runner import ServedFunction
from servax.runtime.servable import Outputs, Progress, State, default_function, flat_inputs
from servax.stages.buckets import Bucket
from servax.stages.padding import check, cut, pad
from servax.stages.pipeline import nested_callable
from servax.workflow.device import pick_device
from servax.workflow.load import resolved
from servax.workflow.source import CheckpointChoice, Source, prepare


class NaiveServable:
    """A model under `jax.jit`: ready at once, and compiling at every new shape."""

    def __init__(self, source: Source) -> None:
        monitoring.register()
        self._source = source
        self._programs: Mapping[str, Any] = {
            name: jax.jit(nested_callable(function)) for name, function in source.functions.items()
        }
        self._processing = {
            name: Processing.of(
                ServedFunction(function.signature, processors=resolved(source.model, function.processors))
            )
            for name, function in source.functions.items()
        }
        self._lock = threading.Lock()
        self.shapes: set[tuple[str, Bucket]] = set()
        if any(function.state is not None for function in source.functions.values()):
            raise UsageError("the naive server has no state", remedy="compare with a stateless model")

    @property
    def name(self) -> str:
        return self._source.model.name

    @property
    def version(self) -> str:
        return "1"

    @property
    def platform(self) -> str:
        return "jax_jit"

    @property
    def state(self) -> State:
        return State.READY

    @property
    def reason(self) -> str | None:
        return None

    @property
    def progress(self) -> Progress:
        return Progress()

    @property
    def stages(self) -> Any:
        return None

    @property
    def signatures(self) -> Mapping[str, Signature]:
        return {name: function.signature for name, function in self._source.functions.items()}

    @property
    def texts(self) -> Mapping[str, Mapping[str, str]]:
        return {name: processing.texts for name, processing in self._processing.items()}

    @property
    def app(self) -> Any:
        from servax.server.app import create_app

        return create_app(self)

    def swap(self, checkpoint: str | os.PathLike[str], **options: Any) -> NoReturn:
        raise UsageError("the naive server keeps its weights", seen=str(checkpoint), remedy="start it again")

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        raise AttributeError(f"the naive server has no attribute {name!r}")

    def predict(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        return self.infer(InferRequest(default_function(function, self.signatures), flat_inputs(inputs))).tensors

    async def predict_async(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        return await asyncio.to_thread(self.predict, function, **inputs)

    async def infer_async(self, request: InferRequest) -> InferResult:
        return await asyncio.to_thread(self.infer, request)

    def infer(self, request: InferRequest) -> InferResult:
        """Runs the function at the request's own shape; `times` holds what tracing, lowering and compiling took."""
        if request.function not in self.signatures:
            raise NotFound(f"no function {request.function!r}", expected=" or ".join(self.signatures))
        signature = self.signatures[request.function]
        checked = check(signature, self._processing[request.function](request.tensors))
        shape = Bucket.of(**checked.sizes)
        inputs = dict(zip((spec.name for spec in signature.inputs), pad(signature, shape, checked), strict=True))
        times: dict[str, float] = {"trace": 0.0, "lower": 0.0, "compile": 0.0}

        def listener(event: Event) -> None:
            if isinstance(event, CompileEvent) and event.stage in times:
                times[event.stage] += event.seconds

        with self._lock, listening(listener):
            began = time.perf_counter()
            outputs: Mapping[str, Any] = self._programs[request.function](self._source.params, inputs)
            arrays = [np.asarray(outputs[spec.name]) for spec in signature.outputs]
            times["execute"] = time.perf_counter() - began - sum(times.values())
            self.shapes.add((request.function, shape))
        return InferResult(cut(signature, checked.sizes, arrays), shape.label, times)

    def close(self) -> None:
        """Nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()


def naive(reference: str, checkpoint: str) -> NaiveServable:
    """The naive servable of a model and a checkpoint."""
    return NaiveServable(prepare(reference, CheckpointChoice(checkpoint), device=pick_device()))


def main() -> None:
    """Serves a model naively until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m servax.bench.naive", description=__doc__)
    parser.add_argument("model", help="MODEL.py:NAME or package.module:NAME")
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, default=8001)
    arguments = parser.parse_args()

    import uvicorn

    servable = naive(arguments.model, arguments.checkpoint)
    uvicorn.run(servable.app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
