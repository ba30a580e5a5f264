"""Twice as many requests as the device can answer: some are refused, none is lost, and then it is as before."""

import asyncio
import resource
import time

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import Overloaded
from servax.runtime.batching import Batching
from servax.runtime.request import InferRequest
from servax.stages.buckets import Bucket
from servax.targets.target import LoadedProgram, ProgramTable

RUN = 0.004
"""Seconds that each batch of this device takes: 4 rows a batch, 1,000 rows a second."""


def slow_table() -> ProgramTable:
    def slow(program):
        def call(params, state, inputs):
            time.sleep(RUN)
            return program(params, state, inputs)

        return call

    whole = toys.table()
    key = ("predict", Bucket.of(batch=4, length=8))
    return ProgramTable({**whole.programs, key: LoadedProgram(slow(whole[key].program), "jit")})


def memory() -> int:
    """Resident bytes of this process at their most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def overload(servable, seconds: float) -> tuple[int, int, list[float]]:
    """Offers 8 rows each `RUN`, whatever becomes of them; counts answers and refusals."""
    answered, refused, retries = 0, 0, []
    asked: set[asyncio.Task] = set()

    async def ask(value: float) -> None:
        nonlocal answered, refused
        x = np.full((2, 8), value, np.float32)
        try:
            result = await servable.infer_async(InferRequest("predict", {"x": x}))
        except Overloaded as error:
            refused += 1
            retries.append(error.retry_after)
        else:
            assert (result.tensors["y"] == 2 * value + 1).all()
            answered += 1

    ends, sent = time.perf_counter() + seconds, 0
    while time.perf_counter() < ends:
        for _ in range(4):
            task = asyncio.ensure_future(ask(float(sent % 1000)))
            asked.add(task)
            task.add_done_callback(asked.discard)
            sent += 1
        await asyncio.sleep(RUN)
    await asyncio.gather(*asked)
    assert answered + refused == sent
    return answered, refused, retries


def scene(seconds: float, growth: int) -> None:
    with toys.toy(table=slow_table(), batching=Batching(max_queue=64)).warm() as servable:
        asyncio.run(overload(servable, seconds / 8))
        before = memory()
        answered, refused, retries = asyncio.run(overload(servable, seconds))
        assert answered > 0
        assert refused > answered / 4
        assert all(each > 0 for each in retries)
        assert memory() - before < growth
        assert (servable.queued, servable.in_flight, servable.running) == (0, 0, 0)
        assert (servable.predict(x=np.ones((1, 8), np.float32))["y"] == 3).all()


def test_twice_the_capacity_for_a_moment():
    scene(2.0, 32 << 20)


@pytest.mark.long
def test_twice_the_capacity_for_a_minute():
    scene(60.0, 32 << 20)
