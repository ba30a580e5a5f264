"""`servax chat`: a conversation with a language model in the terminal, streaming."""

from __future__ import annotations

import contextlib
import importlib
import json as jsonlib
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from servax.cli import options
from servax.cli.output import err, progress
from servax.core.errors import ServaxError, UsageError

if TYPE_CHECKING:
    from servax.generation.servable import LanguageServable

NAME = "chat"

_TIMEOUT = 300.0
"""Seconds that a server may take between two parts of an answer."""

_HELP = "/reset begins anew, /exit ends; Ctrl-C stops an answer."

Messages = list[dict[str, str]]


class Speaker(Protocol):
    """Whom one talks to."""

    def say(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str]:
        """The answer to a conversation, part by part; closing it ends the answer."""
        ...


def command(
    target: Annotated[str, typer.Argument(help="A bundle of a language model, or a server's URL.")],
    model: Annotated[
        str | None, typer.Option("--model", help="Which model of a server that has several.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told before the conversation.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Most tokens of an answer; default: what fits.", show_default=False),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="0: the likeliest token each time.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Draw from this share of probability.", show_default=False)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Draw from this many of the likeliest tokens.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same answers.", show_default=False)] = None,
    require: options.Require = None,
    platform: options.Platform = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object for each answer, when it is whole.")] = False,
) -> None:
    """Talk to a language model; without a terminal each line of standard input is a message."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    start: Messages = [] if system is None else [{"role": "system", "content": system}]
    with _speaker(target, model, require, platform) as speaker:
        _converse(speaker, start, sampling, as_json=json)


def _converse(speaker: Speaker, start: Messages, sampling: Mapping[str, Any], *, as_json: bool) -> None:
    interactive = sys.stdin.isatty()
    messages = list(start)
    for line in _typed() if interactive else _lines():
        if interactive and line in ("/exit", "/reset"):
            if line == "/exit":
                return
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        try:
            text, whole = _answer(speaker, messages, sampling, shown=not as_json)
        except ServaxError as error:
            if not interactive:
                raise
            messages.pop()
            err.print(f"servax: {error}", markup=False, soft_wrap=True)
            continue
        messages.append({"role": "assistant", "content": text})
        if as_json:
            print(jsonlib.dumps({**messages[-1], "complete": whole}, ensure_ascii=False), flush=True)


def _answer(speaker: Speaker, messages: Messages, sampling: Mapping[str, Any], *, shown: bool) -> tuple[str, bool]:
    """The answer, shown as it comes, and whether it is whole; Ctrl-C ends it, and what was said stays said."""
    parts: list[str] = []
    whole = False
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(speaker.say(messages, sampling)) as answer:
        for part in answer:
            parts.append(part)
            if shown:
                sys.stdout.write(part)
                sys.stdout.flush()
        whole = True
    if shown:
        print(flush=True)
    return "".join(parts), whole


def _typed() -> Iterator[str]:
    """What is typed at a terminal, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` editing and a history
    err.print(_HELP, markup=False)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line:
            yield line


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        if text := line.strip():
            yield text


@contextlib.contextmanager
def _speaker(target: str, model: str | None, require: str | None, platform: str | None) -> Generator[Speaker]:
    if target.partition("://")[0] in ("http", "https"):
        from servax.protocols.chat import RemoteChat
        from servax.protocols.connection import Credentials

        if wrong := [name for name, value in (("--require", require), ("--platform", platform)) if value is not None]:
            raise UsageError(f"{', '.join(wrong)} cannot be given with a URL: the server has its model loaded")
        remote = RemoteChat(target, model=model, credentials=Credentials(), timeout=_TIMEOUT)
        with contextlib.closing(remote):
            yield remote
        return
    from servax.api.load import load
    from servax.generation.servable import LanguageServable

    if model is not None:
        raise UsageError("--model names one of a server's models", seen=model, remedy="leave it out with a bundle")
    with contextlib.ExitStack() as stack:
        with progress():
            servable = stack.enter_context(load(target, require=require, platform=platform))
        if not isinstance(servable, LanguageServable):
            raise UsageError("this is no language model", where=target, remedy="call it: servax predict")
        yield _Local(servable)


class _Local:
    """A servable of this process."""

    def __init__(self, servable: LanguageServable) -> None:
        self._servable = servable

    def say(self, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> Generator[str]:
        from servax.generation.params import SamplingParams

        with contextlib.closing(
            self._servable.parts(self._servable.render(messages), SamplingParams(**sampling))
        ) as parts:
            for part in parts:
                yield part.text
