"""API keys: who a caller is, and what the key is good for. Every route is closed unless said otherwise.

A key travels as `Authorization: Bearer KEY` or `X-API-Key: KEY`, in gRPC as metadata of the same names.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from servax.core.errors import Forbidden, ServaxError, StartupError, Unauthorized
from servax.core.events import Notice, emit

_SHORTEST = 16
"""Characters that a key has at least."""

_KEY = re.compile(r"[\x21-\x7e]+")
"""What a header carries: printable ASCII without spaces."""

_LARGEST = 1 << 20
"""Bytes of a file of keys: as many as some 10,000 keys take."""

_REMEDY = "make a key: openssl rand -hex 32"

_ADMIN_METHODS = ("/RepositoryModelLoad", "/RepositoryModelUnload", "/HandleReloadConfigRequest")
"""Ends of the gRPC methods that change what the server serves."""

_HEALTH_METHODS = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""Beginnings of the gRPC methods that probes call."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a key belongs to.

    Attributes:
      name: from the file; a key without a name is called by its place there.
      admin: whether it opens what changes the server.
    """

    name: str
    admin: bool


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where keys come from.

    Attributes:
      file: one key a line, or `name:key`; blank lines and those that begin with `#` are passed over.
      admin_file: the same, for administrators.
      key: one more, from the environment.
      admin_key: one more for administrators.
    """

    file: Path | None = None
    admin_file: Path | None = None
    key: str | None = None
    admin_key: str | None = None


class Keys:
    """The keys of a server; only their digests are kept.

    Args:
      sources: where they come from.

    Attributes:
      required: whether a request needs a key at all.
      admin_required: whether what changes the server needs an administrator's.

    Raises:
      StartupError: a file cannot be read, has no key, or one that is too short.
    """

    def __init__(self, sources: KeySources) -> None:
        self._sources = sources
        self._salt = secrets.token_bytes(16)
        self.required = sources.file is not None or sources.key is not None
        self.admin_required = sources.admin_file is not None or sources.admin_key is not None
        self._seen = self._stamps()
        self._known = self._read()
        self._accepted: dict[bytes, Identity] = {}

    def refresh(self, *, force: bool = False) -> None:
        """Reads the files anew where they changed; a file that is no good leaves the former keys in force."""
        stamps = self._stamps()
        if stamps == self._seen and not force:
            return
        self._seen = stamps
        try:
            self._known = self._read()
        except ServaxError as error:
            emit(Notice(f"the former keys stay in force: {error.sentence()}", level="error"))
            return
        self._accepted = {}
        emit(Notice("API keys read", fields={"keys": str(len(self._known))}))

    def identify(self, presented: bytes) -> Identity | None:
        """Whom a key belongs to; takes as long for one that is nearly right as for any other that is wrong."""
        digest = self._digest(presented)
        if (identity := self._accepted.get(digest)) is not None:
            return identity
        for known, owner in self._known:  # all of them, whichever fits
            if hmac.compare_digest(known, digest):
                identity = owner
        if identity is not None:
            self._accepted[digest] = identity
        return identity

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._salt).digest()

    def _stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._sources.file, self._sources.admin_file))

    def _read(self) -> list[tuple[bytes, Identity]]:
        sources = self._sources
        keys = [
            *_file(sources.file, "api", admin=False),
            *_file(sources.admin_file, "admin", admin=True),
            *_single(sources.key, "SERVAX_API_KEY", Identity("api", False)),
            *_single(sources.admin_key, "SERVAX_ADMIN_KEY", Identity("admin", True)),
        ]
        # A key that is an administrator's as well counts as one: of two that fit, `identify` takes the last.
        return [(self._digest(key.encode()), owner) for key, owner in sorted(keys, key=lambda each: each[1].admin)]


class Access:
    """Decides about a request by its key.

    Args:
      keys: the server's.
      open_health: whether probes need none.
    """

    def __init__(self, keys: Keys, *, open_health: bool = False) -> None:
        self._keys = keys
        self.open_health = open_health

    def http(self, path: str, headers: Mapping[bytes, bytes]) -> Identity | None:
        """The caller of an HTTP request; None where none need be known.

        Raises:
          Unauthorized: no key, or an unknown one.
          Forbidden: not an administrator's, where that is needed.
        """
        return self._admit(
            _presented(headers.get(b"authorization"), headers.get(b"x-api-key")),
            admin="/repository/models/" in path,
        )

    def grpc(self, method: str, metadata: Mapping[str, str]) -> Identity | None:
        """The caller of a gRPC method (`/inference.GRPCInferenceService/ModelInfer`); errors as of `http`."""
        if self.open_health and method.startswith(_HEALTH_METHODS):
            return None
        return self._admit(_of(metadata), admin=method.endswith(_ADMIN_METHODS))

    def known(self, metadata: Mapping[str, str]) -> Identity | None:
        """Whom the key of a gRPC call belongs to, for the log; None without one that is known."""
        presented = _of(metadata)
        return None if presented is None else self._keys.identify(presented)

    def _admit(self, presented: bytes | None, *, admin: bool) -> Identity | None:
        keys = self._keys
        admin = admin and keys.admin_required
        if not admin and not keys.required:
            return None
        identity = None if presented is None else keys.identify(presented)
        if identity is None:
            raise Unauthorized(
                "the request carries no API key" if presented is None else "the API key is not known",
                expected="Authorization: Bearer KEY, or X-API-Key: KEY",
            )
        if admin and not identity.admin:
            raise Forbidden("this needs an administrator's key", seen=f"the key {identity.name!r}")
        return identity


def _presented(authorization: bytes | None, key: bytes | None) -> bytes | None:
    if authorization is not None and authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return key


def _of(metadata: Mapping[str, str]) -> bytes | None:
    authorization, key = metadata.get("authorization"), metadata.get("x-api-key")
    return _presented(None if authorization is None else authorization.encode(), None if key is None else key.encode())


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None for one that is not there."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _file(path: Path | None, kind: str, *, admin: bool) -> Iterator[tuple[str, Identity]]:
    if path is None:
        return
    lines = _text(path).splitlines()
    found = False
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            name, named, key = line.partition(":")
            identity = Identity(name.strip() if named else f"{kind}-{number}", admin)
            found = True
            yield _checked(key.strip() if named else line, f"{path}:{number}"), identity
    if not found:
        raise StartupError(
            "a file of keys has none", where=os.fspath(path), expected="one a line, or name:key", remedy=_REMEDY
        )


def _text(path: Path) -> str:
    """What stands in a file of keys; bytes of what is none are in no message."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise StartupError("a file of keys cannot be read", where=os.fspath(path), seen=str(error)) from error
    large = len(content) > _LARGEST
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    if large or text is None or "\0" in text:
        raise StartupError(
            "this is not a file of keys",
            where=os.fspath(path),
            seen=f"more than {_LARGEST} bytes" if large else "bytes that are no text",
            expected="text in UTF-8: one key a line, or name:key",
            remedy=_REMEDY,
        )
    return text


def _single(key: str | None, where: str, identity: Identity) -> Iterator[tuple[str, Identity]]:
    if key is not None:
        yield _checked(key, where), identity


def _checked(key: str, where: str) -> str:
    """The key itself is in no message."""
    if not _KEY.fullmatch(key):
        raise StartupError(
            "a key cannot travel in a header", where=where, expected="printable ASCII without spaces", remedy=_REMEDY
        )
    if len(key) < _SHORTEST:
        raise StartupError(
            "a key is too short",
            where=where,
            seen=f"{len(key)} characters",
            expected=f"at least {_SHORTEST}",
            remedy=_REMEDY,
        )
    return key
