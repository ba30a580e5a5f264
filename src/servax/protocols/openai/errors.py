"""Errors as the OpenAI API tells them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re

import msgspec

from servax.core.errors import (
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    ServaxError,
    ServiceError,
    Unauthorized,
)
from servax.protocols.wording import short

_LONGEST = 2000
"""Characters of a message."""

_PARAM = re.compile(r"[a-z_]+(?:[.\[][\w.\[\]]*)?")
"""What names a field of a request."""


class ModelNotFound(NotFound):
    """There is no model of this name."""


class ContextLengthExceeded(InvalidInput):
    """Prompt and answer do not fit into the model's context."""

    @classmethod
    def of(cls, context: int, prompt: int, answer: int, where: str) -> ContextLengthExceeded:
        """The error for a prompt and an answer of so many tokens; in the words that clients look for."""
        return cls(
            f"this model's maximum context length is {context} tokens, and {prompt + answer} were requested",
            where=where,
            seen=f"{prompt} tokens of prompt and {answer} of answer",
            expected=f"at most {context} tokens in all",
            remedy="shorten the prompt, or ask for fewer tokens",
        )


_CODES: dict[type[ServaxError], str] = {
    ModelNotFound: "model_not_found",
    ContextLengthExceeded: "context_length_exceeded",
    Unauthorized: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
}


class _Told(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct):
    error: _Told


def write_error(error: ServaxError) -> bytes:
    """The body of an error's answer, and of the event that tells it in the middle of a stream."""
    param = error.where if error.where is not None and _PARAM.fullmatch(error.where) else None
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)
    return msgspec.json.encode(_Body(_Told(short(error.sentence(), _LONGEST), _type(error), param, code)))


def _type(error: ServaxError) -> str:
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, Forbidden):
        return "permission_error"
    return "server_error" if isinstance(error, ServiceError) else "invalid_request_error"
