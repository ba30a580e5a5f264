"""The OpenAI API over HTTP, and `/tokenize`, `/detokenize` and `/health` as vLLM has them."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from servax.core.errors import ExecutionError, InvalidInput, NotFound, NotReady, ServaxError
from servax.core.events import Notice, emit
from servax.protocols.bodies import Limits
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import Answer, Endpoint, Incoming, Scope, Send, Streamed, respond
from servax.protocols.openai import requests
from servax.protocols.openai.answers import DONE, Bill, Collected, Form, Head, Shown, event
from servax.protocols.openai.chat import ChatForm
from servax.protocols.openai.completions import CompletionForm
from servax.protocols.openai.embeddings import embed
from servax.protocols.openai.errors import write_error
from servax.protocols.openai.generation import Part, Parts, Work
from servax.protocols.openai.models import Models
from servax.protocols.openai.prompts import (
    chat_prompt,
    completion_prompts,
    off_loop,
    rendered,
    require_tokenizer,
)
from servax.protocols.openai.sampling import choices_of, grammar_of, params_of, priority_of
from servax.protocols.wording import short

Handler = Callable[[Incoming], Awaitable[Answer | Streamed]]

_TRIES = 8
"""Versions that a request is offered to when each begins to drain before it has accepted."""

_COMPLETION_TOKENS = 16
"""Tokens of a completion that does not say how many, as the OpenAI API has it."""


class OpenAI:
    """An ASGI application for `/v1/chat/completions` and its like.

    Args:
      plane: where the models are.
      limits: of what a request may send.
    """

    def __init__(self, plane: DataPlane, *, limits: Limits) -> None:
        self._plane = plane
        self._models = Models(plane)
        self._endpoint = Endpoint(plane, limits, write_error)
        self._handlers: dict[str, tuple[str, Handler]] = {
            "/completions": ("POST", self._completions),
            "/chat/completions": ("POST", self._chat),
            "/embeddings": ("POST", self._embeddings),
            "/models": ("GET", self._list),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
        }

    def owns(self, path: str) -> bool:
        """Whether a path, without `/v1`, is this API's."""
        return path in self._handlers

    def described(self, name: str) -> dict[str, Any]:
        """What `GET /v1/models/NAME` says of a model; nothing of one that is of no use to this API."""
        return self._models.described(name)

    async def handle(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path, without `/v1`, is `path`."""
        found = self._handlers.get(path)
        if found is None:
            missing = NotFound(f"there is no {short(scope['path'])}", expected=" or ".join(self._handlers))
            await respond(send, self._endpoint.error(missing))
            return
        method, handler = found
        if scope["method"] != method:
            seen = short(scope["method"])
            wrong = InvalidInput(f"{short(scope['path'])} takes {method}", seen=seen, expected=method)
            await respond(send, self._endpoint.error(wrong, 405, [(b"allow", method.encode())]))
            return
        await self._endpoint(scope, receive, send, handler, while_closing=method == "GET")

    async def _completions(self, incoming: Incoming) -> Answer | Streamed:
        body = requests.read(requests.CompletionBody, incoming.body)
        requests.refuse(body.echo, "echo", "false: put the prompt before the answer yourself")
        requests.refuse(body.suffix, "suffix", "nothing: text is only ever continued")
        if body.best_of is not None and body.best_of != (body.n or 1):
            requests.refuse(body.best_of, "best_of", "nothing, or the same as `n`")
        max_tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        params = params_of(body, max_tokens=max_tokens, logprobs=body.logprobs)

        async def make() -> Work:
            servable = self._models.language(body.model)
            prompts = await completion_prompts(servable, body.prompt)
            choices, grammar = choices_of(body, len(prompts)), grammar_of(body)
            priority = priority_of(body, incoming.priority)
            return Work(servable, prompts, "prompt", choices, params, grammar, priority, incoming.deadline)

        return await self._generated(body, make, "cmpl", lambda shown: CompletionForm(shown, body.logprobs))

    async def _chat(self, incoming: Incoming) -> Answer | Streamed:
        body = requests.read(requests.ChatBody, incoming.body)
        requests.refuse(body.audio, "audio", "nothing: answers are text")
        if body.modalities not in (None, ["text"]):
            requests.refuse(body.modalities, "modalities", '["text"]')
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidInput("`top_logprobs` asks for `logprobs`", where="top_logprobs", expected='"logprobs": true')
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        params = params_of(body, max_tokens=most, logprobs=logprobs)

        async def make() -> Work:
            servable = self._models.language(body.model)
            prompt = await chat_prompt(servable, body)
            choices, grammar = choices_of(body, 1), grammar_of(body)
            priority = priority_of(body, incoming.priority)
            return Work(servable, [prompt], "messages", choices, params, grammar, priority, incoming.deadline)

        return await self._generated(body, make, "chatcmpl", lambda shown: ChatForm(shown, logprobs))

    async def _generated(
        self,
        body: requests.GenerationBody,
        make: Callable[[], Awaitable[Work]],
        prefix: str,
        form_of: Callable[[Shown], Form],
    ) -> Answer | Streamed:
        """Answers, whole or streamed.

        Errors before the first part have a status of their own. A version that begins to drain before it has accepted
        is replaced by the one that is served now.
        """
        if body.stream_options is not None and not body.stream:
            raise InvalidInput("`stream_options` asks for `stream`", where="stream_options", expected='"stream": true')
        for tries in range(_TRIES):
            work = await make()
            work.check()
            vocabulary = work.servable.vocabulary
            if work.params.logprobs is not None and vocabulary is not None:
                await asyncio.to_thread(vocabulary.load)
            head, form = Head.fresh(prefix, body.model), form_of(Shown(work, vocabulary))
            parts = work.run()
            try:
                first = await anext(parts)
            except NotReady:
                if self._plane.closing or tries + 1 == _TRIES or self._models.get(body.model) is work.servable:
                    raise
                continue
            if body.stream:
                return Streamed(_events(head, form, Bill(work), first, parts, options=body.stream_options))
            return await _whole(head, form, Bill(work), first, parts)
        raise NotReady(f"model {body.model!r} changes too often")

    async def _embeddings(self, incoming: Incoming) -> Answer:
        body = requests.read(requests.EmbeddingBody, incoming.body)
        servable = self._models.get(body.model)
        return _json(await embed(self._plane, body, servable, priority=incoming.priority, deadline=incoming.deadline))

    async def _list(self, incoming: Incoming) -> Answer:
        return _json(self._models.list())

    async def _tokenize(self, incoming: Incoming) -> Answer:
        body = requests.read(requests.TokenizeBody, incoming.body)
        servable = self._models.language(body.model)
        tokenizer = require_tokenizer(servable)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidInput("this takes one of `prompt` and `messages`", where="prompt")
        if (prompt := body.prompt) is not None:
            ids = await off_loop(len(prompt), lambda: tokenizer.encode(prompt, special=body.add_special_tokens))
        else:
            ids = await rendered(servable, body.messages or [], answer=body.add_generation_prompt, extra={})
        texts = [tokenizer.text(each) for each in ids] if body.return_token_strs else None
        return _json({"count": len(ids), "max_model_len": servable.spec.context, "tokens": ids, "token_strs": texts})

    async def _detokenize(self, incoming: Incoming) -> Answer:
        body = requests.read(requests.DetokenizeBody, incoming.body)
        servable = self._models.language(body.model)
        tokenizer = require_tokenizer(servable)
        bad = [each for each in body.tokens if not 0 <= each < servable.spec.vocabulary]
        if bad:
            raise InvalidInput(
                "there is no such token",
                where="tokens",
                seen=str(bad[0]),
                expected=f"0 to {servable.spec.vocabulary - 1}",
            )
        return _json({"prompt": tokenizer.decode(body.tokens)})

    async def _health(self, incoming: Incoming) -> Answer:
        if self._models.healthy:
            return Answer(b"", content_type=b"text/plain")
        return self._endpoint.error(NotReady("a model does not answer", remedy="ask /v2/health/ready which one"))


async def _whole(head: Head, form: Form, bill: Bill, first: tuple[int, Part], parts: Parts) -> Answer:
    answers: dict[int, Collected] = {}
    async with contextlib.aclosing(parts):
        item: tuple[int, Part] | None = first
        while item is not None:
            number, part = item
            bill.note(number, part)
            answers.setdefault(number, Collected()).add(part)
            item = await anext(parts, None)
    choices = [form.whole(number, answers[number]) for number in sorted(answers)]
    return _json(head.message(form.kinds[0], choices, usage=bill.usage()))


async def _events(
    head: Head,
    form: Form,
    bill: Bill,
    first: tuple[int, Part],
    parts: Parts,
    *,
    options: requests.StreamOptions | None,
) -> AsyncGenerator[bytes]:
    """The events of a streamed answer; an error in the middle is the last but `[DONE]`."""
    counted = options is not None and bool(options.include_usage)
    always = options is not None and bool(options.continuous_usage_stats)
    kind = form.kinds[1]
    try:
        async with contextlib.aclosing(parts):
            item: tuple[int, Part] | None = first
            while item is not None:
                number, part = item
                bill.note(number, part)
                usage = {"usage": bill.usage() if always else None} if counted else {}
                if choices := form.chunks(number, part):
                    yield b"".join(event(head.message(kind, [choice], **usage)) for choice in choices)
                item = await anext(parts, None)
        if counted:
            yield event(head.message(kind, [], usage=bill.usage()))
    except ServaxError as error:
        yield b"data: %b\n\n" % write_error(error)
    except Exception as error:  # a fault of ours: said in full to the operator, in short to the client
        emit(Notice(f"a stream failed: {error!r}\n{traceback.format_exc()}", level="error"))
        yield b"data: %b\n\n" % write_error(ExecutionError("the server failed; its log says why"))
    yield DONE


def _json(message: Any) -> Answer:
    return Answer(msgspec.json.encode(message))
