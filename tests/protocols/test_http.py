import asyncio
import gzip
import time
import zlib

import pytest

from servax.core.errors import ExecutionError, InvalidInput, NotReady, Overloaded, ServaxError, TooLarge
from servax.core.events import Notice, listening
from servax.protocols.bodies import Limits
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import Answer, Endpoint, Incoming, status_of


class Exchange:
    """One request of an ASGI server, with what was sent back."""

    def __init__(self, *chunks, headers=(), hold=False):
        self.scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
        self.sent = []
        last = len(chunks) - 1
        self._messages = [
            {"type": "http.request", "body": chunk, "more_body": hold or place < last}
            for place, chunk in enumerate(chunks)
        ]
        self.gone = asyncio.Event()

    async def receive(self):
        if self._messages:
            return self._messages.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def endpoint(plane=None, **limits):
    return Endpoint(plane or DataPlane(), Limits(**limits), lambda error: error.sentence().encode())


async def echo(incoming):
    return Answer(bytes(incoming.body), content_type=b"text/plain", headers=[(b"x-more", b"1")])


def answered(exchange, work=echo, point=None, **options):
    async def scene():
        await (point or endpoint())(exchange.scope, exchange.receive, exchange.send, work, **options)
        return exchange

    return asyncio.run(asyncio.wait_for(scene(), 60))


def test_an_answer_is_sent_whole_with_its_length():
    exchange = answered(Exchange(b"hel", b"lo"))
    assert exchange.status == 200
    assert exchange.headers == {b"content-type": b"text/plain", b"content-length": b"5", b"x-more": b"1"}
    assert exchange.body == b"hello"


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_an_answer_is_packed_when_its_client_asks(encoding, unpack):
    exchange = answered(Exchange(b"hello" * 100, headers=[(b"accept-encoding", encoding.encode())]))
    assert exchange.headers[b"content-encoding"] == encoding.encode()
    assert int(exchange.headers[b"content-length"]) == len(exchange.body) < 100
    assert unpack(exchange.body) == b"hello" * 100


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (InvalidInput("no"), 400, None),
        (NotReady("no"), 503, b"1"),
        (ExecutionError("no"), 500, None),
        (ServaxError("no"), 500, None),
    ],
)
def test_errors_are_answers_with_their_status(error, status, retry):
    async def work(incoming):
        raise error

    exchange = answered(Exchange(b""), work)
    assert (exchange.status, exchange.headers.get(b"retry-after"), exchange.body) == (status, retry, b"no.")
    assert status_of(error) == status


def test_retry_after_is_what_the_error_says_in_whole_seconds():
    error = Overloaded("full")
    error.retry_after = 2.1

    async def work(incoming):
        raise error

    assert answered(Exchange(b""), work).headers[b"retry-after"] == b"3"


def test_a_fault_of_ours_is_not_told_to_the_client():
    async def work(incoming):
        raise ZeroDivisionError("secret")

    told = []
    with listening(lambda event: told.append(event.message) if isinstance(event, Notice) else None):
        exchange = answered(Exchange(b""), work)
    assert exchange.status == 500
    assert b"secret" not in exchange.body
    assert "ZeroDivisionError" in told[0]


def test_a_body_that_is_not_read_to_its_end_closes_the_connection():
    exchange = answered(Exchange(bytes(60), bytes(60), bytes(60)), point=endpoint(max_body=100))
    assert (exchange.status, exchange.headers[b"connection"]) == (413, b"close")
    assert exchange.sent[-1] == {"type": "http.response.body", "body": b""}
    assert "too large" in exchange.body.decode()


def test_a_body_that_stays_away_is_a_408():
    exchange = answered(Exchange(b"{", hold=True), point=endpoint(body_timeout=0.01))
    assert (exchange.status, exchange.headers[b"connection"]) == (408, b"close")
    assert b"within 0.01 s" in exchange.body


def test_a_server_that_stops_takes_nothing_new_but_what_is_asked_of_its_health():
    plane = DataPlane()
    plane.closing = True
    exchange = answered(Exchange(b"x"), point=endpoint(plane))
    assert (exchange.status, exchange.headers[b"connection"]) == (503, b"close")
    assert exchange.headers[b"retry-after"] == b"1"
    assert answered(Exchange(b"x"), point=endpoint(plane), while_closing=True).body == b"x"


def test_a_client_that_goes_cancels_its_request_and_is_sent_nothing():
    cancelled = []

    async def scene():
        exchange = Exchange(b"x")

        async def work(incoming):
            exchange.gone.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(incoming.body)
                raise

        await endpoint()(exchange.scope, exchange.receive, exchange.send, work)
        return exchange

    assert asyncio.run(asyncio.wait_for(scene(), 60)).sent == []
    assert cancelled == [b"x"]
    uploading = Exchange(b"x", hold=True)
    uploading.gone.set()
    assert answered(uploading).sent == []


def test_no_task_is_made_for_a_request_that_is_answered_at_once():
    tasks = []

    async def work(incoming):
        tasks.append(len(asyncio.all_tasks()))
        return Answer(b"")

    async def scene():
        exchange = Exchange(b"x")
        await endpoint()(exchange.scope, exchange.receive, exchange.send, work)

    asyncio.run(scene())
    assert tasks == [1]


def test_an_endpoint_outlives_its_event_loop():
    point = endpoint(body_timeout=0.01)
    for _ in range(3):
        assert answered(Exchange(b"x"), point=point).body == b"x"
        assert answered(Exchange(b"{", hold=True), point=point).status == 408


def test_deadline_and_priority_come_in_headers():
    before = time.monotonic()
    incoming = Incoming({b"request-timeout-ms": b"1500", b"request-priority": b"-3"}, b"")
    assert before + 1.5 <= incoming.deadline <= time.monotonic() + 1.5
    assert incoming.priority == -3
    assert (Incoming({}, b"").deadline, Incoming({}, b"").priority) == (None, 0)


@pytest.mark.parametrize("text", [b"soon", b"-1", b"0", b"nan", b"inf", b"", b"\xff", b"9" * 400])
def test_deadlines_that_are_none_are_refused(text):
    with pytest.raises(InvalidInput) as caught:
        _ = Incoming({b"request-timeout-ms": text}, b"").deadline
    assert caught.value.where == "header Request-Timeout-Ms"
    assert len(caught.value.seen) <= 100


@pytest.mark.parametrize("text", [b"high", b"1.5", b"", b"9" * 400, b"9" * 5000])
def test_priorities_that_are_none_are_refused(text):
    with pytest.raises(InvalidInput) as caught:
        _ = Incoming({b"request-priority": text}, b"").priority
    assert caught.value.where == "header Request-Priority"


def test_too_large_is_a_413_also_for_what_is_unpacked():
    bomb = gzip.compress(bytes(1 << 20))
    exchange = answered(Exchange(bomb, headers=[(b"content-encoding", b"gzip")]), point=endpoint(max_body=10_000))
    assert exchange.status == TooLarge.status == 413
