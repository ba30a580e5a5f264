import asyncio
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servax.core.errors import InvalidInput, Overloaded, TooLarge
from servax.protocols.bodies import Limits, Reader, accepted_encoding, packed, unpacked
from servax.protocols.calls import Gone


def source(*chunks, gone=False):
    """What an ASGI server hands over: these chunks, and then a disconnection if `gone`."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "more_body": False})
    waiting = iter(messages)

    async def receive():
        return next(waiting)

    return receive


def read(*chunks, headers=(), gone=False, **limits):
    return asyncio.run(Reader(Limits(**limits)).read(dict(headers), source(*chunks, gone=gone)))


def bare(data):
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(data) + engine.flush()


PACKERS = [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", bare)]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=5))
def test_chunks_are_joined(chunks):
    assert read(*chunks) == b"".join(chunks)


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
@settings(deadline=None)
@given(data=st.binary(max_size=3000))
def test_bodies_are_unpacked(encoding, pack, data):
    assert unpacked(pack(data), encoding, 3000) == data


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
def test_large_bodies_are_unpacked_piece_by_piece(encoding, pack):
    data = bytes(range(256)) * (3 * 4096 + 1)
    assert unpacked(pack(data), encoding, len(data)) == data
    with pytest.raises(TooLarge):
        unpacked(pack(data), encoding, len(data) - 1)
    assert read(pack(data), headers=[(b"content-encoding", encoding.encode())]) == data


@pytest.mark.parametrize("size", [1 << 20, 2 << 20])
def test_bodies_of_whole_pieces_are_unpacked(size):
    noise = bytes(i * i % 251 for i in range(size))
    for encoding, pack in PACKERS:
        assert unpacked(pack(noise), encoding, size) == noise


def test_gzip_files_strung_together_are_one_body():
    assert unpacked(gzip.compress(b"ab") + gzip.compress(b"") + gzip.compress(b"c"), "gzip", 10) == b"abc"


def test_files_without_end_are_refused():
    assert unpacked(gzip.compress(b"a") * 4096, "gzip", 5000) == b"a" * 4096
    with pytest.raises(InvalidInput) as caught:
        unpacked(gzip.compress(b"") * 4097, "gzip", 5000)
    assert caught.value.seen == "more than 4096 files strung together"


@pytest.mark.parametrize(
    ("encoding", "body", "seen"),
    [
        ("gzip", b"hello", "incorrect header"),
        ("gzip", gzip.compress(b"hello")[:-9], "ends before"),
        ("gzip", gzip.compress(b"hello")[:-1], "ends before"),
        ("gzip", gzip.compress(b"hello") + b"x", ""),
        ("gzip", gzip.compress(b"hello")[:-8] + bytes(8), "incorrect data check"),
        ("deflate", zlib.compress(b"hello")[:-1], "ends before"),
        ("deflate", zlib.compress(b"hello") + b"x", "1 bytes follow"),
        ("deflate", b"\xff" * 10, ""),
    ],
)
def test_damaged_bodies_are_refused(encoding, body, seen):
    with pytest.raises(InvalidInput) as caught:
        unpacked(body, encoding, 1000)
    assert encoding in caught.value.what
    assert seen in caught.value.seen


@pytest.mark.parametrize(("encoding", "pack"), PACKERS)
def test_a_bomb_is_refused_before_it_takes_memory(encoding, pack):
    bomb = pack(bytes(256 * 1024 * 1024))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge) as caught:
            unpacked(bomb, encoding, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert f"{len(bomb)} bytes of {encoding}" in caught.value.seen
    assert "--max-body" in caught.value.remedy


def test_what_is_announced_too_large_is_not_read():
    async def receive():
        raise AssertionError

    for announced in (b"101", b"10000000000", b"9" * 400):
        with pytest.raises(TooLarge) as caught:
            asyncio.run(Reader(Limits(max_body=100)).read({b"content-length": announced}, receive))
        assert announced.decode()[:97] in caught.value.seen


def test_what_is_sent_too_large_is_read_no_further():
    for chunks in ([bytes(101)], [bytes(60), bytes(41)]):
        with pytest.raises(TooLarge):
            read(*chunks, max_body=100)
        assert read(*chunks, max_body=101) == bytes(101)


def test_other_encodings_are_refused_and_none_is_read():
    for name in (b"br", b"gzip, gzip", b"x" * 300):
        with pytest.raises(InvalidInput) as caught:
            read(b"x", headers=[(b"content-encoding", name)])
        assert (caught.value.where, caught.value.expected) == ("header Content-Encoding", "gzip, deflate or none")
        assert len(caught.value.seen) <= 100
    for name in (b"identity", b"", b" Identity "):
        assert read(b"x", headers=[(b"content-encoding", name)]) == b"x"
    assert read(gzip.compress(b"x"), headers=[(b"content-encoding", b"GZIP ")]) == b"x"


def test_a_client_that_goes_is_told_apart():
    for chunks in ([], [b"a"]):
        with pytest.raises(Gone):
            read(*chunks, gone=True)


def test_uploads_of_all_connections_share_their_room():
    reader = Reader(Limits(max_body=100, max_uploads=150))

    async def scene():
        reached, go_on = asyncio.Event(), asyncio.Event()
        sent = iter([{"type": "http.request", "body": bytes(100), "more_body": True}, {"type": "http.request"}])

        async def held():
            message = next(sent)
            if "body" not in message:
                reached.set()
                await go_on.wait()
            return message

        first = asyncio.create_task(reader.read({}, held))
        await reached.wait()
        with pytest.raises(Overloaded) as caught:
            await reader.read({}, source(bytes(50), bytes(1)))
        assert "151 bytes" in caught.value.seen
        assert await reader.read({}, source(bytes(50))) == bytes(50)
        go_on.set()
        assert len(await first) == 100
        assert await reader.read({}, source(bytes(50), bytes(50))) == bytes(100)

    asyncio.run(asyncio.wait_for(scene(), 60))


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_answers_are_packed_as_the_libraries_unpack_them(data):
    assert gzip.decompress(asyncio.run(packed(data, "gzip"))) == data
    assert zlib.decompress(asyncio.run(packed(data, "deflate"))) == data


def test_only_an_encoding_that_is_asked_for_alone_is_used():
    assert [accepted_encoding(text) for text in (b"gzip", b" Deflate;q=1", b"gzip, deflate", b"br", b"*", b"")] == [
        "gzip",
        "deflate",
        None,
        None,
        None,
        None,
    ]
