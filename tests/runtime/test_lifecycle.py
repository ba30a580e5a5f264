import pytest

from servax.core.errors import NotReady, StartupError
from servax.core.events import StateChanged, listening
from servax.runtime.lifecycle import Lifecycle
from servax.runtime.servable import State


class Request:
    def __init__(self) -> None:
        self.error = None

    def abandon(self, error) -> None:
        self.error = error


def ready() -> Lifecycle:
    life = Lifecycle("net")
    life.move(State.WARMING)
    life.move(State.READY)
    return life


def test_every_move_is_told():
    seen = []
    with listening(lambda event: seen.append(event) if isinstance(event, StateChanged) else None):
        ready().fail("broken")
    assert [(each.servable, each.state, each.reason) for each in seen] == [
        ("net", "WARMING", None),
        ("net", "READY", None),
        ("net", "FAILED", "broken"),
    ]


def test_a_state_is_not_skipped():
    with pytest.raises(StartupError) as caught:
        Lifecycle("net").move(State.READY)
    assert (caught.value.seen, caught.value.expected) == ("LOADING", "WARMING")


def test_failure_stays_with_its_first_reason():
    life = ready()
    life.fail("first")
    life.fail("second")
    assert (life.state, life.reason) == (State.FAILED, "first")
    with pytest.raises(NotReady) as caught:
        life.admit(Request())
    assert caught.value.seen == "FAILED: first"


def test_draining_refuses_new_requests_and_answers_those_left_at_the_end():
    life, kept, done = ready(), Request(), Request()
    life.admit(kept)
    life.admit(done)
    life.release(done)
    assert life.in_flight == 1
    assert life.drain(0) == 1
    assert kept.error.seen == "DRAINING"
    assert done.error is None
    with pytest.raises(NotReady):
        life.admit(Request())


def test_draining_with_nothing_in_flight_ends_at_once():
    assert ready().drain(None) == 0


def test_draining_or_failing_what_is_unloaded_changes_nothing():
    life = ready()
    life.drain(None)
    life.move(State.UNLOADED)
    seen = []
    with listening(seen.append):
        life.drain(None)
        life.fail("too late")
    assert (life.state, life.reason, seen) == (State.UNLOADED, None, [])
