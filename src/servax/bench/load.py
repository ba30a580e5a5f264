"""Closed-loop load: so many callers, each of whom asks again as soon as it has its answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from servax.core.errors import ServaxError
from servax.core.events import StepAdvanced, emit, step
from servax.core.table import Table, seconds_text
from servax.runtime.request import InferRequest
from servax.runtime.servable import Servable

_WARM_UP = 0.1
"""Part of the time that is not counted, at the beginning."""

_BOUND = 0.9
"""The client is said to be the bottleneck when it computes for this part of the time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What so many callers saw.

    Attributes:
      requests: answered while it was counted.
      failed: by class of the error.
      seconds: that were counted.
      p50, p95, p99: seconds from call to answer; None where nothing was answered.
      client: of the counted time, the part that this process computed for.
    """

    concurrency: int
    requests: int
    failed: Mapping[str, int]
    seconds: float
    p50: float | None
    p95: float | None
    p99: float | None
    client: float

    @property
    def requests_per_second(self) -> float:
        """Answers a second."""
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One line a concurrency."""

    title: str
    loads: tuple[Loaded, ...]
    remote: bool

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(sum(load.failed.values()) for load in self.loads)

    @property
    def bound(self) -> list[int]:
        """Concurrencies at which a server's client was the bottleneck."""
        return [load.concurrency for load in self.loads if self.remote and load.client > _BOUND]

    def as_json(self) -> list[dict[str, Any]]:
        """The lines as JSON values."""
        return [{**asdict(load), "requests_per_second": load.requests_per_second} for load in self.loads]

    def table(self) -> Table:
        """A line a concurrency."""
        return Table.of(
            self.title,
            (">concurrency", ">requests/s", ">p50", ">p95", ">p99", ">requests", "failed", ">client's CPU"),
            [
                (
                    load.concurrency,
                    f"{load.requests_per_second:,.0f}",
                    *map(seconds_text, (load.p50, load.p95, load.p99)),
                    load.requests,
                    ", ".join(f"{count} {name}" for name, count in load.failed.items()),
                    f"{load.client:.0%}",
                )
                for load in self.loads
            ],
        )


def closed_loop(
    servable: Servable,
    function: str,
    inputs: Mapping[str, Any],
    *,
    concurrencies: Sequence[int],
    seconds: float,
    remote: bool,
) -> LoadReport:
    """Asks a servable for the same inputs again and again, for so long at each concurrency.

    Args:
      servable: in this process, or behind a URL.
      function: of the servable.
      inputs: of one request.
      concurrencies: callers at a time.
      seconds: at each concurrency, the first tenth not counted.
      remote: whether the servable is behind a URL.
    """
    loads: list[Loaded] = []
    with step("load", len(concurrencies)):
        for concurrency in concurrencies:
            loads.append(asyncio.run(_load(servable, InferRequest(function, inputs), concurrency, seconds)))
            emit(StepAdvanced("load", f"{concurrency} callers", seconds))
    return LoadReport(f"{function} of {servable.name}: closed loop", tuple(loads), remote)


async def _load(servable: Servable, request: InferRequest, concurrency: int, seconds: float) -> Loaded:
    began = time.perf_counter()
    counted_from, until = began + seconds * _WARM_UP, began + seconds
    latencies: list[float] = []
    failed: Counter[str] = Counter()
    computed = 0.0

    async def caller() -> None:
        while (sent := time.perf_counter()) < until:
            try:
                await servable.infer_async(request)
            except ServaxError as error:
                failed[type(error).__name__] += 1
                await asyncio.sleep(min(0.1, seconds / 100))  # a server that refuses at once is not to be hammered
            else:
                answered = time.perf_counter()
                if counted_from <= answered <= until:
                    latencies.append(answered - sent)

    async def clock() -> None:
        nonlocal computed
        await asyncio.sleep(seconds * _WARM_UP)
        computed = -time.process_time()
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        computed += time.process_time()

    async with asyncio.TaskGroup() as group:
        group.create_task(clock())
        for _ in range(concurrency):
            group.create_task(caller())
    counted = until - counted_from
    points = np.percentile(latencies, (50, 95, 99)).tolist() if latencies else (None, None, None)
    return Loaded(concurrency, len(latencies), dict(failed), counted, *points, client=computed / counted)
