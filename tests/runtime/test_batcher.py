import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import DeadlineExceeded, ExecutionError, NotReady, Overloaded, TooLarge, UsageError
from servax.core.events import BatchDone, RequestFailed, listening
from servax.runtime.batching import Batching
from servax.runtime.costs import PROVEN
from servax.runtime.lane import Lane
from servax.runtime.request import InferRequest
from servax.stages.buckets import Bucket


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


class Told(list):
    """The batches that ran while the block lasted."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = []
        self._listening = listening(self._hear)

    def _hear(self, event) -> None:
        if isinstance(event, BatchDone):
            self.append(event)
        elif isinstance(event, RequestFailed):
            self.failed.append(event.status)

    def __enter__(self):
        self._listening.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._listening.__exit__(*error)


async def while_held(servable, held, *requests: InferRequest) -> list:
    """Sends one request that occupies the device and then the others, in order; lets go, and gives their outcomes."""
    first = asyncio.create_task(servable.infer_async(InferRequest("predict", {"x": row(0)})))
    await asyncio.to_thread(held.entered.wait)
    others = []
    for request in requests:
        others.append(asyncio.create_task(servable.infer_async(request)))
        await asyncio.sleep(0)
    held.holding = False
    held.release.set()
    await first
    return await asyncio.gather(*others, return_exceptions=True)


def asks(*values: float, **changes) -> list[InferRequest]:
    return [InferRequest("predict", {"x": row(value)}, **changes) for value in values]


def test_requests_that_come_while_the_device_is_busy_run_together():
    servable, held = toys.held_toy()
    with servable, Told() as told:
        results = asyncio.run(while_held(servable, held, *asks(1, 2, 3)))
        assert [float(each.tensors["y"][0, 0]) for each in results] == [3, 5, 7]
    assert [(each.bucket, each.rows) for each in told] == [("batch=1,length=8", 1), ("batch=4,length=8", 3)]
    assert [each.version for each in results] == ["1"] * 3
    assert {each.bucket for each in results} == {"batch=4,length=8"}
    assert set(results[0].times) == {"queue", "pad", "transfer", "execute", "copy"}


def test_higher_priorities_run_first_and_equal_ones_in_order(monkeypatch):
    monkeypatch.setattr("servax.runtime.batcher._AGE", float("inf"))  # however slow the machine is, none is old
    servable, held = toys.held_toy()
    servable._costs._runs = dict.fromkeys(toys.GRID, PROVEN)
    servable._costs.set({key: 1.0 if key[1].sizes and key[1]["batch"] > 1 else 1e-6 for key in toys.GRID})
    priorities = {2: 0, 3: 0, 4: 1, 5: -1, 6: 1}  # by length, which tells them apart
    with servable, Told() as told:
        asyncio.run(
            while_held(
                servable,
                held,
                *(
                    InferRequest("predict", {"x": np.ones((1, length), np.float32)}, priority=priority)
                    for length, priority in priorities.items()
                ),
            )
        )
    assert [each.sizes[0]["length"] for each in told[1:]] == [4, 6, 2, 3, 5]


def test_a_request_whose_deadline_passed_in_the_queue_never_runs():
    servable, held = toys.held_toy()
    with servable, Told() as told:
        late, fine = asyncio.run(
            while_held(
                servable, held, *asks(1, deadline=time.monotonic() - 1), *asks(2, deadline=time.monotonic() + 60)
            )
        )
    assert isinstance(late, DeadlineExceeded)
    assert fine.tensors["y"][0, 0] == 5
    assert [each.rows for each in told] == [1, 1]
    assert told.failed == ["DeadlineExceeded"]


def test_a_thousand_requests_that_are_given_up_never_reach_the_device():
    servable, held = toys.held_toy()

    async def scene() -> None:
        first = asyncio.create_task(servable.infer_async(InferRequest("predict", {"x": row(0)})))
        await asyncio.to_thread(held.entered.wait)
        waiting = [asyncio.create_task(servable.infer_async(each)) for each in asks(*range(1000))]
        while servable.queued < 1000:
            await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (servable.queued, servable.in_flight, servable._batcher._nbytes) == (0, 1, 0)
        held.holding = False
        held.release.set()
        await first

    with servable, Told() as told:
        asyncio.run(scene())
        assert servable.predict(x=row(4))["y"][0, 0] == 9
    assert [each.rows for each in told] == [1, 1]
    assert told.failed == ["Cancelled"] * 1000


@pytest.mark.parametrize(
    "batching", [Batching(max_queue=2), Batching(max_queue_bytes=2 * 4)], ids=["requests", "bytes"]
)
def test_a_full_queue_refuses_and_says_when_to_come_again(batching):
    servable, held = toys.held_toy(batching=batching)
    with servable, Told() as told:
        *taken, refused = asyncio.run(while_held(servable, held, *asks(1, 2, 3)))
        assert [each.tensors["y"][0, 0] for each in taken] == [3, 5]
        assert isinstance(refused, Overloaded)
        assert (refused.status, refused.where) == (429, "toy")
        assert refused.seen == "2 requests and 8 bytes that wait"
        assert 0 < refused.retry_after < 60
        assert servable.predict(x=row(4))["y"][0, 0] == 9, "it takes requests again"
    assert told.failed == ["Overloaded"]


def test_a_refusal_looks_at_what_waits_under_the_lock_of_the_queue(monkeypatch):
    """The device's thread takes requests out meanwhile: what is looped over would change."""
    servable, held = toys.held_toy(batching=Batching(max_queue=1))
    lock, backlog, seen = servable._executor.queue.lock, Lane.backlog, []
    monkeypatch.setattr(Lane, "backlog", lambda lane: (seen.append(lock.locked()), backlog(lane))[1])
    with servable:
        _, *refused = asyncio.run(while_held(servable, held, *asks(1, 2, 3)))
    assert [type(each) for each in refused] == [Overloaded, Overloaded]
    assert seen
    assert all(seen)


def test_a_request_larger_than_the_queue_may_wait_alone():
    with toys.toy(batching=Batching(max_queue=1, max_queue_bytes=8)).warm() as servable:
        assert servable.predict(x=np.ones((4, 16), np.float32))["y"].shape == (4, 16)


def test_more_rows_than_the_largest_bucket_run_in_parts():
    x = np.arange(11 * 3, dtype=np.float32).reshape(11, 3)
    with toys.toy().warm() as servable, Told() as told:
        result = servable.infer(InferRequest("predict", {"x": x}))
        np.testing.assert_array_equal(result.tensors["y"], 2 * x + 1)
        ragged = [list(range(1, 2 + at % 5)) for at in range(9)]
        np.testing.assert_array_equal(servable.total(x=ragged)["sum"], [sum(each) for each in ragged])
        np.testing.assert_array_equal(asyncio.run(servable.predict_async(x=x))["y"], 2 * x + 1)
    assert result.bucket in ("batch=4,length=8", "batch=4,length=8 + batch=1,length=8")
    assert sum(each.rows for each in told) == 11 + 9 + 11
    assert all(each.rows <= each.capacity for each in told)
    assert set(result.times) == {"queue", "pad", "transfer", "execute", "copy"}


def test_rows_for_more_parts_than_are_made_are_refused():
    with toys.toy().warm() as servable, pytest.raises(TooLarge) as caught:
        servable.predict(x=np.ones((4 * 16_384 + 1, 1), np.float32))
    assert (caught.value.where, caught.value.seen) == ("batch", "batch=65537")
    assert caught.value.expected.startswith("batch at most 65536")


def test_parts_that_cannot_be_joined_are_an_error_of_their_request_alone(monkeypatch):
    def too_much(parts):
        raise MemoryError("Unable to allocate 64. GiB")

    with toys.toy().warm() as servable:
        monkeypatch.setattr(servable._lanes["predict"].joiner, "rejoin", too_much)
        with pytest.raises(ExecutionError) as caught:
            servable.predict(x=np.ones((9, 3), np.float32))
        assert "64. GiB" in caught.value.seen
        assert servable.predict(x=row(4))["y"][0, 0] == 9, "the device's thread goes on"


def test_the_parts_of_a_request_that_is_given_up_leave_together():
    servable, held = toys.held_toy()

    async def scene() -> None:
        first = asyncio.create_task(servable.infer_async(InferRequest("predict", {"x": row(0)})))
        await asyncio.to_thread(held.entered.wait)
        large = asyncio.create_task(servable.predict_async(x=np.ones((9, 3), np.float32)))
        late = InferRequest("predict", {"x": np.ones((9, 3), np.float32)}, deadline=time.monotonic() + 0.01)
        with pytest.raises(DeadlineExceeded):
            await servable.infer_async(late)
        assert servable.queued == 3
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        assert servable.queued == 0
        held.release.set()
        await first

    with servable:
        asyncio.run(scene())
        assert servable.in_flight == 0


def test_lengths_beyond_the_largest_bucket_are_refused_as_before():
    with toys.toy().warm() as servable, pytest.raises(TooLarge) as caught:
        servable.predict(x=np.ones((9, 17), np.float32))
    assert "length" in caught.value.where


def test_one_request_that_the_program_refuses_takes_no_other_along():
    def picky(program):
        def call(params, state, inputs):
            if (inputs[0] == 13).any():
                raise ValueError("thirteen")
            return program(params, state, inputs)

        return call

    one, four = ("predict", Bucket.of(batch=1, length=8)), ("predict", Bucket.of(batch=4, length=8))
    table = toys.with_program(four, picky(toys.table()[four].program))
    held = toys.Held(type(table[one])(picky(table[one].program), "jit"))
    table = type(table)({**table.programs, one: type(table[one])(held, "jit")})
    servable = toys.toy(table=table).warm()
    held.holding = True
    with servable:
        first, bad, last = asyncio.run(while_held(servable, held, *asks(1, 13, 2)))
    assert (first.tensors["y"][0, 0], last.tensors["y"][0, 0]) == (3, 5)
    assert isinstance(bad, ExecutionError)
    assert "thirteen" in bad.seen


def test_old_requests_run_even_while_more_important_ones_keep_coming():
    """Two threads keep the highest priority busy; the one below them is answered all the same."""
    with toys.toy(batching=Batching(max_delay=0)).warm() as servable, ThreadPoolExecutor(3) as pool:
        stop = threading.Event()

        def flood() -> int:
            sent = 0
            while not stop.is_set():
                servable.infer(InferRequest("predict", {"x": np.ones((4, 16), np.float32)}, priority=9))
                sent += 1
            return sent

        floods = [pool.submit(flood) for _ in range(2)]
        for _ in range(5):
            servable.infer(InferRequest("total", {"x": row(1, 2)}, priority=-9))
        stop.set()
        assert all(each.result() > 0 for each in floods)


def test_a_servable_that_is_closed_answers_who_still_waits():
    servable, held = toys.held_toy()
    with toys.toy("keeps the thread").warm(), ThreadPoolExecutor(3) as pool:
        running = pool.submit(servable.predict, x=row(1))
        held.entered.wait()
        waiting = pool.submit(servable.predict, x=row(2))
        while servable.queued < 1:
            assert not waiting.done()
        servable.close(timeout=0.01)
        with pytest.raises(NotReady):
            waiting.result()
        held.release.set()
        running.result()


def test_functions_of_one_servable_share_it():
    servable, held = toys.held_toy()
    with servable:
        results = asyncio.run(
            while_held(
                servable,
                held,
                InferRequest("total", {"x": row(1, 2)}),
                *asks(1),
                InferRequest("count", {"x": np.ones(4, np.float32)}),
                InferRequest("total", {"x": row(5)}),
                InferRequest("count", {"x": np.ones(4, np.float32)}, priority=9),
            )
        )
        totals = [float(results[at].tensors["sum"][0]) for at in (0, 3)]
        assert totals == [3, 5]
        seen = [float(results[at].tensors["seen"][0]) for at in (2, 4)]
        assert seen == [1, 2], "a state goes forward in order of arrival"


def test_limits_that_make_no_sense_are_refused():
    for wrong in ({"max_delay": -1.0}, {"max_delay": float("inf")}, {"max_queue": 0}, {"max_queue_bytes": 0}):
        with pytest.raises(UsageError):
            Batching(**wrong)


def test_a_full_batch_is_prepared_while_another_runs_and_one_with_room_is_not():
    """As on an accelerator, whose programs run beside this process: here the same way is taken on a CPU."""
    servable, held = toys.held_toy()
    servable._runner._on_host = False
    servable._executor._overlaps = True
    prepared = []
    put = servable._runner.put
    servable._runner.put = lambda buffers: (prepared.append(len(buffers[0])), put(buffers))[1]

    async def scene() -> list:
        tasks = [asyncio.create_task(servable.infer_async(each)) for each in asks(*range(1, 24))]
        return await asyncio.gather(*tasks)

    with servable, Told() as told:
        results = asyncio.run(while_held(servable, held, *asks(*range(1, 24))))
        again = asyncio.run(scene())
    assert [float(each.tensors["y"][0, 0]) for each in results] == [2 * value + 1 for value in range(1, 24)]
    assert [float(each.tensors["y"][0, 0]) for each in again] == [2 * value + 1 for value in range(1, 24)]
    assert prepared
    assert set(prepared) == {4}, "only batches that nothing later could make better"
    assert sum(each.rows for each in told) == 1 + 2 * 23
    assert all(each.rows <= each.capacity for each in told)


def test_a_batch_prepared_ahead_is_answered_when_the_thread_dies():
    class Death(BaseException):
        pass

    servable, held = toys.held_toy()
    servable._runner._on_host = False
    servable._executor._overlaps = True
    key = ("predict", Bucket.of(batch=4, length=8))
    whole = servable._table

    def dies(params, state, inputs):
        raise Death("out of luck")

    programs = {**whole.programs, key: type(whole[key])(dies, "jit")}
    servable._runner._table = type(whole)(programs)

    with servable:
        outcomes = asyncio.run(while_held(servable, held, *asks(*range(1, 13))))
    assert all(isinstance(each, ExecutionError) for each in outcomes)
    assert {each.seen for each in outcomes} == {"Death: out of luck"}
