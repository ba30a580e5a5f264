import asyncio

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import NotFound, NotReady
from servax.protocols.dataplane import DataPlane, LoadingStep
from servax.runtime.catalog import Catalog, ModelStatus, ServedModel
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


def request(value: float = 1) -> InferRequest:
    return InferRequest("predict", {"x": np.full((1, 2), value, np.float32)})


def test_a_version_that_begins_to_drain_hands_the_request_to_the_next():
    catalog = Catalog()
    with toys.toy("a").warm() as old, toys.toy("a", version="2", params=toys.params(5, 0)).warm() as new:
        catalog.add(old)
        plane = DataPlane(catalog=catalog)
        accept = old.infer_async

        async def drained_first(request):
            catalog.put(ServedModel("a", {"2": new}))
            old.drain()
            return await accept(request)

        old.infer_async = drained_first
        assert asyncio.run(plane.infer("a", None, request())).tensors["y"].tolist() == [[5, 5]]


def test_a_request_that_waited_in_a_version_that_is_gone_is_run_by_the_next():
    catalog = Catalog()
    old, held = toys.held_toy(name="a")
    with old, toys.toy("a", version="2", params=toys.params(5, 0)).warm() as new:
        catalog.add(old)
        plane = DataPlane(catalog=catalog)

        async def scenario():
            running = asyncio.create_task(plane.infer("a", None, request()))
            await asyncio.to_thread(held.entered.wait)
            waiting = asyncio.create_task(plane.infer("a", None, request()))
            while old.in_flight < 2:
                await asyncio.sleep(0)
            catalog.put(ServedModel("a", {"2": new}))
            await asyncio.to_thread(old.drain, 0)
            held.release.set()
            return await asyncio.gather(running, waiting)

        running, waiting = asyncio.run(scenario())
        assert (running.tensors["y"][0, 0], waiting.tensors["y"][0, 0]) == (3, 5)


def test_a_version_without_a_successor_refuses():
    with toys.toy("a").warm() as old:
        plane = DataPlane([old])
        old.drain()
        with pytest.raises(NotReady):
            asyncio.run(plane.infer("a", None, request()))


def test_nothing_is_taken_while_the_process_closes(plane):
    plane.closing = True
    assert not plane.ready
    with pytest.raises(NotReady, match="the server stops"):
        asyncio.run(plane.infer("a", None, request()))


def test_readiness_wants_one_version_of_each_model_that_is_to_be_served(plane):
    catalog = Catalog()
    failed = ModelStatus("b", "1", State.FAILED, "damaged")
    catalog.put(ServedModel("a", {"1": plane.get("a")}, absent={"2": ModelStatus("a", "2", State.FAILED, "damaged")}))
    catalog.put(ServedModel("b", absent={"1": failed}, wanted=False))
    one = DataPlane(catalog=catalog)
    assert one.ready
    assert one.names == ("a",)
    assert [(each.name, each.version, each.reason) for each in one.list()] == [
        ("a", "1", None),
        ("a", "2", "damaged"),
        ("b", "1", "damaged"),
    ]
    assert one.versions("b") == (failed,)
    catalog.put(ServedModel("b", absent={"1": failed}))
    assert not one.ready
    assert one.live


def test_metadata_lists_the_loaded_versions():
    with toys.toy("a").warm() as first, toys.toy("a", version="10") as second:
        plane = DataPlane([second, first])
        assert plane.metadata("a").versions == ("1", "10")
        assert plane.get("a") is first
        assert plane.get("a", "10") is second


def test_inference_goes_to_the_servable(plane):
    request = InferRequest("predict", {"x": np.ones((1, 2), np.float32)})
    result = asyncio.run(plane.infer("a", None, request))
    np.testing.assert_array_equal(result.tensors["y"], [[3, 3]])
    assert result.bucket == "batch=1,length=8"
