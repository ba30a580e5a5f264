"""Properties of the batcher: whatever comes together, each request is answered once, as if it had come alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving_toys as toys
from servax.core.errors import DeadlineExceeded
from servax.core.events import BatchDone, Event, listening
from servax.core.tensors import Signature, TensorSpec
from servax.runtime.batching import Batching
from servax.runtime.local import LocalServable
from servax.runtime.request import InferRequest
from servax.runtime.runner import ServedFunction
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import ProgramTable

MOST = 8
SCALED = Signature(
    (TensorSpec.parse("scale", "float32[]"), TensorSpec.parse("x", "float32[batch, length]")),
    (TensorSpec.parse("y", "float32[batch, length]"),),
)
SUMS = Signature(
    (
        TensorSpec.parse("n", "int32[batch]"),
        TensorSpec.parse("weight", "float32[batch] = 2.0"),
        TensorSpec("x", "float32", ("batch", "length"), pad=-5),
    ),
    (TensorSpec.parse("sum", "float32[batch]"), TensorSpec("double", "float32", ("batch", "2*length"))),
    lengths={"n": "length"},
)
GRID = BucketGrid(
    {
        "scaled": tuple(Bucket.of(batch=b, length=n) for b in (1, 2, 4, MOST) for n in (4, 8)),
        "sums": (*(Bucket.of(batch=b, length=4) for b in (1, 4)), *(Bucket.of(batch=b, length=16) for b in (2, MOST))),
        "count": (Bucket(()),),
    }
)


def scaled(params: Any, state: Any, inputs: Any) -> Any:
    scale, x = inputs
    return (), (x * scale,)


def sums(params: Any, state: Any, inputs: Any) -> Any:
    n, weight, x = inputs
    inside = jax.numpy.arange(x.shape[1])[None] < n[:, None]
    return (), (jax.numpy.repeat(x, 2, 1), jax.numpy.where(inside, x, 0).sum(1) * weight)


@pytest.fixture(scope="module")
def servable() -> Iterator[LocalServable]:
    device = jax.devices()[0]
    functions = {
        "scaled": ServedFunction(SCALED),
        "sums": ServedFunction(SUMS),
        "count": ServedFunction(toys.COUNT, stateful=True),
    }
    flat = {"scaled": scaled, "sums": sums, "count": toys.count_flat}
    table = ProgramTable(
        {
            (name, bucket): toys.compiled(
                flat[name], functions[name].signature, bucket, device, stateful=functions[name].stateful
            )
            for name, bucket in GRID
        }
    )
    with toys.toy(functions=functions, grid=GRID, table=table, batching=Batching(max_delay=1e-3)).warm() as ready:
        yield ready


@dataclass(frozen=True)
class Ask:
    """One request and what becomes of it."""

    function: str
    rows: int
    length: int
    ragged: bool
    scale: int
    priority: int
    deadline: float | None
    cancelled_after: int | None
    wait: int
    owned: bool


ASKS = st.builds(
    Ask,
    function=st.sampled_from(["scaled", "sums", "count"]),
    rows=st.integers(1, 2 * MOST + 3),
    length=st.integers(1, 4),
    ragged=st.booleans(),
    scale=st.integers(1, 2),
    priority=st.integers(-1, 1),
    deadline=st.sampled_from([None, None, -1.0, 0.0, 60.0]),
    cancelled_after=st.sampled_from([None, None, None, 0, 1, 3]),
    wait=st.integers(0, 3),
    owned=st.booleans(),
)


def inputs(ask: Ask, index: int) -> dict[str, Any]:
    """Values that tell rows and requests apart, small enough that float32 adds them exactly."""
    if ask.function == "count":
        return {"x": np.full(4, 1.0, np.float32)}
    x = (np.arange(ask.rows * ask.length, dtype=np.float32) + 100 * index).reshape(ask.rows, ask.length)
    if ask.function == "scaled":
        return {"x": x, "scale": np.float32(ask.scale).reshape(())}
    if ask.ragged:
        return {"x": [list(row[: 1 + at % ask.length]) for at, row in enumerate(x)]}
    return {"x": x, "weight": np.full(ask.rows, float(ask.scale), np.float32)} if ask.scale > 1 else {"x": x}


def check(ask: Ask, index: int, outputs: Any) -> None:
    """By NumPy, of the one request alone."""
    given = inputs(ask, index)
    if ask.function == "scaled":
        np.testing.assert_array_equal(outputs["y"], given["x"] * ask.scale)
    elif ask.function == "sums":
        expected = [sum(row) * 2 for row in given["x"]]  # the default weight, or scale 2, which is the same
        np.testing.assert_array_equal(outputs["sum"], np.array(expected, np.float32))
        longest = max(len(row) for row in given["x"])
        assert outputs["double"].shape == (ask.rows, 2 * longest)
        for row, twice in zip(given["x"], outputs["double"], strict=True):
            assert twice.tolist() == [value for value in row for _ in range(2)] + [-5] * (2 * (longest - len(row)))


async def one(servable: LocalServable, ask: Ask, index: int, seen: list[float]) -> str:
    for _ in range(ask.wait):
        await asyncio.sleep(0)
    deadline = None if ask.deadline is None else time.monotonic() + ask.deadline
    request = InferRequest(ask.function, inputs(ask, index), deadline=deadline, priority=ask.priority, owned=ask.owned)
    asking = asyncio.ensure_future(servable.infer_async(request))
    if ask.cancelled_after is not None:
        for _ in range(ask.cancelled_after):
            await asyncio.sleep(0)
        asking.cancel()
    try:
        result = await asking
    except asyncio.CancelledError:
        assert ask.cancelled_after is not None
        return "cancelled"
    except DeadlineExceeded:
        assert ask.deadline is not None
        assert ask.deadline <= 0
        return "late"
    if ask.function == "count":
        seen.append(float(result.tensors["seen"][0]))
    check(ask, index, result.tensors)
    return "answered"


@settings(max_examples=60)
@given(st.lists(ASKS, min_size=1, max_size=24))
def test_each_request_has_one_answer_equal_to_running_alone(servable: LocalServable, asks: list[Ask]) -> None:
    batches: list[BatchDone] = []

    def listener(event: Event) -> None:
        if isinstance(event, BatchDone):
            batches.append(event)

    async def scene() -> tuple[list[str], list[float]]:
        seen: list[float] = []
        outcomes = await asyncio.gather(*(one(servable, ask, index, seen) for index, ask in enumerate(asks)))
        return outcomes, seen

    with listening(listener):
        outcomes, seen = asyncio.run(scene())
        servable.predict("scaled", x=np.ones((1, 1), np.float32), scale=np.float32(1).reshape(()))  # what ran is told
    assert len(outcomes) == len(asks)
    assert len(set(seen)) == len(seen), "a state was seen twice"
    assert (servable.in_flight, servable.queued, servable.running) == (0, 0, 0)
    for batch in batches:
        sizes = dict(part.split("=") for part in batch.bucket.split(",")) if "=" in batch.bucket else {}
        assert batch.rows <= batch.capacity
        assert batch.rows == sum(each.get("batch", 1) for each in batch.sizes)
        for each in batch.sizes:
            assert all(each[dim] <= int(size) for dim, size in sizes.items())
        if batch.function == "count":
            assert len(batch.sizes) == 1


@settings(max_examples=15)
@given(st.lists(st.integers(1, 2 * MOST), min_size=2, max_size=12))
def test_threads_are_answered_as_tasks_are(servable: LocalServable, rows: list[int]) -> None:
    asks = [Ask("scaled", count, 1 + count % 4, False, 1 + count % 2, 0, None, None, 0, False) for count in rows]

    def ask(index: int) -> None:
        result = servable.infer(InferRequest(asks[index].function, inputs(asks[index], index)))
        check(asks[index], index, result.tensors)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(len(asks))))
    assert (servable.in_flight, servable.queued, servable.running) == (0, 0, 0)
