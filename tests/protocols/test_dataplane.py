import asyncio

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import NotFound, NotReady
from servax.protocols.dataplane import DataPlane, LoadingStep
from servax.runtime.request import InferRequest
from servax.runtime.servable import State


@pytest.fixture
def plane():
    with toys.toy("a").warm() as a, toys.toy("b", version="3") as b:
        yield DataPlane([b, a])


def test_servables_are_found_by_name_and_version(plane):
    assert plane.get("b", "3").name == "b"
    with pytest.raises(NotFound) as caught:
        plane.get("c")
    assert caught.value.expected == "a or b"
    with pytest.raises(NotFound) as caught:
        plane.get("b", "1")
    assert (caught.value.what, caught.value.expected) == ("model 'b' has no version '1'", "3")


def test_it_is_ready_once_everything_is(plane):
    assert [(each.name, each.state) for each in plane.list()] == [("a", State.READY), ("b", State.LOADING)]
    assert not plane.ready
    plane.get("b").warm()
    assert plane.ready
    assert not DataPlane().ready


def test_it_is_not_ready_while_loading_goes_on():
    with toys.toy("a").warm() as a:
        plane = DataPlane([a], loading=lambda: (LoadingStep("restore", 1, 2, None),))
        assert not plane.ready
        with pytest.raises(NotReady, match="'b' may still be loading"):
            plane.get("b")
        plane.loading = None
        assert plane.ready


def test_it_lives_until_every_model_has_failed(plane):
    assert DataPlane().live
    for name in ("a", "b"):
        assert plane.live
        plane.get(name)._lifecycle.fail("broken")
    assert not plane.live


def test_metadata_names_the_default_function(plane):
    metadata = plane.metadata("a")
    assert (metadata.default, metadata.platform, metadata.versions) == ("predict", "jax_jit", ("1",))
    assert set(metadata.functions) == {"predict", "total", "count"}


def test_functions_are_resolved_or_listed(plane):
    assert plane.signature("a", None, None)[0] == "predict"
    assert plane.signature("a", None, "total")[1] is toys.TOTAL
    with pytest.raises(NotFound) as caught:
        plane.signature("a", None, "embed")
    assert caught.value.expected == "count or predict or total"


def test_inference_goes_to_the_servable(plane):
    request = InferRequest("predict", {"x": np.ones((1, 2), np.float32)})
    result = asyncio.run(plane.infer("a", None, request))
    np.testing.assert_array_equal(result.tensors["y"], [[3, 3]])
    assert result.bucket == "batch=1,length=8"
