"""HTTP to one server of the Open Inference Protocol, blocking or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from servax.core.errors import DeadlineExceeded, NotReady, ServaxError, ServiceError, UsageError
from servax.protocols.open_inference import answers, messages

if TYPE_CHECKING:
    import httpx2

DEFAULT_TIMEOUT = 60.0
"""Seconds that an answer may take."""

_CLOSING = 5.0
"""Seconds that another thread's event loop has to close its connections."""


KEY_VARIABLE = "SERVAX_API_KEY"
"""Of the environment: the key for servers that ask for one."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows to a server, and what it trusts.

    Attributes:
      api_key: sent with every request; None: that of `SERVAX_API_KEY`, where there is one.
      ca: file of the certificates that sign the server's; None: those of the system.
      certificate: files of the client's own certificate and of its key, where the server asks for one.
    """

    api_key: str | None = None
    ca: str | os.PathLike[str] | None = None
    certificate: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None

    def headers(self) -> dict[str, str]:
        """Those of every request."""
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def context(self) -> ssl.SSLContext:
        """For connections over TLS.

        Raises:
          UsageError: a file is not there, or holds no certificate.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(*self.certificate)
        except OSError as error:  # ssl.SSLError too
            files = [self.ca, *(self.certificate or ())]
            raise UsageError(
                "the certificates cannot be read",
                where=", ".join(os.fspath(each) for each in files if each is not None),
                seen=str(error),
                expected="PEM files",
            ) from error
        return context


class Connection:
    """HTTP to one server, with its failures as errors of ours."""

    def __init__(self, base: str, timeout: float, credentials: Credentials) -> None:
        import httpx2

        self.base = base
        self._timeout = timeout
        self._options: dict[str, Any] = {"timeout": timeout, "headers": credentials.headers()}
        if base.startswith("https:"):
            self._options["verify"] = credentials.context()
        self._client = httpx2.Client(**self._options)
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient]
        self._async = weakref.WeakKeyDictionary()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, path: str, kind: type[answers.T]) -> answers.T:
        return answers.read(kind, self._sent("GET", path).content, self._url(path))

    def status(self, path: str) -> answers.Status:
        """Readiness; a server may answer with the HTTP status alone."""
        response = self._sent("GET", path, accepted=(200, 503))
        if not response.content:
            return answers.Status(ready=response.status_code == 200)
        return answers.read(answers.Status, response.content, self._url(path))

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
        return self._sent("POST", path, body, headers)

    async def post_async(self, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
        import httpx2

        self._require_open()
        loop = asyncio.get_running_loop()
        if loop not in self._async:  # a client's connections belong to the loop they were opened on
            self._async[loop] = httpx2.AsyncClient(**self._options)
        try:
            response = await self._async[loop].post(self._url(path), content=body, headers=headers)
        except httpx2.RequestError as error:
            raise self._failure(error) from error
        return self._checked(response, (200,))

    def close(self) -> None:
        """Closes all connections, each on the event loop it was opened on; on the running one, a moment later."""
        self._client.close()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        for loop, client in list(self._async.items()):
            if loop is running:
                task = loop.create_task(client.aclose())
                self._closing.add(task)  # the loop itself keeps no task alive
                task.add_done_callback(self._closing.discard)
            elif loop.is_running():
                with contextlib.suppress(RuntimeError, TimeoutError):  # it ended, or is held up, meanwhile
                    asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(_CLOSING)
            elif running is None and not loop.is_closed():
                loop.run_until_complete(client.aclose())
        self._async.clear()

    def _sent(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        accepted: tuple[int, ...] = (200,),
    ) -> httpx2.Response:
        import httpx2

        self._require_open()
        try:
            response = self._client.request(method, self._url(path), content=body, headers=headers)
        except httpx2.RequestError as error:
            raise self._failure(error) from error
        return self._checked(response, accepted)

    def _require_open(self) -> None:
        if self._client.is_closed:
            raise NotReady("the connection to the server was closed", where=self.base, remedy="connect again")

    def _url(self, path: str) -> str:
        return f"{self.base}/v2{path}"

    def _failure(self, error: Exception) -> ServaxError:
        import httpx2

        if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
            return DeadlineExceeded(
                "the server did not answer in time",
                where=self.base,
                expected=f"an answer within {self._timeout:g} s",
                remedy="pass a longer timeout to connect",
            )
        return NotReady(
            "no server answers",
            where=self.base,
            seen=str(error) or type(error).__name__,
            remedy="start one: servax serve BUNDLE",
        )

    def _checked(self, response: httpx2.Response, accepted: tuple[int, ...]) -> httpx2.Response:
        if response.status_code in accepted:
            return response
        if response.is_redirect:
            raise UsageError(
                "the server sends to another address",
                where=str(response.url),
                seen=f"HTTP status {response.status_code} to {response.headers.get('location')}",
                remedy="connect to that server itself",
            )
        try:
            message = msgspec.json.decode(response.content)
        except (msgspec.DecodeError, RecursionError):
            text = f": {response.text}" if response.text else ""
            message = f"{response.url} answered with HTTP status {response.status_code}{text}"
        error = messages.read_error(response.status_code, message)
        after = response.headers.get("retry-after", "")
        if isinstance(error, ServiceError) and after.isdecimal():  # some say a date
            error.retry_after = float(after)
        raise error
