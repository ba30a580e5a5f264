"""How a request wants its answer drawn, in the engine's words, and the grammar it asks for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from servax.core.errors import InvalidInput
from servax.generation.constraints import choice_grammar, json_grammar, regex_grammar
from servax.generation.params import SamplingParams
from servax.protocols.openai.requests import GenerationBody
from servax.protocols.wording import short

MOST_CHOICES = 128
"""Most answers of a request, of all its prompts."""

_JSON_OBJECT = {"type": "object"}
_FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
_STRUCTURED = "one of json, regex, choice and json_object"


def params_of(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling parameters of a request; what it leaves out is as the OpenAI API has it.

    Raises:
      InvalidInput: a value has no meaning; names the field.
    """
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "ignore_eos",
        )
        if (value := getattr(body, name)) is not None
    }
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_bias(body.logit_bias or {}),
        **given,
    )


def choices_of(body: GenerationBody, prompts: int) -> int:
    """How many answers each prompt gets.

    Raises:
      InvalidInput: none, or too many in all.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n * prompts <= MOST_CHOICES:
        seen = f"{n} for each of {prompts} prompts" if prompts > 1 else str(n)
        raise InvalidInput(
            "so many answers cannot be given", where="n", seen=seen, expected=f"1 to {MOST_CHOICES} in all"
        )
    return n


def priority_of(body: GenerationBody, otherwise: int) -> int:
    """Ours: higher runs earlier. The field is vLLM's, where lower does."""
    return otherwise if body.priority is None else -body.priority


def grammar_of(body: GenerationBody) -> str | None:
    """The grammar that a request asks for; None: any text will do.

    Raises:
      InvalidInput: it asks for several, or for something else.
    """
    asked: list[tuple[str, Callable[[], str]]] = []
    if body.response_format is not None and (schema := _schema(body.response_format)) is not None:
        asked.append(("response_format", lambda: json_grammar(schema)))
    if body.guided_json is not None:
        guided = _object(body.guided_json, "guided_json")
        asked.append(("guided_json", lambda: json_grammar(guided, "guided_json")))
    if (pattern := body.guided_regex) is not None:
        asked.append(("guided_regex", lambda: regex_grammar(pattern, "guided_regex")))
    if (texts := body.guided_choice) is not None:
        asked.append(("guided_choice", lambda: choice_grammar(texts, "guided_choice")))
    if body.structured_outputs is not None:
        structured = body.structured_outputs
        asked.append(("structured_outputs", lambda: _structured(structured)))
    if len(asked) > 1:
        names = ", ".join(name for name, _ in asked)
        raise InvalidInput("an answer follows one grammar", where=asked[1][0], seen=names, expected="one of them")
    return asked[0][1]() if asked else None


def _bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise InvalidInput(
            "a key is no token id", where="logit_bias", seen=short(str(list(given))), expected='{"50256": -100}'
        ) from None


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _JSON_OBJECT
    if kind == "json_schema" and isinstance(told := form.get("json_schema"), dict):
        return _object(cast("dict[str, Any]", told).get("schema", _JSON_OBJECT), "response_format.json_schema.schema")
    raise InvalidInput("there is no such format", where="response_format", seen=short(str(form)), expected=_FORMATS)


def _structured(asked: dict[str, Any]) -> str:
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    where = "structured_outputs"
    match given:
        case {"json": value, **rest} if not rest:
            return json_grammar(_object(value, f"{where}.json"), where)
        case {"json_object": True, **rest} if not rest:
            return json_grammar(_JSON_OBJECT, where)
        case {"regex": str(pattern), **rest} if not rest:
            return regex_grammar(pattern, where)
        case {"choice": list(texts), **rest} if not rest and all(isinstance(each, str) for each in texts):
            return choice_grammar(texts, where)
        case _:
            raise InvalidInput("there is no such grammar", where=where, seen=short(str(asked)), expected=_STRUCTURED)


def _object(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidInput("this is no JSON schema", where=where, seen=short(str(value)), expected="an object")
    return cast("dict[str, Any]", value)
