import asyncio

import grpc
import pytest

from servax.core import errors
from servax.core.events import listening
from servax.protocols.grpc.status import abort, code_of, message_of


class Context:
    """Remembers how it was aborted."""

    def trailing_metadata(self):
        return (("x-request-id", "r1"),)

    async def abort(self, code, details, trailing):
        self.ended = (code, details, trailing)
        raise grpc.aio.AbortError


def aborted(error):
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(abort(context, error))
    return context.ended


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidInput, "INVALID_ARGUMENT"),
        (errors.Unauthorized, "UNAUTHENTICATED"),
        (errors.Forbidden, "PERMISSION_DENIED"),
        (errors.NotFound, "NOT_FOUND"),
        (errors.TooLarge, "OUT_OF_RANGE"),
        (errors.Overloaded, "RESOURCE_EXHAUSTED"),
        (errors.NotReady, "UNAVAILABLE"),
        (errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (errors.ExecutionError, "INTERNAL"),
        (errors.BundleError, "INTERNAL"),
    ],
)
def test_the_status_of_an_error(kind, code):
    assert code_of(kind("wrong")).name == code


def test_who_is_refused_for_load_is_told_when_to_come_again():
    full = errors.Overloaded("the queue is full", seen="4096 requests")
    full.retry_after = 0.25
    code, details, trailing = aborted(full)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "the queue is full; seen 4096 requests."
    assert trailing == (("x-request-id", "r1"), ("grpc-retry-pushback-ms", "250"))
    assert aborted(errors.InvalidInput("wrong"))[2] == (("x-request-id", "r1"),)


def test_a_fault_of_ours_is_said_in_full_to_the_operator_alone():
    told = []
    with listening(told.append):
        code, details, _ = aborted(ValueError("a secret path"))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in details
    assert "a secret path" in told[0].message
    assert "Traceback" in told[0].message or "ValueError" in told[0].message


@pytest.mark.parametrize("letter", ["a", "☃", "\ud800"])
def test_a_message_is_no_longer_than_a_status_may_be(letter):
    text = message_of(errors.InvalidInput(letter * 10_000))
    assert len(text.encode(errors="replace")) <= 2000
    assert text.endswith("...")
