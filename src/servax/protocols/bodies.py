"""Bodies of requests: read no further than a limit, and unpacked no further than the same limit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from servax.core.errors import InvalidInput, Overloaded, TooLarge
from servax.protocols.calls import Gone, Receive
from servax.protocols.wording import short

Body = bytes | bytearray

ENCODINGS = ("gzip", "deflate")
"""Content encodings that are read and written."""

_IN_THREAD = 256 * 1024
"""Bytes from which a body is packed and unpacked on another thread: about a millisecond's work."""

_STEP = 1 << 20

_MOST_FILES = 4096
"""Gzip files that one body may be strung together of: each costs time, and an empty one twenty bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask of a server before it is understood.

    Attributes:
      max_body: largest request body in bytes, as sent and unpacked.
      body_timeout: seconds in which a body must arrive.
      max_uploads: bytes of incomplete bodies held at once, of all connections.
    """

    max_body: int = 64 * 1024 * 1024
    body_timeout: float = 30.0
    max_uploads: int = 1024 * 1024 * 1024


class Reader:
    """Reads bodies under the limits of one server."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> Body:
        """The whole body, unpacked.

        A body that is there already is read without waiting.

        Raises:
          TooLarge: announced, sent or unpacked it is over the limit.
          InvalidInput: its encoding is another than `ENCODINGS`, or damaged.
          Overloaded: other connections' uploads take all the room there is.
          Gone: the client went away.
        """
        limit = self._limits.max_body
        announced = headers.get(b"content-length")
        if announced is not None and announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
            raise too_large(f"{short(announced.decode('ascii'))} bytes", limit)
        encoding = headers.get(b"content-encoding")
        packing = None if encoding is None else _packing(encoding)
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        body: Body = message.get("body", b"")
        if len(body) > limit:
            raise too_large(f"{len(body)} bytes", limit)
        if message.get("more_body", False):
            body = await self._rest(body, receive)
        if packing is None:
            return body
        if len(body) < _IN_THREAD:
            return unpacked(body, packing, limit)
        return await asyncio.to_thread(unpacked, body, packing, limit)

    async def _rest(self, first: Body, receive: Receive) -> bytearray:
        body = bytearray(first)
        self._held += len(body)
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                chunk: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                self._held += len(chunk)
                body += chunk
                if len(body) > self._limits.max_body:
                    raise too_large(f"{len(body)} bytes and more", self._limits.max_body)
                if self._held > self._limits.max_uploads:
                    raise Overloaded(
                        "too many large request bodies arrive at once",
                        seen=f"{self._held} bytes of bodies that are not complete",
                        expected=f"at most {self._limits.max_uploads}",
                        remedy="send it again later, or fewer rows at once",
                    )
            return body
        finally:
            self._held -= len(body)


def unpacked(body: Body, encoding: str, limit: int) -> bytearray:
    """The body before it was packed; no more than `limit` bytes are ever unpacked, and one chunk beyond.

    Raises:
      TooLarge: it is larger than that.
      InvalidInput: it is not of this encoding, or ends early.
    """
    out = bytearray()
    view = memoryview(body)
    place = files = 0
    try:
        while place < len(view):
            files += 1
            if files > _MOST_FILES:
                raise _damaged(encoding, f"more than {_MOST_FILES} files strung together")
            engine = zlib.decompressobj(_window(view[place : place + 2], encoding))
            while not engine.eof:
                if place == len(view):
                    raise _damaged(encoding, "it ends before its last block")
                piece = view[place : place + _STEP]
                place += len(piece)
                more: bytes | memoryview = piece
                while more or len(piece) == _STEP:
                    piece = engine.decompress(more, _STEP)
                    more = engine.unconsumed_tail
                    out += piece
                    if len(out) > limit:
                        raise too_large(f"{len(body)} bytes of {encoding}, unpacked more than {limit}", limit)
            place -= len(engine.unused_data)  # gzip files may be strung together
            if encoding != "gzip" and place < len(view):
                raise _damaged(encoding, f"{len(view) - place} bytes follow its end")
    except zlib.error as error:
        raise _damaged(encoding, str(error)) from None
    return out


async def packed(body: bytes, encoding: str) -> bytes:
    """The body in a content encoding: quickly rather than small."""
    if len(body) < _IN_THREAD:
        return _pack(body, encoding)
    return await asyncio.to_thread(_pack, body, encoding)


def accepted_encoding(accept: bytes) -> str | None:
    """The one encoding that a client asks for; None where it names none, several or others.

    Most HTTP libraries list all that they can read in every request. That says nothing of what is wanted, and packing
    numbers costs more time than it saves on all but slow networks.
    """
    name = accept.partition(b";")[0].strip().lower().decode("latin-1")
    return name if name in ENCODINGS else None


def too_large(seen: str, limit: int) -> TooLarge:
    """The error for a body over the limit."""
    return TooLarge(
        "the request body is too large",
        seen=seen,
        expected=f"at most {limit}, as sent and unpacked",
        remedy="send fewer rows at once, or start the server with a larger --max-body",
    )


def _pack(body: bytes, encoding: str) -> bytes:
    engine = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS + (16 if encoding == "gzip" else 0))
    return engine.compress(body) + engine.flush()


def _packing(header: bytes) -> str | None:
    name = header.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ENCODINGS:
        raise InvalidInput(
            "the body has an encoding that is not read",
            where="header Content-Encoding",
            seen=short(name),
            expected=f"{', '.join(ENCODINGS)} or none",
        )
    return name


def _window(data: memoryview, encoding: str) -> int:
    """Zlib's `wbits`: `deflate` means its own format (RFC 1950), but some send the bare one (RFC 1951)."""
    if encoding == "gzip":
        return zlib.MAX_WBITS + 16
    framed = len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return zlib.MAX_WBITS if framed else -zlib.MAX_WBITS


def _damaged(encoding: str, seen: str) -> InvalidInput:
    return InvalidInput(
        f"the body is not valid {encoding}", where="header Content-Encoding", seen=short(seen), expected=encoding
    )
