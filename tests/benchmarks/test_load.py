"""The load generator, against servers of the tests' own: it must count what they count."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from measure.load import Plan, measure


class Http:
    """A server that answers each request by what `answer` gives for its body: status and body; None: hang up."""

    def __init__(self, answer: Callable[[bytes], tuple[int, bytes] | None], *, chunked: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.connections = 0
        self._answer = answer
        self._chunked = chunked

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(size)
                self.bodies.append(body)
                answer = self._answer(body)
                if answer is None:
                    break
                writer.write(b"HTTP/1.1 %d Whatever\r\n" % answer[0])
                if self._chunked:
                    half = len(answer[1]) // 2
                    parts = (answer[1][:half], answer[1][half:])
                    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts if part)
                    writer.write(b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
                else:
                    writer.write(b"Content-Length: %d\r\n\r\n" % len(answer[1]))
                    await writer.drain()
                    writer.write(answer[1])
        writer.close()


@contextlib.contextmanager
def running() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, for servers of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def listening(server: Http) -> Iterator[int]:
    """The port that the server listens on."""
    with running() as loop:
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.serve, "127.0.0.1", 0), loop).result(10)
        yield started.sockets[0].getsockname()[1]
        loop.call_soon_threadsafe(started.close)


def plan(port: int, bodies: list[bytes], **more: object) -> Plan:
    options: dict[str, object] = {"wire": "http", "path": "/predict", "order": list(range(len(bodies))), **more}
    return Plan(port=port, heads=[{} for _ in bodies], bodies=bodies, **options)


def echo(body: bytes) -> tuple[int, bytes]:
    return 200, b"<" + body + b">"


@pytest.mark.parametrize("chunked", [False, True])
def test_closed_loop_counts_what_the_server_counts(chunked: bool) -> None:
    server = Http(echo, chunked=chunked)
    with listening(server) as port:
        outcome = measure(plan(port, [b"a", b"bb", b"ccc"], seconds=0.5, concurrency=4))
    assert server.connections == 4
    # Each caller's last answer comes after the window has closed.
    assert len(server.bodies) - len(outcome.latencies) in range(5)
    assert not outcome.errors
    assert {body for _, body in outcome.kept} == {b"<a>", b"<bb>", b"<ccc>"}


def test_errors_are_counted_apart() -> None:
    server = Http(lambda body: echo(body) if body == b"good" else (503, b""))
    with listening(server) as port:
        outcome = measure(plan(port, [b"good", b"bad"], arrivals=[0.0, 0.01, 0.02, 0.03, 0.04], concurrency=2))
    assert len(outcome.latencies) == 3
    assert outcome.errors == {"status 503": 2}


def test_open_loop_sends_each_request_once() -> None:
    server = Http(echo)
    with listening(server) as port:
        outcome = measure(plan(port, [b"a", b"b"], arrivals=[index / 500 for index in range(100)], concurrency=3))
    assert len(server.bodies) == len(outcome.latencies) == 100
    assert server.bodies.count(b"a") == 50


def test_latency_of_the_open_loop_counts_from_the_scheduled_time() -> None:
    # One connection: the second request leaves only when the first is answered, and has waited since its time came.
    gate = threading.Event()
    threading.Timer(0.5, gate.set).start()
    server = Http(lambda body: (gate.wait(10), echo(body))[1])
    with listening(server) as port:
        outcome = measure(plan(port, [b"a"], arrivals=[0.0, 0.0, 0.0], concurrency=1))
    first, second, third = outcome.latencies
    assert first <= second <= third


def test_closed_connections_are_opened_again() -> None:
    answered: list[bytes] = []

    def answer(body: bytes) -> tuple[int, bytes] | None:
        answered.append(body)
        return None if len(answered) == 2 else echo(body)

    server = Http(answer)
    with listening(server) as port:
        outcome = measure(plan(port, [b"a"], arrivals=[0.0, 0.05, 0.1, 0.15], concurrency=1))
    assert server.connections == 2
    assert len(outcome.latencies) == 3
    assert outcome.errors == {"the connection was lost": 1}


def test_nobody_listens() -> None:
    with listening(Http(echo)) as port:
        pass
    outcome = measure(plan(port, [b"a"], seconds=0.1))
    assert not outcome.latencies
    assert list(outcome.errors.values()) == [1]


class Echo(grpc.GenericRpcHandler):
    """Bytes in, the same bytes out; what begins with `bad` is an error."""

    def __init__(self) -> None:
        self.requests = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != "/a.Service/Call":
            return None
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.requests += 1
        if request.startswith(b"bad"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        return request


@contextlib.contextmanager
def grpc_listening(handler: Echo) -> Iterator[int]:
    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    with running() as loop:
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield port
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)


def test_grpc_counts_what_the_server_counts() -> None:
    handler = Echo()
    bodies = [b"a", b"", b"b" * 40_000]  # the last takes three frames, and most of the connection's window
    with grpc_listening(handler) as port:
        outcome = measure(
            plan(port, bodies, wire="grpc", path="/a.Service/Call", arrivals=[i / 500 for i in range(150)], keep=1)
        )
    assert handler.requests == len(outcome.latencies) == 150
    assert not outcome.errors
    assert all(body == bodies[number] for number, body in outcome.kept)


def test_grpc_failures_are_counted() -> None:
    handler = Echo()
    with grpc_listening(handler) as port:
        outcome = measure(
            plan(port, [b"bad", b"good"], wire="grpc", path="/a.Service/Call", arrivals=[0.0, 0.01, 0.02, 0.03])
        )
        elsewhere = measure(plan(port, [b"good"], wire="grpc", path="/b.Service/Call", arrivals=[0.0]))
    assert len(outcome.latencies) == 2
    assert sum(outcome.errors.values()) == 2
    assert sum(elsewhere.errors.values()) == 1
