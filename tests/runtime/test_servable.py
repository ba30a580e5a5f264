import numpy as np

import servax.runtime
from servax.core.tensors import Signature
from servax.runtime.servable import default_function, flat_inputs

EMPTY = Signature(())


def test_a_call_without_a_function_means_predict_or_the_only_one():
    assert default_function(None, {"predict": EMPTY, "embed": EMPTY}) == "predict"
    assert default_function(None, {"embed": EMPTY}) == "embed"
    assert default_function("embed", {"predict": EMPTY, "embed": EMPTY}) == "embed"


def test_nested_inputs_are_joined_by_dots():
    x = np.zeros(1)
    assert flat_inputs({"image": {"left": x, "meta": {"at": 1}}, "n": [2]}) == {
        "image.left": x,
        "image.meta.at": 1,
        "n": [2],
    }


def test_the_room_s_table_of_contents_is_complete():
    for name in servax.runtime.__all__:
        assert getattr(servax.runtime, name).__name__ == name
