"""The warm-up file of TensorFlow Serving: one request per bucket, replayed before the model is announced as ready.

Format: a TFRecord of `tensorflow.serving.PredictionLog` messages, at most 1000, in
`assets.extra/tf_serving_warmup_requests` (https://www.tensorflow.org/tfx/serving/saved_model_warmup). The messages are
described here, in a descriptor pool of their own, so that `tensorflow_serving` may be imported beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from servax.core.events import Notice, emit
from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.targets.savedmodel_names import tensor_dtype, tensor_name

PATH = "assets.extra/tf_serving_warmup_requests"
LIMIT = 1000
"""Records that TensorFlow Serving accepts in the file."""

# Message -> fields as (name, number, type). Numbers are those of tensorflow_serving/apis: prediction_log.proto,
# predict.proto and model.proto. A tensor is bytes here: on the wire a message is its bytes with their length before.
_MESSAGES = {
    "PredictionLog": (("predict_log", 6, "PredictLog"),),
    "PredictLog": (("request", 1, "PredictRequest"),),
    "PredictRequest": (("model_spec", 1, "ModelSpec"), ("inputs", 2, "[Input]")),
    "Input": (("key", 1, "string"), ("value", 2, "bytes")),
    "ModelSpec": (("name", 1, "string"), ("signature_name", 3, "string")),
}


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """One request of the file: a signature of the SavedModel at one bucket."""

    signature_name: str
    signature: Signature
    bucket: Bucket


def write_warmup(directory: str, model: str, requests: Sequence[WarmupRequest]) -> None:
    """Writes the file of a SavedModel.

    Args:
      directory: of the SavedModel.
      model: its name, as TensorFlow Serving will know it.
      requests: in the order in which they are replayed; those past `LIMIT` are left out, and a notice says so.
    """
    import tensorflow as tf

    if len(requests) > LIMIT:
        emit(
            Notice(
                f"saved_model: TensorFlow Serving warms up at most {LIMIT} requests; the last {len(requests) - LIMIT} "
                f"of {len(requests)} buckets are left out and compile at their first request",
                level="warning",
            )
        )
    path = f"{directory}/{PATH}"
    tf.io.gfile.makedirs(path.rpartition("/")[0])
    with tf.io.TFRecordWriter(path) as file:
        for request in requests[:LIMIT]:
            file.write(_prediction_log(model, request))


def _prediction_log(model: str, request: WarmupRequest) -> bytes:
    message: Any = _classes()["PredictionLog"]()
    predict = message.predict_log.request
    predict.model_spec.name = model
    predict.model_spec.signature_name = request.signature_name
    sizes = request.bucket.mapping()
    for spec in request.signature.inputs:
        predict.inputs.add(key=tensor_name(spec.name), value=_constant(spec, request.signature.lengths, sizes))
    serialized: bytes = message.SerializeToString(deterministic=True)
    return serialized


def _constant(spec: TensorSpec, lengths: Mapping[str, str], sizes: Mapping[str, int]) -> bytes:
    """A `TensorProto` of one repeated value, a few bytes whatever its shape: what a fully padded request would hold."""
    import tensorflow as tf

    value = spec.pad if spec.default is None else spec.default
    if spec.name in lengths:
        value = sizes[lengths[spec.name]]
    dtype = tf.as_dtype(tensor_dtype(spec.numpy_dtype))
    value = bool(value) if dtype == tf.bool else value
    proto: bytes = tf.make_tensor_proto(value, dtype=dtype, shape=spec.concrete(sizes)).SerializeToString()
    return proto


@cache
def _classes() -> Mapping[str, type]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": field.TYPE_STRING, "bytes": field.TYPE_BYTES}
    file = descriptor_pb2.FileDescriptorProto(name="servax/warmup.proto", package="servax", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind in fields:
            element = kind.strip("[]")
            added = described.field.add(
                name=name,
                number=number,
                label=field.LABEL_REPEATED if kind.startswith("[") else field.LABEL_OPTIONAL,
                type=scalars.get(element, field.TYPE_MESSAGE),
            )
            if element not in scalars:
                added.type_name = f".servax.{element}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names: Iterable[str] = _MESSAGES
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"servax.{name}")) for name in names}
