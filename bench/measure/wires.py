"""How a request is written and an answer read, for each way the servers are talked to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from measure.models import Model

_ID = "1"
"""Of every request: KServe's SDK fails without one."""
_DTYPES = {"FP32": np.float32, "INT32": np.int32}


@dataclass(frozen=True, slots=True)
class Wire:
    """One way to talk to a server.

    Attributes:
      transport: HTTP/1.1 or gRPC.
      path: with `{model}` for the model's name.
      encode: an input to the body of a request.
      decode: the body of an answer to the output.
      headers: of a request, from its body and the input.
    """

    transport: Literal["http", "grpc"]
    path: str
    encode: Callable[[Model, np.ndarray], bytes]
    decode: Callable[[bytes], np.ndarray]
    headers: Callable[[Model, np.ndarray], Mapping[str, str]] = field(
        default=lambda model, given: {"Content-Type": "application/json"}
    )


def _tensor(model: Model, given: np.ndarray) -> dict[str, Any]:
    return {"name": model.input, "shape": list(given.shape), "datatype": model.datatype}


def _numbers(given: np.ndarray) -> list[Any]:
    """Flat numbers with as many digits as their dtype has: 0.1, not 0.10000000149011612."""
    return [json.loads(str(number)) for number in given.reshape(-1)]


def _v2_json(model: Model, given: np.ndarray) -> bytes:
    return json.dumps({"id": _ID, "inputs": [{**_tensor(model, given), "data": _numbers(given)}]}).encode()


def _from_v2_json(body: bytes) -> np.ndarray:
    tensor = json.loads(body)["outputs"][0]
    return np.array(tensor["data"], np.float32).reshape(tensor["shape"])


def _v2_header(model: Model, given: np.ndarray) -> bytes:
    tensor = {**_tensor(model, given), "parameters": {"binary_data_size": given.nbytes}}
    return json.dumps({"id": _ID, "inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()


def _v2_binary(model: Model, given: np.ndarray) -> bytes:
    return _v2_header(model, given) + given.tobytes()


def _from_v2_binary(body: bytes) -> np.ndarray:
    header, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    tensor = header["outputs"][0]
    if "data" in tensor and tensor["data"] is not None:  # a server may answer in JSON all the same
        return _from_v2_json(body)
    raw = body[len(body) - tensor["parameters"]["binary_data_size"] :]
    return np.frombuffer(raw, _DTYPES[tensor["datatype"]]).reshape(tensor["shape"])


def _v2_binary_headers(model: Model, given: np.ndarray) -> Mapping[str, str]:
    size = len(_v2_header(model, given))
    return {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(size)}


def _v2_grpc(model: Model, given: np.ndarray) -> bytes:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(id=_ID, model_name=model.name, raw_input_contents=[given.tobytes()])
    request.inputs.add(name=model.input, datatype=model.datatype, shape=given.shape)
    return request.SerializeToString()


def _from_v2_grpc(body: bytes) -> np.ndarray:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse.FromString(body)
    tensor = response.outputs[0]
    if response.raw_output_contents:
        return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tuple(tensor.shape))
    return np.array(tensor.contents.fp32_contents, np.float32).reshape(tuple(tensor.shape))


def _rows(model: Model, given: np.ndarray) -> bytes:
    rows = [_numbers(row) for row in given]
    return json.dumps({model.input: rows}).encode()


def _from_rows(body: bytes) -> np.ndarray:
    answer = msgspec.json.decode(body)
    return np.array(answer["output"] if isinstance(answer, dict) else answer, np.float32)


V2_JSON = Wire("http", "/v2/models/{model}/infer", _v2_json, _from_v2_json)
V2_BINARY = Wire("http", "/v2/models/{model}/infer", _v2_binary, _from_v2_binary, _v2_binary_headers)
V2_GRPC = Wire("grpc", "/inference.GRPCInferenceService/ModelInfer", _v2_grpc, _from_v2_grpc)
ROWS = Wire("http", "/predict", _rows, _from_rows)
"""A JSON object of nested lists, as web frameworks take it."""
