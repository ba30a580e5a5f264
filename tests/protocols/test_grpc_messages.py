import subprocess
import sys

import pytest

from servax.protocols.grpc.compile import compiled, sources
from servax.protocols.grpc.messages import COMPILED, Messages

SOURCES = sorted(sources())


def ours() -> Messages:
    return Messages.load("servax.protocols.open_inference", "inference")


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_the_compiled_file_is_that_of_its_source(source):
    fresh, kept = Messages(compiled(source)), Messages(source.with_suffix(COMPILED).read_bytes())
    assert fresh.files == kept.files


def test_a_message_goes_there_and_back():
    request = ours()["inference.ModelInferRequest"]
    sent = request(model_name="toy", raw_input_contents=[b"\0\1"])
    assert request.FromString(sent.SerializeToString()) == sent
    assert ours().methods("inference.GRPCInferenceService")["ModelInfer"][0] is request
    with pytest.raises(KeyError):
        ours()["inference.Nothing"]


def test_names_and_numbers_are_those_of_the_protocol():
    from tritonclient.grpc import model_config_pb2, service_pb2

    published = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}

    def compare(mine, theirs):
        for field in mine.fields:
            other = theirs.fields_by_name[field.name]
            assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), (
                field.full_name
            )
        for nested in mine.nested_types:
            compare(nested, theirs.nested_types_by_name[nested.name])

    file = ours().pool.FindFileByName("inference.proto")
    for name, message in file.message_types_by_name.items():
        compare(message, published[name])
    for enum, theirs in ((file.enum_types_by_name["DataType"], model_config_pb2.DataType),):
        assert {value.name: value.number for value in enum.values} == dict(theirs.items())


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_others_may_register_the_same_names_in_the_process(first):
    """TensorFlow Serving's and Triton's stubs use the process' own pool."""
    mine = "from servax.protocols.open_inference.grpc import schema; schema()['inference.ModelInferRequest']()\n"
    theirs = "import tritonclient.grpc; import tensorflow_serving.apis.predict_pb2\n"
    code = mine + theirs if first == "ours" else theirs + mine
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
