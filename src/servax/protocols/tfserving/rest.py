"""TensorFlow Serving's REST API: `:predict` with rows or columns, the status of versions, the signatures of a model.

Its own addition is `Server-Timing` and what every HTTP endpoint of servax reads: `Request-Timeout-Ms`,
`Request-Priority`, `Content-Encoding`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec

from servax.core.errors import InvalidInput, NotFound
from servax.protocols.bodies import Limits
from servax.protocols.calls import Receive
from servax.protocols.dataplane import DataPlane
from servax.protocols.http import Answer, Endpoint, Incoming, Scope, Send, respond, server_timing
from servax.protocols.tfserving import messages
from servax.protocols.tfserving.inputs import from_inputs, from_instances, read
from servax.protocols.tfserving.names import Called, Target, called, servable_of, statuses_of
from servax.protocols.tfserving.outputs import require_json, require_rows, write_outputs, write_predictions
from servax.protocols.wording import short
from servax.runtime.request import InferRequest

_PATH = re.compile(
    r"/models/(?P<model>[^/:]+)(?:/versions/(?P<version>[^/:]+)|/labels/(?P<label>[^/:]+))?"
    r"(?P<verb>:predict|:classify|:regress|/metadata)?"
)
_POST = {":predict", ":classify", ":regress"}


class TFServing:
    """An ASGI application for the paths below `/v1`: `/models/net:predict`, `/models/net/metadata`, and so on.

    Args:
      plane: where the models are.
      limits: of what a request may send.
      timings: whether an answer says what each step took (`Server-Timing`).
      beside: what another API, whose path is the same, adds to the status of a model of this name.
    """

    def __init__(
        self,
        plane: DataPlane,
        *,
        limits: Limits,
        timings: bool,
        beside: Callable[[str], Mapping[str, Any]] = lambda name: {},
    ) -> None:
        self._plane = plane
        self._timings = timings
        self._beside = beside
        self._endpoint = Endpoint(plane, limits, messages.write_error)

    async def handle(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path, below `/v1`, is `path`."""
        match = _PATH.fullmatch(path)
        if match is None:
            missing = NotFound(f"there is no {short(scope['path'])}", expected="/v1/models/MODEL, and what is below it")
            await respond(send, self._endpoint.error(missing))
            return
        verb: str = match["verb"] or ""
        method = b"POST" if verb in _POST else b"GET"
        if scope["method"] != method.decode():
            wrong = InvalidInput(
                f"{short(scope['path'])} takes {method.decode()}",
                where="the method",
                seen=scope["method"],
                expected=method.decode(),
            )
            await respond(send, self._endpoint.error(wrong, 405, [(b"allow", method)]))
            return
        target = Target(match["model"], match["version"], match["label"])
        work = self._work(verb, target)
        await self._endpoint(scope, receive, send, work, while_closing=verb == "")

    def _work(self, verb: str, target: Target) -> Callable[[Incoming], Awaitable[Answer]]:
        async def work(incoming: Incoming) -> Answer:
            if verb == ":predict":
                return await self._predict(target, incoming)
            if verb == "/metadata":
                return _json(messages.model_metadata(servable_of(self._plane, target)))
            if verb == "":
                return _json({**messages.model_status(statuses_of(self._plane, target)), **self._added(target)})
            raise self._no_examples(target, verb.removeprefix(":"))

        return work

    async def _predict(self, target: Target, incoming: Incoming) -> Answer:
        deadline, priority = incoming.deadline, incoming.priority
        body = read(incoming.body)
        if not isinstance(body, dict):
            raise InvalidInput("the body is no object", where="the body", expected=_EXPECTED)
        fields = cast("dict[str, Any]", body)
        by_row = _by_row(fields)
        function = called(self._plane, target, _signature_name(fields))
        require_json(function.signature)
        if by_row:
            require_rows(function.signature)
        tensors = _tensors(fields, function, by_row=by_row)
        request = InferRequest(function.function, tensors, None, deadline, priority, owned=True)
        result = await self._plane.infer(target.model, target.version, request, target.label)
        answer = Answer((write_predictions if by_row else write_outputs)(result.tensors))
        if self._timings:
            answer.headers = [server_timing(result.times)]
        return answer

    def _added(self, target: Target) -> Mapping[str, Any]:
        return self._beside(target.model) if target.version is None and target.label is None else {}

    def _no_examples(self, target: Target, verb: str) -> InvalidInput:
        servable = servable_of(self._plane, target)
        return InvalidInput(
            f"model {servable.name!r} has no signature for {verb}",
            where=f":{verb}",
            seen="a request of tf.Example messages",
            expected=f"a signature with the method tensorflow/serving/{verb}; a model of JAX has none",
            remedy="send tensors: `:predict` with `instances` or `inputs`",
        )


_EXPECTED = '{"instances": [...]}, or {"inputs": {...}}, and "signature_name" if it is not the default'


def _by_row(body: dict[str, Any]) -> bool:
    given = [key for key in ("instances", "inputs") if key in body]
    if len(given) != 1:
        raise InvalidInput(
            "the body is not a request of TensorFlow Serving's predict API",
            where="the body",
            seen="both `instances` and `inputs`" if given else "neither `instances` nor `inputs`",
            expected=_EXPECTED,
        )
    return given == ["instances"]


def _signature_name(body: dict[str, Any]) -> str | None:
    name = body.get("signature_name")
    if name is not None and not isinstance(name, str):
        raise InvalidInput(
            "the signature's name is no text", where="signature_name", seen=type(name).__name__, expected="a string"
        )
    return name


def _tensors(body: dict[str, Any], function: Called, *, by_row: bool) -> dict[str, Any]:
    if by_row:
        return from_instances(body["instances"], function.signature, function.texts)
    return from_inputs(body["inputs"], function.signature, function.texts)


def _json(message: Any) -> Answer:
    return Answer(msgspec.json.encode(message))
