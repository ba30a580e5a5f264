import asyncio

import pytest

from servax.protocols.calls import Calls, Gone, Refusal


def run(scene):
    return asyncio.run(asyncio.wait_for(scene(), 60))


async def never():
    await asyncio.Event().wait()


def test_a_body_that_is_late_is_stopped_and_the_task_is_not_cancelled_any_more():
    async def scene():
        calls = Calls(asyncio.get_running_loop(), lambda: False, 0.01)
        call = calls.begin(never)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        reason = call.caught()
        calls.end(call)
        assert isinstance(reason, Refusal)
        assert (reason.status, reason.closes) == (408, True)
        assert asyncio.current_task().cancelling() == 0

    run(scene)


def test_only_bodies_that_still_arrive_are_stopped_when_the_server_closes():
    closing = False

    async def scene():
        nonlocal closing
        calls = Calls(asyncio.get_running_loop(), lambda: closing, 60)
        waiting, go_on = calls.begin(never), asyncio.Event()
        waiting.arrived()

        async def other():
            call = calls.begin(never)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return call.caught()

        task = asyncio.create_task(other())
        closing = True
        reason = await task
        assert isinstance(reason, Refusal)
        assert reason.status == 503
        assert waiting.stopped is None
        asyncio.get_running_loop().call_soon(go_on.set)
        await go_on.wait()
        calls.end(waiting)

    run(scene)


def test_a_client_that_goes_while_it_waits_stops_its_request():
    async def scene():
        calls = Calls(asyncio.get_running_loop(), lambda: False, 60)
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        call = calls.begin(receive)
        call.arrived()
        asyncio.get_running_loop().call_soon(gone.set)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert isinstance(call.caught(), Gone)
        calls.end(call)

    run(scene)


def test_a_cancellation_from_elsewhere_is_not_taken_for_ours():
    async def scene():
        calls = Calls(asyncio.get_running_loop(), lambda: False, 60)
        call = None

        async def work():
            nonlocal call
            call = calls.begin(never)
            await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.caught() is None

    run(scene)


def test_nobody_listens_for_a_request_that_has_its_answer():
    async def scene():
        calls = Calls(asyncio.get_running_loop(), lambda: False, 60)
        listening = asyncio.Event()

        async def receive():
            listening.set()
            await asyncio.Event().wait()

        call = calls.begin(receive)
        call.arrived()
        await listening.wait()
        assert len(asyncio.all_tasks()) == 2  # this one and the listener
        calls.end(call)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)

    asyncio.run(scene())
