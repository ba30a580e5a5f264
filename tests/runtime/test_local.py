import asyncio
import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import numpy as np
import pytest

import serving_toys as toys
from servax.core import monitoring
from servax.core.errors import (
    CheckpointError,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    MemoryShortage,
    NotFound,
    NotReady,
    RecompileError,
    StartupError,
    TooLarge,
    UsageError,
)
from servax.core.events import BatchDone, RequestFailed, StateChanged, listening
from servax.runtime import executor as executors
from servax.runtime import memory
from servax.runtime.request import InferRequest
from servax.runtime.servable import State
from servax.stages.buckets import Bucket
from servax.targets.target import ProgramTable

COMPILE_EVENTS: list[str] = []
"""What jax.monitoring itself says, on any thread: not servax' own counting."""

jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **fields: COMPILE_EVENTS.append(event) if "/compile/" in event else None
)


@pytest.fixture
def servable():
    with toys.toy() as ready:
        yield ready.warm()


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_answers_are_the_function_s_own_cut_to_the_request(servable):
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    np.testing.assert_array_equal(servable.predict(x=x)["y"], 2 * x + 1)
    np.testing.assert_array_equal(servable.total(x=[[1, 2, 3], [4]])["sum"], [6, 4])


def test_three_hundred_mixed_requests_compile_nothing(servable):
    random = np.random.default_rng(0)
    before, ours = len(COMPILE_EVENTS), monitoring.counts(monitoring.SERVING)

    def one(index: int) -> bool:
        x = random_inputs[index]
        if index % 3 == 0:
            return np.allclose(servable.predict(x=x.tolist())["y"], 2 * x + 1, atol=1e-6)
        if index % 3 == 1:
            return np.allclose(servable.predict("total", x=x)["sum"], x.sum(1), rtol=1e-5, atol=1e-5)
        return servable.count(x=np.zeros(4, np.float32))["seen"].shape == (4,)

    random_inputs = [
        random.normal(size=(1 + index % 4, 1 + index % 16)).astype(np.float32).round(3) for index in range(300)
    ]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(300)))
    assert COMPILE_EVENTS[before:] == []
    assert monitoring.counts(monitoring.SERVING) == ours


def test_not_ready_before_it_is_warm():
    with toys.toy() as cold:
        assert cold.state is State.LOADING
        with pytest.raises(NotReady, match="toy is not ready") as caught:
            cold.predict(x=row(1))
        assert caught.value.seen == "LOADING"
        assert cold.progress.left[0] == "predict@batch=1,length=8"
        cold.warm()
        assert cold.progress.left == ()
        assert len(cold.costs) == len(toys.GRID)


def test_buckets_without_a_program_are_all_named():
    whole = toys.table()
    some = ProgramTable({key: whole[key] for key in whole if key[0] != "total"})
    with pytest.raises(StartupError) as caught:
        toys.toy(table=some)
    assert caught.value.where == "total@batch=1,length=16, total@batch=4,length=16"
    assert "build the bundle again" in caught.value.remedy


def test_a_program_that_would_compile_does_not_become_ready():
    key = ("total", Bucket.of(batch=1, length=16))
    cold = toys.toy(table=toys.with_program(key, jax.jit(toys.total_flat)))
    with pytest.raises(StartupError) as caught:
        cold.warm()
    assert caught.value.where == "total@batch=1,length=16"
    assert "total_flat" in caught.value.seen
    assert cold.state is State.FAILED
    assert "total@batch=1,length=16" in cold.reason
    with pytest.raises(NotReady, match="toy is not ready"):
        cold.predict(x=row(1))
    cold.close()


def test_a_call_that_would_compile_after_ready_is_refused_and_named():
    key = ("predict", Bucket.of(batch=1, length=8))
    good = toys.table()[key].program
    fresh = jax.jit(lambda params, state, inputs: ((), (inputs[0] * 3,)))
    warm = []

    def turns_bad(params, state, inputs):
        return (fresh if warm else good)(params, state, inputs)

    before = len(COMPILE_EVENTS)
    with toys.toy(table=toys.with_program(key, turns_bad)).warm() as servable:
        warm.append(True)
        with pytest.raises(RecompileError) as caught:
            servable.predict(x=row(1))
        assert caught.value.where == "predict@batch=1,length=8"
        assert "re-tracing function <lambda>" in caught.value.seen
        np.testing.assert_array_equal(servable.predict(x=[[1.0] * 9])["y"], [[3.0] * 9])
    assert COMPILE_EVENTS[before:] == []


def test_a_program_that_fails_fails_its_request_alone():
    key = ("predict", Bucket.of(batch=1, length=8))
    good, faults = toys.table()[key].program, []

    def breaks_once(params, state, inputs):
        if faults:
            raise RuntimeError(faults.pop())
        return good(params, state, inputs)

    with toys.toy(table=toys.with_program(key, breaks_once)).warm() as servable:
        faults.append("the wires are crossed")
        with pytest.raises(ExecutionError) as caught:
            servable.predict(x=row(1))
        assert not isinstance(caught.value, RecompileError)
        assert caught.value.where == "predict@batch=1,length=8"
        assert "the wires are crossed" in caught.value.seen
        np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_swap_under_load_fails_nothing_and_compiles_nothing(servable):
    before, stop, swapped = len(COMPILE_EVENTS), threading.Event(), threading.Event()
    warm = threading.Barrier(5)

    def client() -> list[tuple[bool, float]]:
        seen = []
        warm.wait()
        while not stop.is_set():
            began_after_swap = swapped.is_set()
            seen.append((began_after_swap, float(servable.predict(x=row(10))["y"][0, 0])))
        return seen

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        warm.wait()
        report = servable.swap("5,-1")
        swapped.set()
        for _ in range(20):
            assert servable.predict(x=row(10))["y"][0, 0] == 49
        stop.set()
        answers = [answer for each in clients for answer in each.result()]
    assert {value for _, value in answers} <= {21, 49}
    assert {value for after, value in answers if after} <= {49}
    assert (report.leaves, report.bytes, report.checkpoint) == (2, 8, "5,-1")
    assert COMPILE_EVENTS[before:] == []


def test_swap_frees_the_old_parameters():
    device = jax.devices()[0]
    old = {path: jax.device_put(leaf, device) for path, leaf in toys.params().items()}
    watched = [weakref.ref(leaf) for leaf in old.values()]
    with toys.toy(params=old) as servable:
        servable.warm()
        del old
        servable.predict(x=row(1))
        servable.swap("3,0")
        servable.predict(x=row(1))
        gc.collect()
        assert [ref() for ref in watched] == [None, None]


def test_swap_lists_every_difference():
    def swapper(checkpoint, /, **options):
        return {("layer", "bias"): np.zeros(3, np.float32), ("layer", "scale"): np.zeros((), np.int32)}

    with toys.toy(swapper=swapper).warm() as servable:
        with pytest.raises(CheckpointError) as caught:
            servable.swap("elsewhere")
        assert "parameter 'layer/bias': shape (3,), made for ()" in caught.value.seen
        assert "parameter 'layer/scale': dtype int32, made for float32" in caught.value.seen
        np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_swap_names_missing_and_extra_leaves():
    servable = toys.toy(swapper=lambda checkpoint, /: {("layer", "other"): np.zeros(())}).warm()
    with servable, pytest.raises(CheckpointError) as caught:
        servable.swap("elsewhere")
    assert caught.value.seen == "missing layer/bias; missing layer/scale; not in the model: layer/other"


def test_swap_without_room_is_refused_with_numbers(servable, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 7)
    with pytest.raises(MemoryShortage) as caught:
        servable.swap("5,0")
    assert "7 B free (7 bytes)" in caught.value.seen
    assert "8 bytes" in caught.value.expected
    np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_swap_needs_a_swapper_and_readiness():
    with toys.toy(swapper=None) as cold, pytest.raises(UsageError, match="cannot swap"):
        cold.swap("1,1")
    with toys.toy() as cold, pytest.raises(NotReady):
        cold.swap("1,1")


def test_cancelled_requests_never_reach_the_device():
    servable, held = toys.held_toy()
    ran = []
    original = held.loaded.program

    async def scene() -> None:
        first = asyncio.create_task(servable.predict_async(x=row(1)))
        await asyncio.to_thread(held.entered.wait)
        second = asyncio.create_task(servable.predict_async(x=row(2)))
        third = asyncio.create_task(servable.predict_async(x=row(3)))
        while servable.in_flight < 3:
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.release.set()
        assert (await first)["y"][0, 0] == 3
        assert (await third)["y"][0, 0] == 7

    held.loaded = type(held.loaded)(
        lambda p, s, i: (ran.append(float(jax.device_get(i[0])[0, 0])), original(p, s, i))[1], "jit"
    )
    with servable:
        asyncio.run(scene())
    assert ran == [1.0, 3.0]


def test_a_text_request_cancelled_while_it_is_tokenized_never_reaches_the_device(tmp_path):
    servable = toys.reading_toy(toys.word_tokenizer(tmp_path, {"a": 1, "b": 2, "[UNK]": 0}))
    tokenize = servable._processing["total"]
    entered, go, runs = threading.Event(), threading.Event(), []

    class Slow:
        texts, needed = tokenize.texts, staticmethod(tokenize.needed)

        def __call__(self, tensors):
            entered.set()
            assert go.wait(60)
            return tokenize(tensors)

    original = servable._runner.run
    servable._runner.run = lambda *arguments, **more: (runs.append(1), original(*arguments, **more))[1]
    servable._processing["total"] = Slow()

    async def scene() -> None:
        asking = asyncio.create_task(servable.predict_async(text=["a b"]))
        await asyncio.to_thread(entered.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go.set()

    with servable:
        asyncio.run(scene())  # ends after the thread that tokenizes
        assert servable.in_flight == 0
        assert servable.predict(text=["a b"])["sum"][0] == 3
    assert runs == [1]


def test_a_deadline_is_answered_while_the_device_is_busy():
    servable, held = toys.held_toy()
    with servable, ThreadPoolExecutor(2) as pool:
        first = pool.submit(servable.predict, x=row(1))
        held.entered.wait()
        request = InferRequest("predict", {"x": row(2)}, deadline=time.monotonic() + 0.02)
        with pytest.raises(DeadlineExceeded) as caught:
            servable.infer(request)
        assert caught.value.where == "predict@batch=1,length=8"
        with pytest.raises(DeadlineExceeded):
            asyncio.run(servable.infer_async(InferRequest("predict", {"x": row(2)}, deadline=time.monotonic() + 0.02)))
        held.release.set()
        assert first.result()["y"][0, 0] == 3


def test_an_expired_request_is_refused_on_an_idle_device(servable):
    with pytest.raises(DeadlineExceeded):
        servable.infer(InferRequest("predict", {"x": row(1)}, deadline=time.monotonic() - 1))


def test_closing_lets_running_requests_finish_and_refuses_new_ones():
    servable, held = toys.held_toy()
    states = []
    with (
        ThreadPoolExecutor(2) as pool,
        listening(lambda e: states.append(e.state) if isinstance(e, StateChanged) else 0),
    ):
        running = pool.submit(servable.predict, x=row(1))
        held.entered.wait()
        closing = pool.submit(servable.close)
        while servable.state is not State.DRAINING:
            assert not closing.done()
        with pytest.raises(NotReady) as caught:
            servable.predict(x=row(1))
        assert caught.value.seen == "DRAINING"
        assert not closing.done()
        held.release.set()
        assert running.result()["y"][0, 0] == 3
        closing.result()
    assert servable.state is State.UNLOADED
    assert states == ["DRAINING", "UNLOADED"]
    servable.close()


def test_closing_from_several_threads_gives_the_shared_thread_back_once():
    with toys.toy("other").warm() as other:
        for _ in range(20):
            shared, both = toys.toy().warm(), threading.Barrier(2)
            draining = shared._lifecycle.drain

            def drain(timeout, draining=draining, both=both):
                left = draining(timeout)
                both.wait()  # both are past the drain before either goes on
                return left

            shared._lifecycle.drain = drain
            with ThreadPoolExecutor(2) as pool:
                for closed in [pool.submit(shared.close) for _ in range(2)]:
                    closed.result()
            assert shared.state is State.UNLOADED
        assert other.predict(x=row(4))["y"][0, 0] == 9


def test_a_drain_that_runs_out_of_time_answers_those_that_wait():
    servable, held = toys.held_toy()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(servable.predict, x=row(1))
        held.entered.wait()
        waiting = pool.submit(servable.predict, x=row(2))
        while servable.in_flight < 2:
            assert not waiting.done()
        assert servable.drain(0.01) == 2
        with pytest.raises(NotReady, match="not ready"):
            waiting.result()
        held.release.set()
        assert running.result()["y"][0, 0] == 3
    servable.close()


def aligned(*shape: int) -> np.ndarray:
    """A float32 array on a 64-byte boundary, which JAX takes over without a copy on the CPU."""
    memory_ = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
    start = -memory_.ctypes.data % 64
    return memory_[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


def test_arrays_belong_to_the_caller_after_the_answer(servable):
    x = aligned(4, 16)
    x[...] = 1
    first = servable.predict(x=x)["y"]
    expected = np.full((4, 16), 3, np.float32)
    x[...] = 7
    np.testing.assert_array_equal(first, expected)
    first[...] = 0
    np.testing.assert_array_equal(servable.predict(x=np.ones((4, 16), np.float32))["y"], expected)
    second = servable.predict(x=np.ones((4, 16), np.float32))["y"]
    servable.predict(x=np.zeros((4, 16), np.float32))
    np.testing.assert_array_equal(second, expected)


def test_state_kept_from_an_input_is_no_view_of_the_caller_s_array():
    keep = toys.compiled(
        lambda params, state, inputs: ((inputs[0],), (state[0],)),
        toys.COUNT,
        Bucket(()),
        jax.devices()[0],
        stateful=True,
    )
    with toys.toy(table=toys.with_program(("count", Bucket(())), keep.program)).warm() as servable:
        x = aligned(4)
        x[...] = 5
        servable.count(x=x)
        x[...] = 9
        kept = servable.count(x=np.zeros(4, np.float32))["seen"]
        np.testing.assert_array_equal(kept, [5, 5, 5, 5])


def test_state_accumulates_and_starts_at_zeros(servable):
    one = np.ones(4, np.float32)
    assert servable.count(x=one)["seen"][0] == 1, "warming left something behind"
    first = servable.count(x=one)["seen"]
    servable.count(x=one)
    np.testing.assert_array_equal(first, [2, 2, 2, 2])


def test_a_failed_step_starts_the_state_anew_and_says_so():
    key, faults = ("count", Bucket(())), []
    good = toys.table()[key].program

    def breaks_once(params, state, inputs):
        out = good(params, state, inputs)
        if faults:
            raise RuntimeError(faults.pop())
        return out

    one = np.ones(4, np.float32)
    with toys.toy(table=toys.with_program(key, breaks_once)).warm() as servable:
        assert servable.count(x=one)["seen"][0] == 1
        faults.append("after the state was donated")
        with pytest.raises(ExecutionError) as caught:
            servable.count(x=one)
        assert "The state was lost and starts again at zeros." in caught.value.remedy
        assert servable.count(x=one)["seen"][0] == 1


def test_a_dead_thread_answers_everyone_and_the_next_servable_has_a_new_one():
    class Death(BaseException):
        pass

    servable, held = toys.held_toy()

    def dies(params, state, inputs):
        raise Death("out of luck")

    held.loaded = type(held.loaded)(dies, "jit")
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(servable.predict, x=row(1))]
        held.entered.wait()
        futures += [pool.submit(servable.predict, x=row(2)) for _ in range(2)]
        while servable.in_flight < 3:
            assert not any(future.done() for future in futures)
        held.release.set()
        for future in futures:
            with pytest.raises(ExecutionError, match="thread that runs the device has died") as caught:
                future.result()
            assert caught.value.seen == "Death: out of luck"
    assert servable.state is State.FAILED
    assert "out of luck" in servable.reason
    with pytest.raises(NotReady) as refused:
        servable.predict(x=row(1))
    assert "FAILED" in refused.value.seen
    with toys.toy().warm() as another:
        assert another.predict(x=row(1))["y"][0, 0] == 3
    servable.close()


def test_two_servables_share_the_thread_of_their_device(servable):
    with toys.toy("other", params=toys.params(1.0, 0.0)).warm() as other:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("servax-cpu")]
        assert names == ["servax-cpu-0"]
        assert other.predict(x=row(4))["y"][0, 0] == 4
    assert servable.predict(x=row(4))["y"][0, 0] == 9


def test_a_servable_that_is_dropped_gives_back_what_it_held():
    device = jax.devices()[0]

    def holders() -> int:
        return executors._executors.get(device, (None, 0))[1]

    before = holders()
    dropped = toys.toy().warm()
    watched = weakref.ref(dropped)
    assert holders() == before + 1
    dropped.predict(x=row(1))
    del dropped
    gc.collect()
    assert watched() is None
    for thread in threading.enumerate():
        if thread.name == "servax-release":
            thread.join(60)
    assert holders() == before


def test_requests_are_told_with_their_outcome(servable):
    told = []
    with listening(lambda event: told.append(event) if isinstance(event, (BatchDone, RequestFailed)) else None):
        servable.predict(x=np.ones((3, 2), np.float32))
        with pytest.raises(InvalidInput):
            servable.predict(x=np.ones(3, np.float32))
        with pytest.raises(TooLarge):
            servable.predict(x=np.ones((1, 17), np.float32))
    batch, *failed = told
    assert (batch.servable, batch.version, batch.function) == ("toy", "1", "predict")
    assert (batch.bucket, batch.capacity, batch.rows) == ("batch=4,length=8", 4, 3)
    assert batch.sizes == ({"batch": 3, "length": 2},)
    assert set(batch.steps) == {"pad", "transfer", "execute", "copy"}
    assert [(each.status, each.version) for each in failed] == [("InvalidInput", "1"), ("TooLarge", "1")]


def test_a_listener_that_fails_takes_no_answer_away(servable):
    def broken(event):
        raise ValueError("the log is full")

    with listening(broken):
        np.testing.assert_array_equal(servable.predict(x=row(1))["y"], [[3]])


def test_unknown_functions_are_named_with_those_there_are(servable):
    with pytest.raises(NotFound) as caught:
        servable.predict("embed", x=row(1))
    assert caught.value.expected == "count or predict or total"
    with pytest.raises(AttributeError, match=r"no attribute 'embed'.*there are: count, predict, total"):
        servable.embed(x=row(1))


def test_many_at_once_from_one_event_loop(servable):
    async def scene() -> list[float]:
        answers = await asyncio.gather(*(servable.predict_async(x=row(float(i))) for i in range(50)))
        return [float(each["y"][0, 0]) for each in answers]

    assert asyncio.run(scene()) == [2 * i + 1 for i in range(50)]


def test_the_application_comes_from_the_factory(servable):
    with pytest.raises(UsageError, match="without an application"):
        _ = servable.app
    with toys.toy(app_factory=lambda made: ("app", made.name)) as other:
        assert other.app == ("app", "toy")


@pytest.mark.parametrize("rows", [1, 9], ids=["whole", "in parts"])
@pytest.mark.parametrize("late", [False, True], ids=["answered", "refused"])
def test_a_request_that_has_its_answer_is_freed_without_the_collector(rows, late):
    """Large bodies of a server that refuses many would stay until a collection otherwise."""

    async def awaited(request: InferRequest) -> None:
        with contextlib.suppress(DeadlineExceeded):
            await servable.infer_async(request)

    def waited(request: InferRequest) -> None:
        with contextlib.suppress(DeadlineExceeded):
            servable.infer(request)

    def tensors_of(ask) -> weakref.ref:
        x = np.ones((rows, 3), np.float32)
        deadline = time.monotonic() - 1 if late else None
        ask(InferRequest("predict", {"x": x}, owned=True, deadline=deadline))
        return weakref.ref(x)

    with toys.toy().warm() as servable:
        gc.collect()
        gc.disable()
        try:
            left = [tensors_of(waited), tensors_of(lambda request: asyncio.run(awaited(request)))]
            servable._executor.call(lambda: None)  # the device's thread has let go of the batch before
            assert [each() for each in left] == [None, None]
        finally:
            gc.enable()
