"""A server with tight limits, and clients that misbehave: by hand over sockets, which end as the limits say."""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Generator

import pytest

from servax.server.connections import ConnectionLimits
from servax.server.http import Server
from servax.server.sockets import listen

ANSWER = b"x" * (32 << 20)
REQUEST = b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n"


GONE = threading.Event()


async def app(scope, receive, send) -> None:
    if scope["path"] == "/held":
        while (await receive())["type"] != "http.disconnect":
            continue
        GONE.set()
    body = ANSWER if scope["path"] == "/large" else b"{}"
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(**limits) -> Generator[tuple[str, int]]:
    server = Server(app, tls=None, limits=ConnectionLimits(**limits))
    started = threading.Event()
    server.on_start = started.set
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        assert started.wait(60)
        yield address
    finally:
        server.stop(1)
        thread.join()


def until_closed(client: socket.socket) -> bytes:
    client.settimeout(60)
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(1 << 16):
            received += chunk
    return received


def answered(client: socket.socket) -> bytes:
    client.settimeout(60)
    received = b""
    while not received.endswith(b"\r\n\r\n{}"):
        chunk = client.recv(1 << 16)
        assert chunk, received
        received += chunk
    return received


def test_a_request_in_time_is_answered_and_the_connection_kept():
    with serving(head=30) as address, socket.create_connection(address) as client:
        for _ in range(2):
            client.sendall(REQUEST % b"")
            assert answered(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_arrive_closes_the_connection(sent):
    with serving(head=0.1) as address, socket.create_connection(address) as client:
        client.sendall(sent)
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


def test_a_later_head_has_its_time_too():
    with serving(head=0.2) as address, socket.create_connection(address) as client:
        client.sendall(REQUEST % b"")
        answered(client)
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert until_closed(client).startswith(b"HTTP/1.1 408 ")


def test_a_head_that_never_ends_is_refused():
    with serving(head_bytes=4096) as address, socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(10_000):
                client.sendall(b"x-%d: %b\r\n" % (number, b"y" * 512))
        answer = until_closed(client)
    assert answer == b"" or answer.startswith(
        b"HTTP/1.1 431 "
    )  # what a client that sends on sees is the system's choice


def test_an_idle_connection_is_closed():
    with serving(idle=1) as address, socket.create_connection(address) as client:
        client.sendall(REQUEST % b"")
        assert until_closed(client).endswith(b"{}")


def test_one_connection_too_many_is_told_so():
    with serving(number=2) as address, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
        for client in clients:
            client.sendall(REQUEST % b"")
            answered(client)
        with socket.create_connection(address) as third:
            refused = until_closed(third)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert b"at most 2" in refused
        clients[0].sendall(REQUEST % b"")
        answered(clients[0])
        clients[1].close()
        assert any(is_taken(address) for _ in range(1000))  # the server sees the end a moment after its client


def is_taken(address: tuple[str, int]) -> bool:
    with socket.create_connection(address) as client:
        client.settimeout(60)
        try:
            client.sendall(REQUEST % b"")
            return client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        except ConnectionError:
            return False


def test_a_client_that_does_not_take_its_answer_is_left():
    with serving(stalled=0.1) as address, socket.create_connection(address) as client:
        client.sendall(REQUEST % b"large")
        stalled = threading.Event()
        stalled.wait(2)  # the client's own pause, in which nothing is read
        assert len(until_closed(client)) < len(ANSWER)


def test_one_that_takes_it_slowly_is_not():
    with serving(stalled=5) as address, socket.create_connection(address) as client:
        client.sendall(REQUEST % b"large")
        client.settimeout(60)
        received = 0
        while received < len(ANSWER):
            received += len(client.recv(1 << 20))


@pytest.mark.parametrize("requests", [1, 3])
def test_a_request_is_told_that_its_client_went_though_others_wait_behind_it(requests, caplog):
    GONE.clear()
    with serving() as address:
        with socket.create_connection(address) as client:
            client.sendall(REQUEST % b"held" * requests)
        assert GONE.wait(60)
    assert not caplog.records


def test_requests_leave_no_reference_cycles():
    """What stays in cycles keeps its body until the collector runs, which then costs a tenth of every request."""
    from servax.protocols.dataplane import DataPlane
    from servax.server.gate import Gate

    sent = 0

    async def measured(scope, receive, send) -> None:
        nonlocal sent
        await app(scope, receive, send)
        sent += 1

    server = Server(Gate(measured, DataPlane()), tls=None, limits=ConnectionLimits())
    started = threading.Event()
    server.on_start = started.set
    listening = listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        assert started.wait(60)
        with socket.create_connection(listening.getsockname()) as client:
            for round_ in range(2):
                if round_:  # the first has made what is made once
                    gc.collect()
                    gc.disable()
                for _ in range(50):
                    client.sendall(REQUEST % b"")
                    answered(client)
            cycles = gc.collect()
    finally:
        gc.enable()
        server.stop(1)
        thread.join()
    assert sent == 100
    assert cycles < 50  # fewer than one for each request
