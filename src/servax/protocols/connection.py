"""HTTP to one server of the Open Inference Protocol, blocking or awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from typing import TYPE_CHECKING

import msgspec

from servax.core.errors import DeadlineExceeded, NotReady, ServaxError, UsageError
from servax.protocols.open_inference import answers, messages

if TYPE_CHECKING:
    import httpx2

DEFAULT_TIMEOUT = 60.0
"""Seconds that an answer may take."""

_CLOSING = 5.0
"""Seconds that another thread's event loop has to close its connections."""


KEY_VARIABLE = "SERVAX_API_KEY"
"""Of the environment: the key for servers that ask for one."""


class Connection:
    """HTTP to one server, with its failures as errors of ours; with the key of `SERVAX_API_KEY` where there is one."""

    def __init__(self, base: str, timeout: float) -> None:
        import httpx2

        self.base = base
        self._timeout = timeout
        key = os.environ.get(KEY_VARIABLE)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._client = httpx2.Client(timeout=timeout, headers=self._headers)
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
            self._async[loop] = httpx2.AsyncClient(timeout=self._timeout, headers=self._headers)
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
        raise messages.read_error(response.status_code, message)
