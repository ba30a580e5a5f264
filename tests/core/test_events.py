"""Events reach whoever listens, in order, and nobody else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from servax.core.events import (
    Event,
    Notice,
    StateChanged,
    StepFinished,
    StepStarted,
    emit,
    listening,
    step,
    subscribe,
)


def test_listeners_hear_events_until_they_leave():
    heard: list[Event] = []
    leave = subscribe(heard.append)
    emit(Notice("one"))
    leave()
    leave()
    emit(Notice("two"))
    assert heard == [Notice("one")]


def test_listeners_are_called_in_order_of_subscription():
    order: list[str] = []
    with listening(lambda event: order.append("first")), listening(lambda event: order.append("second")):
        emit(StateChanged("net", "READY"))
    emit(StateChanged("net", "DRAINING"))
    assert order == ["first", "second"]


def test_a_step_is_told_with_its_duration():
    heard: list[Event] = []
    with listening(heard.append), step("restore", total=3):
        emit(Notice("inside"))
    started, inside, finished = heard
    assert started == StepStarted("restore", 3)
    assert inside == Notice("inside")
    assert isinstance(finished, StepFinished)
    assert finished.step == "restore"
    assert finished.seconds >= 0


def test_a_step_that_raises_is_not_finished():
    heard: list[Event] = []
    with listening(heard.append), pytest.raises(ValueError, match="broken"), step("restore"):
        raise ValueError("broken")
    assert heard == [StepStarted("restore")]


def test_a_listener_that_fails_is_logged_once_and_disturbs_nobody(caplog: pytest.LogCaptureFixture):
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("the disk is full")

    with listening(broken), listening(heard.append):
        emit(Notice("one"))
        emit(Notice("two"))
    assert heard == [Notice("one"), Notice("two")]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("servax", "ERROR")
    assert "Notice(message='one'" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the disk is full"


def test_a_listener_that_fails_is_told_of_on_standard_error():
    """In a process of its own: without handlers, as in a program that configured no logging."""
    code = """
from servax.core.events import Notice, emit, subscribe
def broken(event): raise ValueError("the disk is full")
subscribe(broken)
emit(Notice("one")); emit(Notice("two"))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stderr.count("ValueError: the disk is full") == 1
    assert "Traceback" in child.stderr


def test_a_listener_that_is_subscribed_twice_leaves_once_at_a_time():
    heard: list[Event] = []
    listener = heard.append
    leave, leave_again = subscribe(listener), subscribe(listener)
    leave()
    emit(Notice("one"))
    leave_again()
    emit(Notice("two"))
    assert heard == [Notice("one")]
