"""A servable behind a URL: the same interface as one in this process, over the Open Inference Protocol.

Errors of the server come back as the classes they left it as.
"""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from servax.core.errors import DeadlineExceeded, InvalidInput, NotFound, NotReady, ServaxError, UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.open_inference import messages
from servax.protocols.open_inference.codec import DTYPES, datatype_of, decode, encode
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import Outputs, Progress, State, default_function, flat_inputs
from servax.stages.buckets import Bucket
from servax.stages.conversion import check_unicode
from servax.stages.padding import check, pad

if TYPE_CHECKING:
    import httpx2

DEFAULT_TIMEOUT = 60.0
"""Seconds that an answer may take."""


class _Answer(msgspec.Struct):
    outputs: list[messages.InputTensor]
    parameters: messages.Parameters | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def connect(url: str, *, model: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> RemoteServable:
    """The model behind `http://host:8000`, or `http://host:8000/v2/models/NAME`.

    Args:
      url: of the server, or of one model on it.
      model: which model, where the URL does not say it and the server has several.
      timeout: seconds that an answer may take.

    Raises:
      NotReady: nothing answers at this URL.
      UsageError: the URL names no model and the server does not have exactly one.
      NotFound: the server has no such model.
    """
    base, named = _split(url)
    remote = _Connection(base, timeout)
    try:
        name = model or named or _only_model(remote)
        metadata = remote.get(f"/models/{quote(name)}")
    except ServaxError:
        remote.close()
        raise
    return RemoteServable(remote, metadata)


class RemoteServable:
    """A model on a server that speaks the Open Inference Protocol.

    What the server is not asked for anew: name, versions and signatures are those of the moment of `connect`.
    """

    def __init__(self, connection: _Connection, metadata: messages.Message) -> None:
        self._connection = connection
        self._metadata = metadata
        self._path = f"/models/{quote(metadata['name'])}"
        functions = metadata.get("functions") or {"predict": _described(metadata)}
        read = {name: messages.read_signature(message) for name, message in functions.items()}
        self._signatures = {name: signature for name, (signature, _) in read.items()}
        self._texts = {name: texts for name, (_, texts) in read.items()}
        self._named = "functions" in metadata

    @property
    def name(self) -> str:
        return self._metadata["name"]

    @property
    def url(self) -> str:
        """Of the server, without `/v2`."""
        return self._connection.base

    @property
    def version(self) -> str:
        return (self._metadata.get("versions") or ["1"])[-1]

    @property
    def platform(self) -> str:
        return self._metadata.get("platform", "")

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
        message = self._status()
        return State(message.get("state", "READY" if message.get("ready") else "LOADING"))

    @property
    def reason(self) -> str | None:
        return self._status().get("reason")

    @property
    def progress(self) -> Progress:
        programs = self._status().get("programs", {})
        return Progress(tuple(programs.get("done", ())), tuple(programs.get("left", ())))

    @property
    def stages(self) -> Any:
        raise UsageError(
            "a servable behind a URL has no stages to show",
            where=self.url,
            remedy="load the bundle in this process, or run `servax inspect` on it",
        )

    def predict(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        return self.infer(InferRequest(default_function(function, self._signatures), flat_inputs(inputs))).tensors

    async def predict_async(self, function: str | None = None, /, **inputs: Any) -> Outputs:
        request = InferRequest(default_function(function, self._signatures), flat_inputs(inputs))
        return (await self.infer_async(request)).tensors

    def infer(self, request: InferRequest) -> InferResult:
        body, headers = self._message(request)
        return _result(self._connection.post(f"{self._path}/infer", body, headers))

    async def infer_async(self, request: InferRequest) -> InferResult:
        body, headers = self._message(request)
        return _result(await self._connection.post_async(f"{self._path}/infer", body, headers))

    def close(self) -> None:
        """Closes the connections of this object; the server goes on."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        """`servable.embed(...)` calls the function `embed`."""
        if name in self.__dict__.get("_signatures", {}):
            return functools.partial(self.predict, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, and the model no such function")

    def __repr__(self) -> str:
        return f"<RemoteServable {self.name} ({', '.join(self._signatures)}) at {self.url}>"

    def _status(self) -> messages.Message:
        return self._connection.get(f"{self._path}/ready", accepted=(200, 503))

    def _message(self, request: InferRequest) -> tuple[bytes, dict[str, str]]:
        signature = self._signatures.get(request.function)
        if signature is None:
            raise NotFound(
                f"{self.name} has no function {request.function!r}", expected=" or ".join(sorted(self._signatures))
            )
        tensors = _complete(signature, self._texts[request.function], request.tensors)
        message: messages.Message = {
            "id": request.id,
            "inputs": [
                {"name": name, "datatype": datatype, "shape": list(array.shape), "data": encode(name, array)}
                for name, (datatype, array) in tensors.items()
            ],
        }
        if self._named:
            message["parameters"] = {"function": request.function}
        headers = {"content-type": "application/json"}
        if request.deadline is not None:
            left = (request.deadline - time.monotonic()) * 1e3
            if left <= 0:
                raise DeadlineExceeded("the deadline passed before the request was sent")
            headers["request-timeout-ms"] = f"{left:.3f}"
        return msgspec.json.encode(message), headers


class _Connection:
    """HTTP to one server, with its failures as errors of ours."""

    def __init__(self, base: str, timeout: float) -> None:
        import httpx2

        self.base = base
        self._timeout = timeout
        self._client = httpx2.Client(timeout=timeout)
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient]
        self._async = weakref.WeakKeyDictionary()

    def get(self, path: str, *, accepted: tuple[int, ...] = (200,)) -> messages.Message:
        return msgspec.json.decode(self._sent("GET", path, accepted=accepted).content)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
        return self._sent("POST", path, body, headers)

    async def post_async(self, path: str, body: bytes, headers: dict[str, str]) -> httpx2.Response:
        import httpx2

        loop = asyncio.get_running_loop()
        if loop not in self._async:  # a client's connections belong to the loop they were opened on
            self._async[loop] = httpx2.AsyncClient(timeout=self._timeout)
        try:
            response = await self._async[loop].post(self._url(path), content=body, headers=headers)
        except httpx2.TransportError as error:
            raise self._failure(error) from error
        return self._checked(response, (200,))

    def close(self) -> None:
        self._client.close()

    def _sent(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        accepted: tuple[int, ...] = (200,),
    ) -> httpx2.Response:
        import httpx2

        try:
            response = self._client.request(method, self._url(path), content=body, headers=headers)
        except httpx2.TransportError as error:
            raise self._failure(error) from error
        return self._checked(response, accepted)

    def _url(self, path: str) -> str:
        return f"{self.base}/v2{path}"

    def _failure(self, error: Exception) -> ServaxError:
        import httpx2

        if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
            return DeadlineExceeded(
                "the server did not answer in time",
                where=self.base,
                expected=f"an answer within {self._timeout:g} s",
                remedy="pass a longer timeout to connect",
            )
        return NotReady(
            "no server answers",
            where=self.base,
            seen=str(error) or type(error).__name__,
            remedy="start one: servax serve BUNDLE",
        )

    def _checked(self, response: httpx2.Response, accepted: tuple[int, ...]) -> httpx2.Response:
        if response.status_code in accepted:
            return response
        try:
            message = msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            message = response.text or f"HTTP status {response.status_code}"
        raise messages.read_error(response.status_code, message)


def _split(url: str) -> tuple[str, str | None]:
    """The server's part of a URL, and the model's name if it has one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError("this is not the URL of a server", seen=url, expected="http://host:8000")
    path, named, model = parts.path.rstrip("/").partition("/v2/models/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v2')}", model.split("/")[0] if named else None


def _only_model(connection: _Connection) -> str:
    listed = msgspec.json.decode(connection.post("/repository/index", b"", {}).content)
    names = [each["name"] for each in listed]
    if len(names) != 1:
        raise UsageError(
            "the URL does not say which model",
            where=connection.base,
            seen=", ".join(names) or "no model yet",
            expected="one model",
            remedy=f"name one: {connection.base}/v2/models/{names[0] if names else 'NAME'}",
        )
    return names[0]


def _described(metadata: messages.Message) -> messages.Message:
    """A signature from the metadata of a server that is not ours: the first unknown size is taken for the batch."""
    batch = any(-1 in tensor["shape"][:1] for tensor in metadata.get("inputs", ()))

    def spec(tensor: messages.Message) -> messages.Message:
        shape = [
            size if size >= 0 else ("batch" if axis == 0 and batch else f"{tensor['name']}{axis}")
            for axis, size in enumerate(tensor["shape"])
        ]
        return {"name": tensor["name"], "dtype": DTYPES.get(tensor["datatype"], tensor["datatype"]), "shape": shape}

    return {
        "inputs": [spec(tensor) for tensor in metadata.get("inputs", ())],
        "outputs": [spec(tensor) for tensor in metadata.get("outputs", ())],
        "batch": "batch" if batch else None,
    }


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
    answer = _ANSWER.decode(response.content)
    tensors = {
        each.name: decode(each.name, each.datatype, each.shape, memoryview(each.data)) for each in answer.outputs
    }
    bucket = str((answer.parameters or {}).get("bucket", ""))
    return InferResult(tensors, bucket, _times(response.headers.get("server-timing", "")))


def _times(header: str) -> dict[str, float]:
    times: dict[str, float] = {}
    for part in filter(None, header.split(", ")):
        step, _, duration = part.partition(";dur=")
        times[step] = float(duration) / 1e3
    return times
