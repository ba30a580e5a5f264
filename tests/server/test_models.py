import asyncio

import pytest

import serving_toys as toys
from servax.core.errors import InvalidInput, UsageError
from servax.protocols.dataplane import DataPlane
from servax.runtime.servable import State
from servax.runtime.store import Store, StoreOptions
from servax.server.models import LoadedModels, StoredModels
from store_toys import ToyLoader, put_version


def test_what_a_function_loads_is_warmed_and_closed():
    models = LoadedModels(lambda: [toys.toy("a"), toys.toy("b")])
    plane = DataPlane(catalog=models.catalog, repository=models.repository)
    assert plane.list() == ()
    models.start()
    assert [(each.name, each.state) for each in plane.list()] == [("a", State.READY), ("b", State.READY)]
    models.close()
    assert {each.state for each in models.servables} == {State.UNLOADED}


def test_one_servable_will_do():
    models = LoadedModels(toys.toy)
    models.start()
    assert [each.name for each in models.servables] == ["toy"]
    models.close()


def test_two_of_one_name_will_not():
    with toys.toy() as first, toys.toy() as second, pytest.raises(UsageError, match="two models have one name"):
        LoadedModels(lambda: [first, second]).start()


def test_a_store_serves_its_versions_and_changes_them_on_request(tmp_path):
    put_version(tmp_path, "net", 1)
    models = StoredModels(Store(tmp_path, ToyLoader(), StoreOptions(control="explicit")))
    plane = DataPlane(catalog=models.catalog, repository=models.repository)
    models.start()
    assert models.servables == ()
    asyncio.run(plane.repository.load("net", {}))
    assert [(each.name, each.version, each.state) for each in plane.list()] == [("net", "1", State.READY)]
    assert [each.name for each in models.servables] == ["net"]
    models.close()
    assert models.servables == ()
    assert not plane.list() or {each.state for each in plane.list()} == {State.UNLOADED}


def test_a_store_that_follows_its_directories_is_not_changed_on_request(tmp_path):
    put_version(tmp_path, "net", 1)
    models = StoredModels(Store(tmp_path, ToyLoader()))
    models.start()
    with pytest.raises(InvalidInput, match="not loaded and unloaded on request"):
        asyncio.run(models.repository.load("net", {}))
    models.close()
