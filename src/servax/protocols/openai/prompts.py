"""Prompts of requests as token ids: texts, ids, conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from servax.core.errors import InvalidInput, UsageError
from servax.generation.servable import LanguageServable
from servax.generation.tokenizer import Tokenizer
from servax.protocols.openai.requests import ChatBody, refuse
from servax.protocols.wording import short

_SMALL = 16 * 1024
"""Characters that are tokenized on the event loop: about a millisecond's work."""

_PROMPT = "a text, a list of texts, token ids, or a list of lists of token ids"


async def completion_prompts(servable: LanguageServable, given: str | list[Any] | None) -> list[list[int]]:
    """The prompts of a completion.

    Raises:
      InvalidInput: they are none of text, texts, ids and lists of ids; or the model has no tokenizer.
    """
    texts = texts_or_ids(given, "prompt")
    if not any(isinstance(each, str) for each in texts):
        return cast("list[list[int]]", texts)
    tokenizer = require_tokenizer(servable)
    size = sum(map(len, texts))

    def encode() -> list[list[int]]:
        return [tokenizer.encode(each, special=True) if isinstance(each, str) else each for each in texts]

    return await off_loop(size, encode)


def texts_or_ids(given: Any, where: str) -> list[str | list[int]]:
    """One text, several, the ids of one, or of several: a list of each.

    Raises:
      InvalidInput: it is none of these, or empty.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        items = cast("list[Any]", given)
        if all(isinstance(each, str) for each in items) or all(_are_ids(each) for each in items):
            return items
        if _are_ids(items):
            return [items]
    raise InvalidInput(
        f"`{where}` holds neither texts nor token ids", where=where, seen=short(repr(given)), expected=_PROMPT
    )


async def chat_prompt(servable: LanguageServable, body: ChatBody) -> list[int]:
    """The prompt of a conversation.

    Raises:
      InvalidInput: the model has no chat template, it does not take these messages, or it knows no tools.
    """
    template = servable.template
    if template is None or servable.tokenizer is None:
        raise InvalidInput(
            f"model {servable.name!r} has no chat template",
            where="model",
            remedy="send a prompt to /v1/completions, or build it with a tokenizer and a template",
        )
    refuse(body.functions, "functions", "`tools`, of a model whose template takes them")
    extra = dict(body.chat_template_kwargs or {})
    if body.tools and body.tool_choice != "none":
        if "tools" not in template.names:
            raise InvalidInput(
                f"model {servable.name!r} takes no tools", where="tools", expected="a chat template that reads `tools`"
            )
        if body.tool_choice not in (None, "auto"):
            refuse(body.tool_choice, "tool_choice", '"auto" or "none"')
        extra["tools"] = body.tools
    answer = True if body.add_generation_prompt is None else body.add_generation_prompt
    return await rendered(servable, body.messages, answer=answer, extra=extra)


async def rendered(
    servable: LanguageServable, given: Sequence[Mapping[str, Any]], *, answer: bool, extra: Mapping[str, Any]
) -> list[int]:
    """Messages as the model's template writes them, in token ids.

    Raises:
      InvalidInput: a message is none, or the template refuses them.
    """
    messages = _messages(given)
    kept = {name: value for name, value in extra.items() if name not in ("messages", "answer")}

    def render() -> list[int]:
        try:
            return servable.render(messages, answer=answer, **kept)
        except UsageError as error:
            raise InvalidInput(error.what, where="model", remedy=error.remedy) from None

    return await off_loop(sum(len(str(each)) for each in messages), render)


async def off_loop(size: int, work: Callable[[], list[Any]]) -> list[Any]:
    """What `work` gives; on another thread where `size` characters would hold up the event loop."""
    return work() if size <= _SMALL else await asyncio.to_thread(work)


def require_tokenizer(servable: LanguageServable) -> Tokenizer:
    """Raises InvalidInput where a model has no tokenizer."""
    if servable.tokenizer is None:
        raise InvalidInput(
            f"model {servable.name!r} has no tokenizer", where="model", remedy="send the prompt as token ids"
        )
    return servable.tokenizer


def _are_ids(given: Any) -> bool:
    # True is an int to Python.
    return isinstance(given, list) and all(type(each) is int for each in cast("list[Any]", given))


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not given:
        raise InvalidInput("there are no messages", where="messages", seen="[]", expected="at least one")
    found: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(role := message.get("role"), str):
            raise InvalidInput("a message has no role", where=f"{where}.role", seen=short(repr(role)))
        # OpenAI's newer name of the system's role; templates know the older.
        role = "system" if role == "developer" else role
        found.append({**message, "role": role, "content": _content(message.get("content"), f"{where}.content")})
    return found


def _content(given: Any, where: str) -> str:
    """A message's text; parts of text stand on lines of their own."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        parts = cast("list[Any]", given)
        texts = [_text(part) for part in parts]
        if all(text is not None for text in texts):
            return "\n".join(cast("list[str]", texts))
    raise InvalidInput(
        "the content of a message is not text",
        where=where,
        seen=short(repr(given)),
        expected='a text, or a list of {"type": "text", "text": ...}',
    )


def _text(part: Any) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return None
