"""Bodies of requests. What is not known is ignored, as the OpenAI API does: clients send more than a server needs."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from servax.core.errors import InvalidInput
from servax.protocols.wording import short

T = TypeVar("T")

Ids = list[int]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common; after `seed`, what vLLM adds.

    Ignored, with all that is not named: `user`, `store`, `metadata`, `service_tier`.
    """

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    priority: int | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """Of `POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """Of `POST /v1/chat/completions`; the last two are vLLM's."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """Of `POST /v1/embeddings`."""

    model: str
    input: str | list[Any]
    encoding_format: str | None = None
    dimensions: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of `POST /tokenize`: a prompt or a conversation."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Of `POST /detokenize`."""

    model: str
    tokens: Ids


def read(kind: type[T], body: bytes | bytearray) -> T:
    """The request that a body of JSON holds.

    Raises:
      InvalidInput: this is no JSON, or a field has another type; names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        field = where.strip("`").removeprefix("$").removeprefix(".")
        missing = re.search(r"required field `(\w+)`", what)
        raise InvalidInput(
            "the request cannot be used",
            where=short(missing[1] if missing else field) or "the body",
            seen=short(what[:1].lower() + what[1:]),
        ) from None
    except RecursionError:
        raise InvalidInput("the body is nested too deeply", where="the body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        seen = short(str(error)) if len(body) else "an empty body"
        raise InvalidInput("the body is not JSON", where="the body", seen=seen) from None


def refuse(given: object, field: str, expected: str) -> None:
    """Raises InvalidInput where a field that servax does not have is given, and is not what means nothing."""
    if given:
        raise InvalidInput(f"`{field}` is not supported", where=field, seen=short(str(given)), expected=expected)
