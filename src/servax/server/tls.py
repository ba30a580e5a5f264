"""TLS for HTTP and gRPC from the same files, read anew when they change; version 1.2 at least."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servax.core.errors import StartupError
from servax.core.events import Notice, emit

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What TLS needs, all PEM.

    Attributes:
      certificate: with its chain.
      key: its private key, not encrypted.
      client_ca: authorities whose certificates a client must show; None: it need not show one.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None


class Tls:
    """The server's side of TLS.

    Attributes:
      context: for HTTP; new connections see renewed files.

    Raises:
      StartupError: a file cannot be read, or the key is not the certificate's.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = self._look()
        self._present = _context(files)
        self.context = _context(files)
        # A context forgets no authority, so each connection is given the present one as a whole when it says hello.
        self.context.sni_callback = self._give_present

    def refresh(self, *, force: bool = False) -> None:
        """Takes renewed files, whole; those that do not fit one another leave the former in force."""
        stamps = self._look()
        if stamps == self._stamps and not force:
            return
        try:
            self._present = _context(self._files)
        except StartupError as error:  # also while one of two files is new: the next look sees both
            emit(Notice(f"the former certificate stays in force: {error.sentence()}", level="error"))
        else:
            emit(Notice("certificate read", fields={"file": os.fspath(self._files.certificate)}))
        self._stamps = stamps

    def _give_present(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._present

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC."""
        import grpc

        current = self._grpc_configuration()

        def renewed() -> Any:
            try:
                return self._grpc_configuration()
            except OSError:
                return None  # the former stays in force; `refresh` says so

        return grpc.dynamic_ssl_server_credentials(
            current, renewed, require_client_authentication=self._files.client_ca is not None
        )

    def _grpc_configuration(self) -> Any:
        import grpc

        files = self._files
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        authorities = None if files.client_ca is None else files.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def _look(self) -> tuple[int, ...]:
        files = (self._files.certificate, self._files.key, self._files.client_ca)
        try:
            return tuple(path.stat().st_mtime_ns for path in files if path is not None)
        except OSError:
            return ()


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load("the certificate and its key do not load", context.load_cert_chain, files.certificate, files.key)
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session shows no certificate, so none is handed out: a client is looked at each time.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        _load("the clients' authorities do not load", context.load_verify_locations, files.client_ca)
    return context


def _load(what: str, load: Any, *paths: Path) -> None:
    try:
        # An encrypted key would be asked about at the terminal.
        load(*paths, **({"password": _no_password} if len(paths) > 1 else {}))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        missing = [os.fspath(path) for path in paths if not path.is_file()]
        raise StartupError(
            what,
            where=", ".join(map(os.fspath, paths)),
            seen=f"no file {missing[0]}" if missing else str(error),
            expected="PEM files of one another, the key not encrypted",
        ) from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")
