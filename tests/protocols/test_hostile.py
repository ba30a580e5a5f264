"""What a server must survive, over real sockets: each is refused clearly, and the server answers as before."""

import asyncio
import gzip
import json
import os
import resource
import threading

import numpy as np
import pytest

from echo_servable import EchoServable
from servax.protocols.dataplane import DataPlane
from servax.server.background import serve

URL = b"/v2/models/echo/infer"
GOOD = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}).encode()
MIB = 1 << 20


@pytest.fixture(scope="module")
def echo():
    return EchoServable()


@pytest.fixture(scope="module")
def port(echo):
    with serve(DataPlane([echo]), port=0, max_body="8MiB", body_timeout="300ms") as server:
        yield int(server.url.rsplit(":", 1)[1])


def head(length, *headers, target=URL):
    lines = [b"POST " + target + b" HTTP/1.1", b"host: x", b"content-length: %d" % length, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def run(scene):
    return asyncio.run(asyncio.wait_for(scene, 60))


async def answered(port, *pieces):
    """Status and JSON of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await answer(reader)
    finally:
        writer.close()


async def answer(reader):
    start = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    body = await reader.readexactly(length)
    return int(start.split(b" ")[1]), json.loads(body), start.lower()


def well(port):
    status, message, _ = run(answered(port, head(len(GOOD)), GOOD))
    return status == 200 and message["outputs"][0]["data"] == [1.0, 2.0]


def tensor(**fields):
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **fields}]}
    ).encode()


def raw(data):
    return b'{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": ' + data + b"}]}"


@pytest.mark.parametrize(
    ("body", "where", "seen"),
    [
        (raw(b"[1, NaN]"), "byte", "NaN"),
        (raw(b"[1, -Infinity]"), "byte", "-Infinity"),
        (raw(b"[" * 100_000 + b"]" * 100_000), "the body", "deeper"),
        (raw(b"[" * 200 + b"]" * 200), "x", "1 values at axis 1"),
        (b"[" * 200_000, None, "Expected `object`"),
        (b'{"a":' * 200_000, "the body", "deeper"),
        (tensor(shape=[2**32, 2**32]), "x", "2 values"),
        (tensor(shape=[2**63, 2]), "x", "shape [9223372036854775808, 2]"),
        (tensor(shape=[-1, 2]), "x", "shape [-1, 2]"),
        (tensor(shape=["1", 2]), "$.inputs[0].shape[0]", "Expected `int`"),
        (tensor(shape=[1.5, 2]), "$.inputs[0].shape[0]", "Expected `int`"),
        (tensor(shape={"a": 1}), "$.inputs[0].shape", "Expected `array`"),
        (tensor(data=[1, "2"]), "x", "'2'"),
        (tensor(data=[1, True]), "x", "True"),
        (tensor(data=[1, None]), "x", "null"),
        (tensor(data={"a": 1}), "x", "dict"),
        (tensor(data=[1, 1e39]), "x", "1e+39"),
        (tensor(datatype=7), "$.inputs[0].datatype", "Expected `str`"),
        (b'{"inputs": 7}', "$.inputs", "Expected `array`"),
        (b"\xff\xfe" * 10, None, ""),
        (b"", None, "an empty body"),
        (
            json.dumps({"inputs": [{"name": "n" * 100_000, "shape": [1], "datatype": "FP32", "data": [1]}]}).encode(),
            "x",
            "",
        ),
    ],
)
def test_bodies_that_are_wrong(port, body, where, seen):
    status, message, _ = run(answered(port, head(len(body)), body))
    assert status == 400
    details = message["details"]
    assert where is None or where in details["where"]
    assert seen in details["seen"]
    assert len(json.dumps(message)) < 2000
    assert well(port)


def test_ten_gigabytes_announced_are_refused_before_they_are_sent(port):
    status, message, start = run(answered(port, head(10_000_000_000)))
    assert (status, b"connection: close" in start) == (413, True)
    assert message["details"]["seen"] == "10000000000 bytes"
    assert well(port)


def test_a_body_without_an_end_is_read_no_further_than_the_limit(port):
    async def scene():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST " + URL + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

        async def send():
            while True:
                writer.write(b"%x\r\n" % MIB + bytes(MIB) + b"\r\n")
                await writer.drain()

        sending = asyncio.create_task(send())
        try:
            return await answer(reader)
        finally:
            sending.cancel()
            writer.close()

    status, _, start = run(scene())
    assert (status, b"connection: close" in start) == (413, True)
    assert well(port)


@pytest.mark.parametrize("size", [64, 512])
def test_bombs(port, size):
    bomb = gzip.compress(bytes(size * MIB), 9)
    assert len(bomb) < MIB
    before = peak()
    status, message, _ = run(answered(port, head(len(bomb), b"content-encoding: gzip"), bomb))
    assert (status, "unpacked more than" in message["details"]["seen"]) == (413, True)
    assert peak() - before < 64 * MIB
    assert well(port)


@pytest.mark.parametrize("piece", [b"1,", b"[],", b"{},", b'"",', b"1e999,", b"[[1]],"])
def test_the_most_values_a_body_can_hold_take_bounded_memory(port, piece):
    count = 7 * MIB // len(piece)
    body = b'{"inputs": [{"name": "x", "shape": [%d, 1], "datatype": "FP32", "data": [' % count
    body += piece * (count - 1) + piece[:-1] + b"]}]}"
    before = peak()
    status, _, _ = run(answered(port, head(len(body)), body))
    assert status in (200, 400, 413)
    assert peak() - before < 256 * MIB
    assert well(port)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("header", [b"99999", b"-5", b"x", b"9" * 5000, b"", b"1_0", b"\xb2"])
def test_lengths_of_the_json_that_are_none(port, header):
    body = GOOD + np.ones(2, np.float32).tobytes()
    status, message, _ = run(answered(port, head(len(body), b"inference-header-content-length: " + header), body))
    assert (status, message["details"]["where"]) == (400, "header Inference-Header-Content-Length")
    assert well(port)


def test_slow_bodies_are_given_up_and_hold_nobody_up(port):
    async def scene():
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _, writer in slow:
            writer.write(head(1000) + b"{")
            await writer.drain()
        status, _, _ = await answered(port, head(len(GOOD)), GOOD)
        assert status == 200
        for reader, writer in slow:
            told, message, start = await answer(reader)
            assert (told, b"connection: close" in start) == (408, True)
            assert message["details"]["expected"] == "the whole body within 0.3 s"
            assert await reader.read() == b""
            writer.close()

    run(scene())
    assert well(port)


def test_noise_is_no_request(port):
    async def scene(noise):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        writer.write_eof()
        told = await reader.read()
        writer.close()
        return told

    for noise in (os.urandom(10_000), b"\r\n" * 100, b"GET\r\n\r\n", b"\x16\x03\x01" * 100, head(5)[:20]):
        run(scene(noise))
        assert well(port)


def test_clients_that_went_away_never_reach_the_model():
    """As many requests as may wait, whose clients leave: none of them is run once the model gets to them."""

    class Held(EchoServable):
        def __init__(self):
            super().__init__()
            self.entered, self.cancelled = 0, 0
            self.changed = threading.Event()

        async def infer_async(self, request):
            self.entered += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    held = Held()
    number = 200

    async def scene(port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
        for _, writer in clients:
            writer.write(head(len(GOOD)) + GOOD)
        while held.entered < number:
            await asyncio.sleep(0)
        for _, writer in clients:
            writer.close()
        while held.cancelled < number:
            await asyncio.sleep(0)

    with serve(DataPlane([held]), port=0) as server:
        run(scene(int(server.url.rsplit(":", 1)[1])))
    assert (held.entered, held.cancelled) == (number, number)
