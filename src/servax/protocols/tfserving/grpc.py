"""TensorFlow Serving over gRPC: `PredictionService` with Predict and GetModelMetadata, `ModelService` with status."""

from __future__ import annotations

from typing import Any

import grpc

from servax.core.errors import InvalidInput
from servax.core.tensors import TensorSpec
from servax.protocols.dataplane import DataPlane
from servax.protocols.grpc.calls import absent, answering, time_limit
from servax.protocols.grpc.messages import Messages
from servax.protocols.grpc.service import Service
from servax.protocols.tfserving.names import (
    DATA_TYPES,
    PREDICT_METHOD,
    STATES,
    Called,
    Target,
    called,
    error_of,
    input_name,
    servable_of,
    signature_names,
    statuses_of,
    version_number,
    wire_name,
)
from servax.protocols.tfserving.tensors import read_tensor, write_tensor
from servax.protocols.wording import short
from servax.runtime.request import InferRequest

PREDICTION = "tensorflow.serving.PredictionService"
MODEL = "tensorflow.serving.ModelService"

_EXAMPLES = "takes tf.Example messages, which a model of JAX has no signature for: call Predict with tensors"
_RELOAD = (
    "this server's models and versions are set where it is started, and by the Open Inference Protocol's repository "
    "extension: POST /v2/repository/models/MODEL/load"
)
_SIGNATURES = "signature_def"
_SIGNATURES_TYPE = "type.googleapis.com/tensorflow.serving.SignatureDefMap"


def schema() -> Messages:
    """The messages of both services."""
    return Messages.load("servax.protocols.tfserving", "tensorflow_serving")


class PredictionService:
    """`tensorflow.serving.PredictionService` over a data plane.

    What TensorFlow Serving has besides, Classify, Regress and MultiInference, takes `tf.Example` messages, which a
    model of JAX has no use for.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._methods = schema().methods(PREDICTION)
        self._signature_map = schema()["tensorflow.serving.SignatureDefMap"]

    def service(self) -> Service:
        """As a gRPC server takes it."""
        handlers = {
            "Predict": answering(self._predict, *self._methods["Predict"]),
            "GetModelMetadata": answering(self._metadata, *self._methods["GetModelMetadata"]),
            **{name: absent(f"{name} {_EXAMPLES}") for name in ("Classify", "Regress", "MultiInference")},
        }
        return Service(PREDICTION, grpc.method_handlers_generic_handler(PREDICTION, handlers), schema())

    async def _predict(self, request: Any, context: Any) -> Any:
        target = _target(request.model_spec)
        function = called(self._plane, target, request.model_spec.signature_name)
        outputs = _chosen(request.output_filter, function)
        tensors = _read(request.inputs, function)
        wanted = InferRequest(function.function, tensors, None, time_limit(context), owned=True)
        result = await self._plane.infer(target.model, target.version, wanted, target.label)
        response = self._methods["Predict"][1]()
        _write_spec(response.model_spec, target.model, result.version, function.signature_name)
        for name in outputs:
            write_tensor(name, result.tensors[name], response.outputs[wire_name(name)])
        return response

    async def _metadata(self, request: Any, context: Any) -> Any:
        fields = list(request.metadata_field)
        if not fields or any(field != _SIGNATURES for field in fields):
            raise InvalidInput(
                "there is no such metadata",
                where="metadata_field",
                seen=short(", ".join(map(short, fields[:8]))) or "none",
                expected=_SIGNATURES,
            )
        servable = servable_of(self._plane, _target(request.model_spec))
        signatures = self._signature_map()
        for name, function in signature_names(servable.signatures).items():
            written = signatures.signature_def[name]
            written.method_name = PREDICT_METHOD
            for spec in servable.signatures[function].inputs:
                _write_info(written.inputs[wire_name(spec.name)], spec)
            for text in servable.texts.get(function, {}):
                _write_info(written.inputs[wire_name(text)], TensorSpec(text, "string", ("batch",)))
            for spec in servable.signatures[function].outputs:
                _write_info(written.outputs[wire_name(spec.name)], spec)
        response = self._methods["GetModelMetadata"][1]()
        _write_spec(response.model_spec, servable.name, servable.version)
        response.metadata[_SIGNATURES].type_url = _SIGNATURES_TYPE
        response.metadata[_SIGNATURES].value = signatures.SerializeToString()
        return response


class ModelService:
    """`tensorflow.serving.ModelService` over a data plane."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._methods = schema().methods(MODEL)

    def service(self) -> Service:
        """As a gRPC server takes it."""
        handlers = {
            "GetModelStatus": answering(self._status, *self._methods["GetModelStatus"]),
            "HandleReloadConfigRequest": absent(_RELOAD),
        }
        return Service(MODEL, grpc.method_handlers_generic_handler(MODEL, handlers), schema())

    async def _status(self, request: Any, context: Any) -> Any:
        target = _target(request.model_spec)
        response = self._methods["GetModelStatus"][1]()
        for status in statuses_of(self._plane, target):
            _, code, message = error_of(status)
            written = response.model_version_status.add()
            written.version = version_number(status.version) or 0
            written.state = STATES[status.state][1]
            written.status.error_code = code
            written.status.error_message = message
        return response


def _target(spec: Any) -> Target:
    if not spec.name:
        raise InvalidInput("the request names no model", where="model_spec.name", seen="nothing", expected="a name")
    choice = spec.WhichOneof("version_choice")
    if choice == "version":
        return Target(spec.name, str(spec.version.value))
    return Target(spec.name, label=spec.version_label) if choice else Target(spec.name)


def _chosen(wanted: Any, function: Called) -> list[str]:
    """Names of the outputs to send, checked before anything runs."""
    known = {wire_name(spec.name): spec.name for spec in function.signature.outputs}
    known |= {name: name for name in known.values()}
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidInput(
            "there are no such outputs",
            where="output_filter",
            seen=", ".join(map(short, unknown[:8])),
            expected=", ".join(known),
        )
    names = list(dict.fromkeys(known[name] for name in wanted or known))
    if stuck := [spec for spec in function.signature.outputs if spec.name in names and spec.dtype not in DATA_TYPES]:
        raise InvalidInput(
            "outputs have a dtype that TensorFlow has no type for",
            where=", ".join(spec.name for spec in stuck),
            seen=", ".join(spec.dtype for spec in stuck),
            expected="one of " + ", ".join(DATA_TYPES),
            remedy="convert them inside the function, or leave them out by output_filter",
        )
    return names


def _read(inputs: Any, function: Called) -> dict[str, Any]:
    """Arrays by our names of the inputs."""
    tensors: dict[str, Any] = {}
    for sent, tensor in inputs.items():
        name = input_name(sent, function.signature, function.texts)
        array = read_tensor(name, tensor)
        if name in tensors:
            raise InvalidInput(f"input {name!r} was sent twice", where=name, seen=f"{sent} as well", expected="one")
        if array.dtype == object and name not in function.texts:
            raise InvalidInput(
                f"input {name!r} is no text",
                where=name,
                seen="DT_STRING",
                expected=function.signature.input(name).text(),
            )
        tensors[name] = array
    return tensors


def _write_spec(spec: Any, name: str, version: str, signature_name: str = "") -> None:
    spec.name = name
    spec.signature_name = signature_name
    number = version_number(version)
    if number is not None:
        spec.version.value = number


def _write_info(info: Any, spec: TensorSpec) -> None:
    info.name = wire_name(spec.name)
    info.dtype = DATA_TYPES[spec.dtype][1] if spec.dtype in DATA_TYPES else 0
    info.tensor_shape.SetInParent()
    for dim in spec.shape:
        if isinstance(dim, int):
            info.tensor_shape.dim.add().size = dim
        else:
            info.tensor_shape.dim.add(size=-1, name=dim)
