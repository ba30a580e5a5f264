import asyncio

import pytest

from servax.core.errors import InvalidInput, NotFound, NotReady
from servax.protocols.dataplane import DataPlane
from servax.protocols.repository import StoreRepository, changed
from servax.runtime.labels import Split
from servax.runtime.policy import Policy, Rules
from servax.runtime.servable import State
from servax.runtime.store import Store, StoreOptions
from store_toys import ToyLoader, put_version


@pytest.fixture
def repository(tmp_path):
    store = Store(tmp_path, ToyLoader(), StoreOptions(control="explicit"))
    store.start()
    repository = StoreRepository(store)
    yield repository
    repository.close()
    store.close()


def test_models_are_loaded_and_unloaded_beside_the_event_loop(repository, tmp_path):
    put_version(tmp_path, "net", 1)
    put_version(tmp_path, "net", 2)
    plane = DataPlane(catalog=repository._store.catalog, repository=repository)
    assert plane.ready

    async def scenario():
        await repository.load("net", {"policy": "all", "labels": "stable=1"})
        loaded = repository.index()
        await repository.unload("net")
        return loaded, repository.index()

    loaded, unloaded = asyncio.run(scenario())
    assert [(each.version, each.state, each.labels) for each in loaded] == [
        ("1", State.READY, ("stable",)),
        ("2", State.READY, ()),
    ]
    assert [each.state for each in unloaded] == [State.UNLOADED, State.UNLOADED]
    assert plane.ready


def test_what_cannot_be_loaded_is_an_error(repository, tmp_path):
    with pytest.raises(NotFound):
        asyncio.run(repository.load("net", {}))
    put_version(tmp_path, "net", 1, broken="load")
    with pytest.raises(NotReady) as caught:
        asyncio.run(repository.load("net", {}))
    assert "damaged" in caught.value.seen


def test_a_server_that_was_not_told_to_is_not_changed(tmp_path):
    put_version(tmp_path, "net", 1)
    store = Store(tmp_path, ToyLoader())
    repository = StoreRepository(store)
    for call in (repository.load("net", {}), repository.unload("net")):
        with pytest.raises(InvalidInput) as caught:
            asyncio.run(call)
        assert caught.value.expected == "--control explicit"
    repository.close()


def test_parameters_replace_the_rules_they_name():
    rules = Rules(Policy.parse("all"), {"stable": "1"}, Split({"stable": 1.0}))
    assert changed(rules, {}) == rules
    assert changed(rules, {"policy": "latest:2"}) == Rules(Policy.parse("latest:2"), rules.labels, rules.split)
    assert changed(rules, {"labels": "", "split": ""}) == Rules(Policy.parse("all"))
    assert changed(rules, {"split": "1=2"}).split == Split({"1": 2.0})


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"config": "{}", "file:1/model": "x"}, "config, file:1/model"),
        ({"policy": 3}, "policy"),
        ({"policy": "newest"}, "newest"),
        ({"split": "a"}, "a"),
        ({"labels": "1=2"}, "1=2"),
    ],
)
def test_parameters_that_cannot_be_used_are_shown(parameters, told):
    with pytest.raises(InvalidInput) as caught:
        changed(Rules(), parameters)
    assert told in (caught.value.seen, caught.value.where)
