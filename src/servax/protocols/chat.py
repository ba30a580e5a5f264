"""A conversation with a language model behind a URL, over the OpenAI API."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import msgspec

from servax.core.errors import (
    ExecutionError,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    ServaxError,
    Unauthorized,
    UsageError,
)
from servax.protocols.connection import Credentials

_ERRORS: Mapping[int, type[ServaxError]] = {
    400: InvalidInput,
    401: Unauthorized,
    404: NotFound,
    429: Overloaded,
    503: NotReady,
}


class RemoteChat:
    """A server's language model that answers conversations.

    Args:
      url: of the server, with or without `/v1`.
      model: which of its models; None: the only one that generates.
      credentials: shown to the server.
      timeout: seconds between two parts of an answer.

    Raises:
      NotReady: nothing answers there.
      UsageError: the server has several models, or none.
    """

    def __init__(self, url: str, *, model: str | None, credentials: Credentials, timeout: float) -> None:
        import httpx2

        self.base = url.rstrip("/").removesuffix("/v1")
        options: dict[str, Any] = {"timeout": timeout, "headers": credentials.headers()}
        if self.base.startswith("https:"):
            options["verify"] = credentials.context()
        self._client = httpx2.Client(**options)
        try:
            self.model = model or self._only_model()
        except ServaxError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def say(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str]:
        """The answer to a conversation, part by part; closing it ends the answer.

        Raises:
          ServaxError: the server refuses it, or fails meanwhile.
        """
        body = msgspec.json.encode({"model": self.model, "messages": messages, "stream": True, **sampling})
        headers = {"content-type": "application/json"}
        with (
            self._reached(),
            self._client.stream("POST", f"{self.base}/v1/chat/completions", content=body, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
                raise _error(answer.status_code, answer.content)
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event: Any = msgspec.json.decode(data)
                if "error" in event:
                    raise _error(500, data.encode())
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""

    def _only_model(self) -> str:
        with self._reached():
            answer = self._client.get(f"{self.base}/v1/models")
        if answer.status_code != 200:
            raise _error(answer.status_code, answer.content)
        listed = cast("list[dict[str, Any]]", msgspec.json.decode(answer.content)["data"])
        # Servers of language models say how long their context is; other models of the same server have none.
        found = [each for each in listed if "max_model_len" in each] or listed
        if len(found) != 1:
            raise UsageError(
                "the URL does not say which model",
                where=self.base,
                seen=", ".join(each["id"] for each in found) or "no language model",
                expected="one model",
                remedy="name it with --model",
            )
        return found[0]["id"]

    @contextlib.contextmanager
    def _reached(self) -> Generator[None]:
        import httpx2

        try:
            yield
        except httpx2.RequestError as error:
            raise NotReady(
                "no server answers",
                where=self.base,
                seen=str(error) or type(error).__name__,
                remedy="start one: servax serve BUNDLE",
            ) from error


def _error(status: int, body: bytes) -> ServaxError:
    """An error as the server told it."""
    try:
        told: Any = msgspec.json.decode(body)["error"]
        message = told["message"] if isinstance(told, dict) else str(told)
    except (msgspec.DecodeError, KeyError, TypeError):
        message = f"HTTP status {status}"
    return _ERRORS.get(status, ExecutionError)(message)
