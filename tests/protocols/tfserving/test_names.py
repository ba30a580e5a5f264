import subprocess
import sys

import pytest
import tfserving_toys as toys

from servax.core.errors import InvalidInput
from servax.protocols.tfserving.names import Target, called, version_number, wire_name
from servax.targets.savedmodel_names import tensor_name


class OneModel:
    """What `called` asks of a data plane."""

    def __init__(self, **signatures):
        self.signatures = signatures
        self.texts = {}

    def get(self, name, version, label):
        return self


MADE = toys.signature({"x": "float32[batch, length]"}, {"y": "float32[batch]"})


def function(plane, name):
    found = called(plane, Target("net"), name)
    return found.function, found.signature_name


def test_the_default_signature_is_the_default_function():
    assert function(OneModel(predict=MADE, embed=MADE), "") == ("predict", "serving_default")
    assert function(OneModel(embed=MADE), None) == ("embed", "serving_default")
    assert function(OneModel(predict=MADE, embed=MADE), "embed") == ("embed", "embed")
    assert function(OneModel(predict=MADE, serving_default=MADE), "") == ("serving_default", "serving_default")
    with pytest.raises(InvalidInput) as caught:
        function(OneModel(one=MADE, two=MADE), "")
    assert caught.value.expected == "one or two"


def test_a_saved_model_s_signatures_of_one_bucket_are_known():
    plane = OneModel(predict=MADE, predict_batch=MADE)
    assert function(plane, "predict_batch_8_length_32") == ("predict", "predict_batch_8_length_32")
    for wrong in ("predict_batch_8_width_3", "predict_batch_", "predict_", "predict_batch_x", "predict_8"):
        with pytest.raises(InvalidInput):
            function(plane, wrong)


@pytest.mark.parametrize("name", ["x", "input_ids", "image.left", "_x", "x1", "é", "a b", "__", "1x"])
def test_names_are_written_as_in_a_saved_model(name):
    assert wire_name(name) == tensor_name(name)


def test_versions_are_numbers_or_none():
    assert [version_number(text) for text in ("1", "007", "a", "", "-1", "1.5", "²", str(2**63))] == [
        1, 7, None, None, None, None, None, None
    ]  # fmt: skip


def test_the_protocols_do_not_load_tensorflow():
    code = (
        "import sys, servax.server.grpc, servax.protocols.tfserving.rest\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] in ('tensorflow', 'tensorflow_serving')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
