"""Chat templates: messages become a prompt, by a Jinja template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from servax.core.errors import InvalidInput, StartupError

_LONGEST = 4 << 20
"""Characters of a rendered prompt: a template that loops does not fill the memory."""


class ChatTemplate:
    """A model's chat template, as its tokenizer's configuration has it.

    The sandbox is Jinja's immutable one, as Hugging Face's transformers uses it: a template comes with a model's files
    and must not reach the process.

    Args:
      source: the template.
      special: names that it may use, such as `bos_token`.

    Attributes:
      names: what it reads, such as `messages` and, of a model that was trained with them, `tools`.

    Raises:
      StartupError: the template is none.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        import jinja2
        import jinja2.meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        environment.globals.update(functions)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise StartupError("the chat template cannot be read", seen=str(error)) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **extra: Any) -> str:
        """The prompt of a conversation.

        Args:
          messages: each with `role` and `content`.
          answer: whether the prompt ends where the assistant's answer begins.
          extra: further names for the template, such as `tools`.

        Raises:
          InvalidInput: the template refuses the messages.
        """
        import jinja2

        try:
            parts: list[str] = []
            size = 0
            for part in self._template.generate(
                messages=messages, add_generation_prompt=answer, **{**self._special, **extra}
            ):
                size += len(part)
                if size > _LONGEST:
                    raise InvalidInput(
                        "the rendered prompt is too long", where="messages", expected=f"{_LONGEST} characters"
                    )
                parts.append(part)
            return "".join(parts)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise InvalidInput(
                "the chat template does not take these messages", where="messages", seen=str(error)
            ) from error


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
