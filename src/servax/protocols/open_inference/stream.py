"""`ModelStreamInfer`: many requests on one stream, each answered as soon as it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, cast

from servax.core.errors import NotReady, ServaxError
from servax.protocols.grpc.calls import parsed, time_limit
from servax.protocols.grpc.status import abort, message_of, told
from servax.protocols.open_inference.contents import field

Infer = Callable[[Any, float | None], Awaitable[bytes]]
"""From a ModelInferRequest and the stream's deadline to the bytes of a ModelInferResponse."""

_ANSWER = 0x12
"""The tag of `infer_response` in ModelStreamInferResponse."""

_MOST = 1024
"""Requests of one stream that wait at once; more are not read from the connection, so that its client waits."""

_STRICT = ("triton_grpc_error", "true")
"""Metadata by which a client asks that an error ends the stream with its status."""


class Stream:
    """One stream, from its first request to its last answer.

    Args:
      infer: answers one request.
      messages: classes of ModelInferRequest and ModelStreamInferResponse.
      requests: as they come, unread.
      context: of the call.
    """

    def __init__(self, infer: Infer, messages: tuple[Any, Any], requests: AsyncIterable[bytes], context: Any) -> None:
        self._infer = infer
        self._request, self._response = messages
        self._requests = requests
        self._context = context
        self._strict = _STRICT in (context.invocation_metadata() or ())
        self._answering: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MOST)
        self._writing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Answers until the client has said all, or is gone; then nothing of the stream is left in any queue."""
        self._reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((self._reading,))
            if self._answering:
                await asyncio.wait(self._answering)
            if self._failure is not None:
                await abort(self._context, self._failure)
        finally:
            for task in (self._reading, *self._answering):
                task.cancel()

    def close(self) -> None:
        """Reads no further request; the stream ends once those that are there have their answers."""
        if self._reading is not None and not self._reading.done():
            self._fail(NotReady("the server stops", remedy="open a stream to another server"))

    def _fail(self, failure: Exception) -> None:
        """Ends the stream with this error once what is in progress has its answer."""
        if self._failure is None:
            self._failure = failure
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        async for data in self._requests:
            await self._room.acquire()
            task = asyncio.create_task(self._answer(data))
            self._answering.add(task)
            task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(cast("Exception", error))  # the answer could not be written

    async def _answer(self, data: bytes) -> None:
        request = self._request()
        try:
            request = parsed(self._request, data)
            answer = b"".join(field(_ANSWER, await self._infer(request, time_limit(self._context))))
        except Exception as error:
            shown = told(error)
            if self._strict:
                self._fail(shown)
                return
            answer = self._error(request, shown)
        async with self._writing:
            await self._context.write(answer)

    def _error(self, request: Any, error: ServaxError) -> bytes:
        message = self._response(error_message=message_of(error))
        answer = message.infer_response
        answer.model_name, answer.model_version, answer.id = request.model_name, request.model_version, request.id
        answer.parameters["triton_final_response"].bool_param = True
        data: bytes = message.SerializeToString()
        return data
