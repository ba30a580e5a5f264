import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from servax.core.errors import NotReady
from servax.runtime import executor as executors

DEVICE = jax.devices()[0]


def test_calls_run_on_one_thread_and_give_back_what_they_return_or_raise():
    executor = executors.acquire(DEVICE)
    try:
        names = {executor.call(lambda: threading.current_thread().name) for _ in range(3)}
        assert names == {"servax-cpu-0"}
        with pytest.raises(KeyError, match="lost"):
            executor.call(lambda: {}["lost"])
        assert executor.alive
    finally:
        executors.release(executor)


def test_the_thread_lives_as_long_as_someone_holds_it():
    first, second = executors.acquire(DEVICE), executors.acquire(DEVICE)
    assert first is second
    executors.release(first)
    assert second.alive
    executors.release(second)
    assert not second.alive
    with pytest.raises(NotReady, match="thread has ended"):
        second.call(lambda: 1)


def test_work_that_waits_when_it_is_closed_is_answered():
    executor = executors.Executor(DEVICE)
    running, go = threading.Event(), threading.Event()
    outcomes = []

    def hold() -> None:
        running.set()
        assert go.wait(60)

    def ask(function) -> None:
        try:
            outcomes.append(executor.call(function))
        except NotReady as error:
            outcomes.append(error)

    first = threading.Thread(target=ask, args=(hold,))
    first.start()
    running.wait()
    second = threading.Thread(target=ask, args=(lambda: "never",))
    second.start()
    while executor.waiting == 0:
        assert second.is_alive()
    closing = threading.Thread(target=executor.close)
    closing.start()
    second.join()
    assert isinstance(outcomes[0], NotReady)
    go.set()
    first.join()
    closing.join()
    assert outcomes[1] is None


def test_the_guard_is_on_from_the_first_call():
    import jax.numpy as jnp

    executor = executors.acquire(DEVICE)
    try:
        with pytest.raises(RuntimeError, match="no_tracing"):
            executor.call(lambda: jnp.ones(17))
    finally:
        executors.release(executor)


class Deadly:
    """Work that ends the thread."""

    def __init__(self) -> None:
        self.error = None
        self.failed = threading.Event()

    def begin(self) -> bool:
        return True

    def run(self, meanwhile) -> None:
        raise SystemExit("out of luck")

    def fail(self, error) -> None:
        self.error = error
        self.failed.set()


def test_a_listener_that_fails_keeps_no_one_from_hearing_that_the_thread_died(caplog):
    executor, heard, work = executors.Executor(DEVICE), [], Deadly()

    def broken(reason: str) -> None:
        raise ValueError("no ears")

    executor.on_death(broken)
    executor.on_death(heard.append)
    executor.put(work)
    assert work.failed.wait(60)
    assert heard == ["SystemExit: out of luck"]
    assert work.error.seen == "SystemExit: out of luck"
    assert "no ears" in caplog.text


def test_a_forked_process_is_told_that_it_cannot_predict():
    """In a child of its own: a fork of a process with JAX's threads is what the message warns of."""
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import serving_toys as toys
from servax.core.errors import NotReady

servable = toys.toy().warm()
reading, writing = os.pipe()
if os.fork() == 0:
    try:
        servable.predict(x=np.ones((1, 3), np.float32))
    except NotReady as error:
        os.write(writing, error.what.encode())
    os._exit(0)
os.close(writing)
print(os.read(reading, 1000).decode())
os.wait()
"""
    command = [sys.executable, "-W", "ignore", "-c", script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "forked" in done.stdout
