"""What TensorFlow Serving's REST API says beside tensors: a version's status, a model's signatures, an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servax.core.errors import ServaxError
from servax.core.tensors import TensorSpec
from servax.protocols.tfserving.names import DATA_TYPES, PREDICT_METHOD, STATES, error_of, signature_names, wire_name
from servax.protocols.wording import short
from servax.runtime.catalog import ModelStatus
from servax.runtime.servable import Servable

Message = dict[str, Any]

_LONGEST = 4000
"""Characters of an error: a request may have put thousands of names into it."""


def model_status(statuses: Sequence[ModelStatus]) -> Message:
    """`GetModelStatusResponse`, as Protocol Buffers' JSON mapping has it: integers of 64 bits are strings."""
    return {"model_version_status": [_version_status(status) for status in statuses]}


def model_metadata(servable: Servable) -> Message:
    """`GetModelMetadataResponse` with the field `signature_def`, the only one there is."""
    signatures = {
        name: {
            "inputs": {
                **{wire_name(spec.name): _info(spec) for spec in servable.signatures[function].inputs},
                **{wire_name(text): _text(text) for text in servable.texts.get(function, {})},
            },
            "outputs": {wire_name(spec.name): _info(spec) for spec in servable.signatures[function].outputs},
            "method_name": PREDICT_METHOD,
            "defaults": {},
        }
        for name, function in signature_names(servable.signatures).items()
    }
    return {
        "model_spec": {"name": servable.name, "signature_name": "", "version": servable.version},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def write_error(error: ServaxError) -> bytes:
    """`{"error": "..."}`."""
    return msgspec.json.encode({"error": short(error.sentence(), _LONGEST)})


def _version_status(status: ModelStatus) -> Message:
    code, _, message = error_of(status)
    return {
        "version": status.version,
        "state": STATES[status.state][0],
        "status": {"error_code": code, "error_message": message},
    }


def _info(spec: TensorSpec) -> Mapping[str, Any]:
    dims = [
        {"size": str(dim), "name": ""} if isinstance(dim, int) else {"size": "-1", "name": dim} for dim in spec.shape
    ]
    return {
        "dtype": DATA_TYPES[spec.dtype][0] if spec.dtype in DATA_TYPES else "DT_INVALID",
        "tensor_shape": {"dim": dims, "unknown_rank": False},
        "name": wire_name(spec.name),
    }


def _text(name: str) -> Mapping[str, Any]:
    return _info(TensorSpec(name, "string", ("batch",)))
