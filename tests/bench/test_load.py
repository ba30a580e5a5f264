"""Closed-loop load: counts that add up."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import servax
from servax.bench.load import Loaded, LoadReport, closed_loop
from servax.core.errors import Overloaded
from servax.runtime.request import InferResult


class Counting:
    """Answers at once, but for every third request, and knows how many there were at a time."""

    name = "net"

    def __init__(self) -> None:
        self.requests = 0
        self.now = 0
        self.most = 0

    async def infer_async(self, request):
        self.requests += 1
        number = self.requests
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if number % 3 == 0:
            raise Overloaded("full")
        return InferResult({}, "")


def test_so_many_callers_ask_at_a_time_and_each_answer_counts_once() -> None:
    servable = Counting()
    report = closed_loop(servable, "predict", {}, concurrencies=[5], seconds=0.2, remote=True)
    (load,) = report.loads
    assert servable.most == 5
    assert load.failed == {"Overloaded": servable.requests // 3}
    assert 0 < load.requests <= servable.requests - servable.requests // 3
    assert load.requests_per_second * load.seconds == pytest.approx(load.requests)
    assert report.failed == servable.requests // 3
    assert load.p50 is not None
    assert load.p50 <= load.p95 <= load.p99


def test_nothing_answered_has_no_latency() -> None:
    class Refusing(Counting):
        async def infer_async(self, request):
            raise Overloaded("full")

    report = closed_loop(Refusing(), "predict", {}, concurrencies=[1], seconds=0.05, remote=False)
    assert report.loads[0].p50 is None
    assert report.failed > 0
    assert "Overloaded" in repr(report.table())
    assert json.loads(json.dumps(report.as_json()))[0]["requests"] == 0


def test_a_busy_client_is_said_to_be_one() -> None:
    def load(concurrency: int, client: float) -> Loaded:
        return Loaded(concurrency, 1, {}, 1.0, 0.1, 0.1, 0.1, client)

    loads = (load(1, 0.3), load(64, 0.95))
    assert LoadReport("x", loads, remote=True).bound == [64]
    assert LoadReport("x", loads, remote=False).bound == []


def test_a_real_servable_takes_it() -> None:
    model = servax.Model(
        lambda params, x: x * params["w"], inputs={"x": "float32[batch]"}, buckets={"batch": [1, 4]}, name="net"
    )
    with servax.load(model, params={"w": np.float32(2)}) as servable:
        inputs = {"x": np.ones(1, np.float32)}
        report = closed_loop(servable, "predict", inputs, concurrencies=[1, 4], seconds=0.1, remote=False)
    assert [load.concurrency for load in report.loads] == [1, 4]
    assert all(load.requests > 0 and not load.failed for load in report.loads)
