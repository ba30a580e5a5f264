"""A servable behind a URL: the same interface as one in this process, over the Open Inference Protocol.

Errors of the server come back as the classes they left it as.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import numpy as np

from servax.core.errors import DeadlineExceeded, ExecutionError, InvalidInput, NotFound, ServaxError, UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.connection import DEFAULT_TIMEOUT, Connection, Credentials
from servax.protocols.open_inference import answers, binary, messages
from servax.protocols.open_inference.codec import datatype_of, decode, encode
from servax.protocols.open_inference.raw import decode_raw
from servax.runtime.request import InferRequest, InferResult, new_id
from servax.runtime.servable import Outputs, Progress, State, default_function, flat_inputs, no_attribute
from servax.stages.buckets import Bucket
from servax.stages.conversion import check_unicode
from servax.stages.padding import check, pad

if TYPE_CHECKING:
    import httpx2

    from servax.runtime.swap import SwapReport


def connect(
    url: str,
    *,
    model: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    api_key: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None,
) -> RemoteServable:
    """The model behind `http://host:8000`, or `http://host:8000/v2/models/NAME`.

    Tensors travel in binary where the server lists that extension, and every dtype of the protocol with them; in JSON
    elsewhere.

    Args:
      url: of the server, or of one model on it.
      model: which model, where the URL does not say it and the server has several.
      timeout: seconds that an answer may take.
      api_key: for a server that asks for one; by default that of the environment's `SERVAX_API_KEY`.
      ca: of `https://`, the file of certificates that sign the server's; by default the system's.
      certificate: files of a certificate and of its key, for a server that asks for the client's.

    Raises:
      NotReady: nothing answers at this URL.
      UsageError: the URL names no model and the server does not have exactly one, or what answers there does not
        speak the protocol.
      NotFound: the server has no such model.
    """
    base, named = _split(url)
    remote = Connection(base, timeout, Credentials(api_key, ca, certificate))
    try:
        name = model or named or _only_model(remote)
        metadata = remote.get(f"/models/{quote(name, errors='replace')}", answers.Model)
    except ServaxError:
        remote.close()
        raise
    return RemoteServable(remote, metadata, binary=_reads_binary(remote))


class RemoteServable:
    """A model on a server that speaks the Open Inference Protocol.

    What the server is not asked for anew: name, versions and signatures are those of the moment of `connect`.
    """

    def __init__(self, connection: Connection, metadata: answers.Model, *, binary: bool) -> None:
        self._connection = connection
        self._metadata = metadata
        self._path = f"/models/{quote(metadata.name)}"
        if metadata.functions:
            read = {name: answers.read_signature(function) for name, function in metadata.functions.items()}
        else:
            read = {"predict": (answers.signature_of(metadata), dict[str, str]())}
        self._signatures = {name: signature for name, (signature, _) in read.items()}
        self._texts = {name: texts for name, (_, texts) in read.items()}
        self._named = bool(metadata.functions)
        self._binary = binary

    @property
    def name(self) -> str:
        return self._metadata.name

    @property
    def url(self) -> str:
        """Of the server, without `/v2`."""
        return self._connection.base

    @property
    def version(self) -> str:
        return (self._metadata.versions or ["1"])[-1]

    @property
    def platform(self) -> str:
        return self._metadata.platform

    @property
    def signatures(self) -> Mapping[str, Signature]:
        return self._signatures

    @property
    def texts(self) -> Mapping[str, Mapping[str, str]]:
        return self._texts

    @property
    def ready(self) -> bool:
        """Whether the server says that the model answers."""
        return self.state is State.READY

    @property
    def state(self) -> State:
        """The state on the server; of a server that tells none, READY or LOADING."""
        status = self._status()
        return status.state or (State.READY if status.ready else State.LOADING)

    @property
    def reason(self) -> str | None:
        return self._status().reason

    @property
    def progress(self) -> Progress:
        programs = self._status().programs
        return Progress(programs.done, programs.left)

    @property
    def stages(self) -> Any:
        raise UsageError(
            "a servable behind a URL has no stages to show",
            where=self.url,
            remedy="load the bundle in this process, or run `servax inspect` on it",
        )

    @property
    def app(self) -> Any:
        raise UsageError(
            "a servable behind a URL has no application: it is served already",
            where=self.url,
            remedy="load the bundle in this process and mount the app of that, or send requests to the URL",
        )

    def predict(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        return self.infer(InferRequest(default_function(function, self._signatures), flat_inputs(inputs))).tensors

    async def predict_async(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        request = InferRequest(default_function(function, self._signatures), flat_inputs(inputs))
        return (await self.infer_async(request)).tensors

    def infer(self, request: InferRequest, *, outputs: Sequence[str] | None = None) -> InferResult:
        """Answers one request; of all outputs, or of those named: others need not have a form in JSON."""
        body, headers = self._message(request, outputs)
        return _result(self._connection.post(f"{self._path}/infer", body, headers))

    async def infer_async(self, request: InferRequest, *, outputs: Sequence[str] | None = None) -> InferResult:
        """As `infer`."""
        body, headers = self._message(request, outputs)
        return _result(await self._connection.post_async(f"{self._path}/infer", body, headers))

    def swap(self, checkpoint: str | os.PathLike[str], **options: Any) -> SwapReport:
        raise UsageError(
            "a servable behind a URL cannot swap: its parameters are the server's",
            where=self.url,
            remedy=f"start the server anew with these: servax serve BUNDLE --checkpoint {os.fspath(checkpoint)}",
        )

    def close(self) -> None:
        """Closes the connections of this object, those of `predict_async` too; the server goes on."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        """`servable.embed(...)` calls the function `embed`."""
        signatures = self.__dict__.get("_signatures", {})
        if name in signatures:
            return functools.partial(self.predict, name)
        raise no_attribute(self, name, signatures)

    def __repr__(self) -> str:
        return f"<RemoteServable {self.name} ({', '.join(self._signatures)}) at {self.url}>"

    def _status(self) -> answers.Status:
        return self._connection.status(f"{self._path}/ready")

    def _message(self, request: InferRequest, outputs: Sequence[str] | None) -> tuple[bytes, dict[str, str]]:
        signature = self._signatures.get(request.function)
        if signature is None:
            raise NotFound(
                f"{self.name} has no function {request.function!r}", expected=" or ".join(sorted(self._signatures))
            )
        tensors = _complete(signature, self._texts[request.function], request.tensors)
        parameters: messages.Parameters = {"function": request.function} if self._named else {}
        headers = {"content-type": "application/json"}
        if request.priority:
            headers["request-priority"] = str(request.priority)
        if request.deadline is not None:
            left = (request.deadline - time.monotonic()) * 1e3
            if left <= 0:
                raise DeadlineExceeded("the deadline passed before the request was sent")
            headers["request-timeout-ms"] = f"{left:.3f}"
        message: messages.Message = {"id": request.id or new_id()}
        if outputs is not None:
            message["outputs"] = [{"name": name} for name in ([outputs] if isinstance(outputs, str) else outputs)]
        inputs: list[messages.Message] = [
            {"name": name, "datatype": datatype, "shape": list(array.shape)}
            for name, (datatype, array) in tensors.items()
        ]
        arrays = {name: array for name, (_, array) in tensors.items()}
        if self._binary:
            message["parameters"] = {**parameters, "binary_data_output": True}
            body, length = binary.write_binary(message, "inputs", inputs, arrays)
            headers |= {"content-type": "application/octet-stream", "inference-header-content-length": str(length)}
            return body, headers
        if parameters:
            message["parameters"] = parameters
        message["inputs"] = [tensor | {"data": encode(tensor["name"], arrays[tensor["name"]])} for tensor in inputs]
        return messages.write_message(message), headers


def _reads_binary(connection: Connection) -> bool:
    """Whether a server says that it takes binary tensors; one that says nothing of itself does not."""
    try:
        return binary.EXTENSION in connection.get("", answers.Server).extensions
    except ServaxError:
        return False


def _split(url: str) -> tuple[str, str | None]:
    """The server's part of a URL, and the model's name if it has one."""
    import httpx2

    wrong = UsageError("this is not the URL of a server", seen=repr(url), expected="http://host:8000")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx2.URL(url)
    except (ValueError, TypeError, AttributeError, httpx2.InvalidURL):  # brackets, a port beyond 65535, no text at all
        raise wrong from None
    if not usable:
        raise wrong
    path, named, model = parts.path.rstrip("/").partition("/v2/models/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v2')}", model.split("/")[0] if named else None


def _only_model(connection: Connection) -> str:
    path = "/repository/index"
    listed = answers.read(list[answers.Listed], connection.post(path, b"", {}).content, f"{connection.base}/v2{path}")
    names = list(dict.fromkeys(each.name for each in listed))  # a model of a store is listed with each version
    if len(names) != 1:
        raise UsageError(
            "the URL does not say which model",
            where=connection.base,
            seen=", ".join(names) or "no model yet",
            expected="one model",
            remedy=f"name one: {connection.base}/v2/models/{names[0] if names else 'NAME'}",
        )
    return names[0]


def _complete(
    signature: Signature, texts: Mapping[str, str], tensors: Mapping[str, Any]
) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Datatype and array by name: checked as the server would, and ragged rows filled up, their lengths beside them."""
    given = {name: value for name, value in tensors.items() if name in texts}
    replaced = {texts[name] for name in given}
    if clash := replaced & set(tensors):
        raise InvalidInput(f"{', '.join(clash)} was sent beside the text it is made of", where=", ".join(clash))
    rest = Signature(
        tuple(spec for spec in signature.inputs if spec.name not in replaced and (not given or spec.name in tensors)),
        batch=signature.batch,
        lengths=signature.lengths,
    )
    checked = check(rest, {name: value for name, value in tensors.items() if name not in given}, owned=True)
    arrays = pad(rest, Bucket.of(**checked.sizes), checked)
    specs = sorted(rest.inputs, key=lambda spec: spec.name)
    complete = {spec.name: (datatype_of(spec.dtype), array) for spec, array in zip(specs, arrays, strict=True)}
    for name, value in given.items():
        complete[name] = ("BYTES", _texts(name, value))
    return complete


def _texts(name: str, value: Any) -> np.ndarray[Any, Any]:
    spec = TensorSpec(name, "string", ("batch",))
    (array,) = check(Signature((spec,)), {name: value}).tensors.values()
    assert isinstance(array, np.ndarray)
    check_unicode(name, array)
    return array


def _result(response: httpx2.Response) -> InferResult:
    head, rest = response.content, memoryview(b"")
    length = response.headers.get(binary.HEADER.decode(), "")
    if length.isdigit():
        head, rest = head[: int(length)], memoryview(head)[int(length) :]
    answer = answers.read(answers.Inference, head, str(response.url))
    try:
        tensors = {
            each.name: decode(each.name, each.datatype, each.shape, memoryview(each.data)).copy()
            if piece is None
            else decode_raw(each.name, each.datatype, each.shape, piece).copy()
            for each, piece in zip(answer.outputs, binary.binary_data(answer.outputs, rest), strict=True)
        }
    except InvalidInput as error:  # the input of this side: nothing that the caller sent
        raise ExecutionError(
            f"the server's answer cannot be read: {error.what}",
            where=error.where,
            seen=error.seen,
            expected=error.expected,
        ) from None
    bucket = str((answer.parameters or {}).get("bucket", ""))
    return InferResult(tensors, bucket, _times(response.headers.get("server-timing", "")), answer.model_version or "")


def _times(header: str) -> dict[str, float]:
    """Seconds by step; what other servers write beside them (`db;desc="x"`) is passed over."""
    times: dict[str, float] = {}
    for part in header.split(","):
        step, _, duration = part.strip().partition(";dur=")
        with contextlib.suppress(ValueError):
            times[step] = float(duration) / 1e3
    return times
