"""A listening socket, bound before anything slow begins, so that a taken port is known at once."""

from __future__ import annotations

import errno
import socket

from servax.core.errors import StartupError, UsageError

_LAST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; port 0 picks a free one.

    Raises:
      UsageError: there is no such port.
      StartupError: the port is taken, or the address is not one of this machine.
    """
    if not 0 <= port <= _LAST_PORT:  # the system would take it modulo 65536
        raise UsageError("there is no such port", where="port", seen=str(port), expected=f"0 to {_LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: no form as a host name
        raise StartupError("the address cannot be listened at", where=f"{host}:{port}", seen=str(error)) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer that is gone is found out
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        taken = error.errno == errno.EADDRINUSE
        raise StartupError(
            "the port is taken by another process" if taken else "the address cannot be listened at",
            where=f"{host}:{port}",
            seen=error.strerror or str(error),
            remedy="stop that process, choose another port, or let port 0 pick a free one" if taken else None,
        ) from error
    return listening


def url_of(listening: socket.socket, *, secure: bool = False) -> str:
    """The URL at which a listening socket is reached from this machine."""
    scheme = "https" if secure else "http"
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
