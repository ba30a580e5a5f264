"""`tensorflow-serving-api`'s stubs, unmodified, with TensorFlow's `make_tensor_proto` and `make_ndarray`."""

import contextlib

import grpc
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tfserving_toys as toys
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tensorflow.core.framework import tensor_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

import serving_toys
from servax.core.tensors import dtype_of
from servax.protocols.dataplane import DataPlane
from servax.protocols.tfserving.grpc import schema
from servax.server.background import serve


@contextlib.contextmanager
def calling(plane):
    """A channel to a server of ours."""
    with serve(plane, port=0, grpc_port=0) as server, grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def channel():
    with toys.servable("123") as first, toys.servable("124", times=2, plus=1) as second:
        plane = toys.plane(first, second, labels={"stable": "123", "canary": "124"})
        with calling(plane) as channel:
            yield channel


@pytest.fixture(scope="module")
def prediction(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture(scope="module")
def models(channel):
    return model_service_pb2_grpc.ModelServiceStub(channel)


def request(inputs, signature="", *, name="half_plus_three", version=None, label=None, outputs=()):
    message = predict_pb2.PredictRequest(output_filter=outputs)
    message.model_spec.name = name
    message.model_spec.signature_name = signature
    if version is not None:
        message.model_spec.version.value = version
    if label is not None:
        message.model_spec.version_label = label
    for tensor, value in inputs.items():
        proto = value if isinstance(value, tensor_pb2.TensorProto) else tf.make_tensor_proto(value)
        message.inputs[tensor].CopyFrom(proto)
    return message


def arrays(response):
    return {name: tf.make_ndarray(tensor) for name, tensor in response.outputs.items()}


def refused(call, message, code=grpc.StatusCode.INVALID_ARGUMENT):
    with pytest.raises(grpc.RpcError) as caught:
        call(message, timeout=30)
    assert caught.value.code() is code, caught.value.details()
    return caught.value.details()


X = {"x": np.array([1, 2, 5], np.float32)}


def test_predict_names_what_answered(prediction):
    response = prediction.Predict(request(X, version=123), timeout=30)
    assert arrays(response)["y"].tolist() == [3.5, 4.0, 5.5]
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("half_plus_three", 123, "serving_default")
    assert prediction.Predict(request(X, "predict"), timeout=30).model_spec.signature_name == "predict"


def test_versions_and_labels(prediction):
    for choice, first in (({"version": 123}, 3.5), ({"label": "stable"}, 3.5), ({"label": "canary"}, 3.0), ({}, 3.0)):
        response = prediction.Predict(request(X, **choice), timeout=30)
        assert arrays(response)["y"][0] == first
        assert response.model_spec.version.value == (123 if first == 3.5 else 124)


@pytest.mark.parametrize("dtype", toys.ECHOED)
def test_every_dtype_there_and_back(prediction, dtype):
    kind = dtype_of(dtype)
    values = [True, False, True] if dtype == "bool" else [0, 1, 100]
    if "int" in dtype:
        values = [int(ml_dtypes.iinfo(kind).min), 1, int(ml_dtypes.iinfo(kind).max)]
    array = np.array(values).astype(kind)
    # As bytes, and, for a single element, in the list of its type.
    for sent in (array, array[2:]):
        answer = arrays(prediction.Predict(request({"x": sent}, f"echo_{dtype}"), timeout=30))["y"]
        assert answer.dtype == kind
        np.testing.assert_array_equal(answer, np.stack([sent, sent], 1))


def test_one_value_fills_the_shape(prediction):
    filled = tf.make_tensor_proto(1.0, shape=[4])
    assert len(filled.float_val) == 1
    assert arrays(prediction.Predict(request({"x": filled}, version=123), timeout=30))["y"].tolist() == [3.5] * 4


def test_several_outputs_and_the_filter(prediction):
    inputs = {"x": np.array([[1, 2], [3, 4]], np.float32), "scale": np.array([2, 0.5], np.float32)}
    everything = arrays(prediction.Predict(request(inputs, "split"), timeout=30))
    assert {name: array.tolist() for name, array in everything.items()} == {
        "total": [6.0, 3.5],
        "scaled": [[2.0, 4.0], [1.5, 2.0]],
    }
    assert list(arrays(prediction.Predict(request(inputs, "split", outputs=["total"]), timeout=30))) == ["total"]
    twice = prediction.Predict(request(inputs, "split", outputs=["total", "total"]), timeout=30)
    assert list(arrays(twice)) == ["total"]
    details = refused(prediction.Predict, request(inputs, "split", outputs=["total", "nope"]))
    assert "nope" in details
    assert "scaled, total" in details


def test_an_output_without_axes_is_a_scalar(prediction):
    answer = arrays(prediction.Predict(request({"x": np.float32([1, 2, 3])}, "whole"), timeout=30))["sum"]
    assert (answer.shape, float(answer)) == ((), 6.0)


def test_complex_outputs(prediction):
    answer = arrays(prediction.Predict(request({"x": np.float32([2])}, "complex"), timeout=30))["y"]
    assert (answer.dtype, answer.tolist()) == (np.complex64, [2 + 2j])


def test_texts(tmp_path):
    servable = serving_toys.reading_toy(serving_toys.word_tokenizer(tmp_path, {"[UNK]": 0, "one": 1, "two": 2}))
    with servable, calling(DataPlane([servable])) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        (text,) = servable.texts["total"]
        texts = request({text: tf.make_tensor_proto(["one two", "two"])}, name="toy")
        assert arrays(stub.Predict(texts, timeout=30))["sum"].tolist() == [3, 2]
        details = refused(stub.Predict, request({"x": tf.make_tensor_proto(["one"])}, name="toy"))
        assert "DT_STRING" in details


def test_what_is_not_there(prediction, models):
    refused(prediction.Predict, request(X, name="nope"), grpc.StatusCode.NOT_FOUND)
    refused(prediction.Predict, request(X, version=9), grpc.StatusCode.NOT_FOUND)
    refused(prediction.Predict, request(X, version=-1), grpc.StatusCode.NOT_FOUND)
    assert "serving_default" in refused(prediction.Predict, request(X, "nope"))
    assert "no label 'nope'" in refused(prediction.Predict, request(X, label="nope"))
    assert "names no model" in refused(prediction.Predict, request(X, name=""))
    missing = get_model_status_pb2.GetModelStatusRequest()
    missing.model_spec.name = "nope"
    refused(models.GetModelStatus, missing, grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({}, ["x"]),
        ({"x": X["x"], "more": X["x"]}, ["more"]),
        ({"x": np.array([[1.0]], np.float32)}, ["x", "float32[1, 1]", "float32[batch]"]),
        ({"x": np.array(["a"])}, ["x", "DT_STRING", "float32[batch]"]),
        ({"x": np.array([True])}, ["x", "bool[1]", "float32[batch]"]),
        ({"x": np.zeros(0, np.float32)}, ["x"]),
    ],
)
def test_wrong_tensors_name_tensor_seen_and_expected(prediction, inputs, parts):
    details = refused(prediction.Predict, request(inputs))
    for part in parts:
        assert part in details


def test_hostile_tensors(prediction):
    for shape, fields in (
        ([-1], {"float_val": [1]}),
        ([2**40], {"float_val": [1]}),
        ([2**62, 4], {"float_val": [1]}),
        ([2**62, 4], {"tensor_content": b"1234"}),
        ([1] * 100, {"float_val": [1]}),
        ([3], {"tensor_content": b"1234"}),
    ):
        tensor = tensor_pb2.TensorProto(dtype=1, **fields)
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        assert "'x'" in refused(prediction.Predict, request({"x": tensor}))


def test_a_call_ends_at_its_deadline():
    servable, held = serving_toys.held_toy()
    with servable, calling(DataPlane([servable])) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        message = request({"x": np.float32([[1, 2]])}, "predict", name="toy")
        running = stub.Predict.future(message)
        assert held.entered.wait(60)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(message, timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held.release.set()
        assert arrays(running.result(60))["y"].tolist() == [[3.0, 5.0]]


def test_metadata(prediction):
    asked = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    asked.model_spec.name = "half_plus_three"
    asked.model_spec.version_label = "stable"
    response = prediction.GetModelMetadata(asked, timeout=30)
    assert (response.model_spec.name, response.model_spec.version.value) == ("half_plus_three", 123)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(signatures)
    assert set(signatures.signature_def) == {"serving_default", *toys.MADE}
    split = signatures.signature_def["split"]
    assert split.method_name == tf.saved_model.PREDICT_METHOD_NAME
    assert split.inputs["x"].dtype == tf.float32.as_datatype_enum
    assert tf.TensorShape(split.inputs["x"].tensor_shape).as_list() == [None, 2]
    assert tf.TensorShape(signatures.signature_def["whole"].outputs["sum"].tensor_shape).as_list() == []
    for fields in ([], ["nope"], ["signature_def", "nope"]):
        del asked.metadata_field[:]
        asked.metadata_field.extend(fields)
        assert "signature_def" in refused(prediction.GetModelMetadata, asked)


def test_status(models):
    asked = get_model_status_pb2.GetModelStatusRequest()
    asked.model_spec.name = "half_plus_three"
    available = get_model_status_pb2.ModelVersionStatus.AVAILABLE
    statuses = models.GetModelStatus(asked, timeout=30).model_version_status
    assert [(each.version, each.state, each.status.error_code) for each in statuses] == [
        (123, available, 0),
        (124, available, 0),
    ]
    asked.model_spec.version.value = 124
    assert [each.version for each in models.GetModelStatus(asked, timeout=30).model_version_status] == [124]


def test_a_failed_version_says_why():
    failed = toys.servable("7")
    failed._lifecycle.fail("it broke")
    with calling(toys.plane(failed)) as channel:
        asked = get_model_status_pb2.GetModelStatusRequest()
        asked.model_spec.name = "half_plus_three"
        (status,) = (
            model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(asked, timeout=30)
        ).model_version_status
    assert status.state == get_model_status_pb2.ModelVersionStatus.END
    assert (status.status.error_code, status.status.error_message) == (grpc.StatusCode.INTERNAL.value[0], "it broke")


def test_what_a_model_of_jax_has_no_use_for_says_so(prediction, models):
    absent = grpc.StatusCode.UNIMPLEMENTED
    assert "Predict" in refused(prediction.Classify, classification_pb2.ClassificationRequest(), absent)
    assert "Predict" in refused(prediction.Regress, regression_pb2.RegressionRequest(), absent)
    assert "Predict" in refused(prediction.MultiInference, inference_pb2.MultiInferenceRequest(), absent)
    reload = model_management_pb2.ReloadConfigRequest()
    assert "repository" in refused(models.HandleReloadConfigRequest, reload, absent)


def test_reflection_gives_the_services_by_tensorflows_names(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    for module in (prediction_service_pb2, model_service_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert service.full_name in services
            file = database.FindFileContainingSymbol(service.full_name)
            assert file.package == "tensorflow.serving"


def descriptors(message):
    yield message
    for nested in message.nested_types:
        yield from descriptors(nested)


def test_every_message_is_a_part_of_tensorflows():
    from google.protobuf import descriptor_pool

    theirs = descriptor_pool.Default()  # where the imported modules have registered theirs
    count = 0
    for file in schema().files:
        if file.package == "google.protobuf":
            continue
        for top in file.message_type:
            for ours in descriptors(schema().pool.FindMessageTypeByName(f"{file.package}.{top.name}")):
                their = theirs.FindMessageTypeByName(ours.full_name)
                for field in ours.fields:
                    other = their.fields_by_number[field.number]
                    assert (field.name, field.is_repeated, field.is_packed) == (
                        other.name, other.is_repeated, other.is_packed
                    )  # fmt: skip
                    kind, other_kind = (each.message_type or each.enum_type for each in (field, other))
                    if ours.full_name != "tensorflow.serving.StatusProto":  # an enumeration by its number
                        assert field.type == other.type
                        assert (kind and kind.full_name) == (other_kind and other_kind.full_name)
                    assert (field.containing_oneof and field.containing_oneof.name) == (
                        other.containing_oneof and other.containing_oneof.name
                    )
                    count += 1
    for name in ("tensorflow.DataType", "tensorflow.serving.ModelVersionStatus.State"):
        ours, their = schema().pool.FindEnumTypeByName(name), theirs.FindEnumTypeByName(name)
        for value in ours.values:
            assert their.values_by_number[value.number].name == value.name
    assert count > 50
