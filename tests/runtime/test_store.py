import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from servax.core.errors import NotFound, NotReady, StartupError, UsageError
from servax.core.events import Notice, listening
from servax.runtime.labels import Split
from servax.runtime.policy import Policy, Rules
from servax.runtime.servable import State
from servax.runtime.store import Store, StoreOptions
from store_toys import ToyLoader, answer, put_version


@pytest.fixture
def opened(tmp_path):
    """Opens stores of `tmp_path`, and closes them."""
    stores = []

    def open_(loader=None, **options) -> Store:
        store = Store(tmp_path, loader or ToyLoader(), StoreOptions(**options))
        stores.append(store)
        store.start()
        return store

    yield open_
    for store in stores:
        store.close()


def states(store, name="net"):
    return {status.version: status.state for status in store.catalog.model(name).statuses}


def reason(store, version, name="net"):
    return next(status.reason for status in store.catalog.model(name).statuses if status.version == version)


def test_the_newest_version_is_served_and_the_others_are_known(tmp_path, opened):
    for version, w in ((1, 1.0), (9, 9.0), (10, 10.0)):
        put_version(tmp_path, "net", version, w=w, b=0)
    store = opened()
    assert answer(store) == 10
    assert states(store) == {"1": State.UNLOADED, "9": State.UNLOADED, "10": State.READY}
    assert reason(store, "1") == "not loaded: the policy is latest:1"


def test_a_version_that_waits_for_its_turn_is_not_told_of_as_if_the_policy_left_it_out(tmp_path):
    for version in (1, 2, 3):
        put_version(tmp_path, "net", version)
    told = set()

    def looking(path, name, version):
        if any(model.name == name for model in store.catalog):
            told.update(status.reason for status in store.catalog.model(name).statuses)
        return ToyLoader()(path, name, version)

    store = Store(tmp_path, looking, StoreOptions(rules=Rules(Policy.parse("latest:2"))))
    store.start()
    store.close()
    assert told >= {"not loaded yet", "not loaded: the policy is latest:2"}


@pytest.mark.parametrize(
    ("policy", "served"), [("latest:2", {"2", "3"}), ("all", {"1", "2", "3"}), ("specific:1,2", {"1", "2"})]
)
def test_policies(tmp_path, opened, policy, served):
    for version in (1, 2, 3):
        put_version(tmp_path, "net", version, w=version, b=0)
    store = opened(rules=Rules(Policy.parse(policy)))
    assert set(store.catalog.model("net").versions) == served
    for version in served:
        assert answer(store, version=version) == int(version)


def test_a_new_version_takes_the_place_of_the_old_one_with_its_programs(tmp_path, opened):
    loader = ToyLoader()
    put_version(tmp_path, "net", 1, w=1)
    store = opened(loader)
    old = store.servables[0]
    put_version(tmp_path, "net", 2, w=7, b=0)
    store.look()
    assert answer(store) == 7
    assert old.state is State.UNLOADED
    assert states(store) == {"1": State.UNLOADED, "2": State.READY}
    assert loader.loads == [("net", "1", False), ("net", "2", True)]


def test_requests_in_flight_finish_on_the_old_version(tmp_path, opened, monkeypatch):
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened()
    old = store.servables[0]
    held, entered, release = old._runner, threading.Event(), threading.Event()
    run = held.run

    def waits(*arguments, **options):
        entered.set()
        assert release.wait(60)
        return run(*arguments, **options)

    monkeypatch.setattr(held, "run", waits)
    put_version(tmp_path, "net", 2, w=2, b=0)
    with ThreadPoolExecutor(2) as pool:
        answered = pool.submit(old.predict, x=np.ones((1, 1), np.float32))
        entered.wait()
        # The device's thread is held, so warming waits for it; draining then waits for nothing more.
        looking = pool.submit(store.look)
        release.set()
        assert answered.result()["y"].item() == 1
        looking.result()
    assert answer(store) == 2


def test_a_version_is_ready_before_it_is_found_and_seen_while_it_warms(tmp_path, opened, monkeypatch):
    from servax.runtime.local import LocalServable

    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened()
    put_version(tmp_path, "net", 2, w=2, b=0)
    seen = []
    warm = LocalServable.warm

    def watched(servable):
        seen.append((states(store), answer(store)))
        with pytest.raises(NotReady, match="version 2"):
            store.catalog.resolve("net", "2")
        return warm(servable)

    monkeypatch.setattr(LocalServable, "warm", watched)
    store.look()
    assert seen == [({"1": State.READY, "2": State.LOADING}, 1)]
    assert answer(store) == 2


@pytest.mark.parametrize("broken", ["load", "warm"])
def test_a_broken_version_leaves_the_old_one_serving_and_shows_why(tmp_path, opened, broken):
    loader = ToyLoader()
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(loader)
    put_version(tmp_path, "net", 2, broken=broken)
    told = []
    with listening(lambda event: told.append(event) if isinstance(event, Notice) else None):
        for _ in range(3):
            store.look()
    assert answer(store) == 1
    assert states(store) == {"1": State.READY, "2": State.FAILED}
    assert ("damaged" if broken == "load" else "failed while it was warmed") in reason(store, "2")
    assert [event.level for event in told] == ["error"]
    assert [load[1] for load in loader.loads] == ["1", "2"]
    put_version(tmp_path, "net", 3, w=3, b=0)
    store.look()
    assert answer(store) == 3


def test_a_broken_version_is_tried_again_once_it_has_changed(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened()
    path = put_version(tmp_path, "net", 2, broken="load")
    store.look()
    content = json.dumps({"w": 5, "b": 0, "broken": ""})
    (path / "params").write_text(content.ljust(len((path / "params").read_text())))
    store.look()
    assert answer(store) == 5


def test_the_start_serves_the_newest_version_that_loads(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    put_version(tmp_path, "net", 2, broken="load")
    store = opened()
    assert answer(store) == 1
    assert states(store)["2"] is State.FAILED


def test_a_half_copied_version_is_waited_for_and_told_of_once(tmp_path, opened):
    loader = ToyLoader()
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(loader)
    source = put_version(tmp_path / "elsewhere", "net", 2, w=2, b=0)
    target = tmp_path / "net" / "2"
    target.mkdir()
    told = []
    with listening(lambda event: told.append(event.message) if isinstance(event, Notice) else None):
        store.look()
        shutil.copy(source / "bundle.json", target)
        for _ in range(3):
            store.look()
        assert answer(store) == 1
        assert "not complete" in reason(store, "2")
        (target / "params").write_bytes((source / "params").read_bytes()[:5])
        store.look()
    assert len(told) == 2  # first without a manifest, then without a file
    assert [load[1] for load in loader.loads] == ["1"]
    shutil.copy(source / "params", target)
    store.look()
    assert answer(store) == 2


def test_polling_finds_new_versions_and_models_and_ignores_temporary_siblings(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    (tmp_path / "net" / ".3.tmp-abcd").mkdir()
    (tmp_path / "net" / "notes").mkdir()
    served = threading.Event()
    wanted = {"version 2 of net is served", "version 1 of other is served"}

    def listener(event):
        if isinstance(event, Notice):
            wanted.discard(event.message)
            if not wanted:
                served.set()

    with listening(listener):
        store = opened(poll=0.02)
        put_version(tmp_path, "net", 2, w=2, b=0)
        put_version(tmp_path, "other", 1, w=4, b=0)
        assert served.wait(60)
    assert (answer(store), answer(store, "other")) == (2, 4)


def test_polling_outlives_a_store_that_cannot_be_read(tmp_path, opened, monkeypatch):
    put_version(tmp_path, "net", 1, w=1, b=0)
    again = threading.Event()
    looks = []
    look = Store.look

    def sometimes(store):
        looks.append(1)
        if len(looks) < 3:
            raise OSError("stale file handle")
        look(store)
        again.set()

    monkeypatch.setattr(Store, "look", sometimes)
    told = []
    with listening(lambda event: told.append(event.message) if isinstance(event, Notice) else None):
        store = opened(poll=0.01)
        assert again.wait(60)
    assert sum("cannot be looked at: OSError: stale file handle" in text for text in told) == 1
    assert answer(store) == 1


def test_what_serves_goes_on_when_the_directory_is_gone(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened()
    shutil.rmtree(tmp_path / "net")
    store.look()
    assert answer(store) == 1


def test_taking_the_newest_version_away_brings_the_one_before_it_back(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    put_version(tmp_path, "net", 2, w=2, b=0)
    store = opened()
    shutil.rmtree(tmp_path / "net" / "2")
    store.look()
    assert answer(store) == 1
    assert states(store) == {"1": State.READY}


def test_labels_keep_their_versions_loaded_and_follow_the_latest(tmp_path, opened):
    for version in (1, 2):
        put_version(tmp_path, "net", version, w=version, b=0)
    store = opened(rules=Rules(labels={"stable": "1", "canary": "latest", "none": "9"}))
    assert (answer(store, label="stable"), answer(store, label="canary"), answer(store)) == (1, 2, 2)
    with pytest.raises(NotFound, match="no label 'none'"):
        store.catalog.resolve("net", label="none")
    put_version(tmp_path, "net", 3, w=3, b=0)
    store.look()
    assert (answer(store, label="stable"), answer(store, label="canary")) == (1, 3)
    assert set(store.catalog.model("net").versions) == {"1", "3"}


def test_a_split_is_the_model_s_own(tmp_path, opened):
    for version in (1, 2):
        put_version(tmp_path, "net", version, w=version, b=0)
    rules = Rules(labels={"stable": "1", "canary": "2"}, split=Split({"stable": 1.0, "canary": 0.0}))
    store = opened(models={"net": rules})
    assert {answer(store) for _ in range(20)} == {1}


def test_models_are_loaded_and_unloaded_on_request(tmp_path, opened):
    put_version(tmp_path, "a", 1, w=1, b=0)
    put_version(tmp_path, "b", 1, w=2, b=0)
    store = opened(control="explicit", start=("a",))
    assert answer(store, "a") == 1
    assert store.catalog.model("b").wanted is False
    with pytest.raises(NotReady):
        store.catalog.resolve("b")
    store.load("b")
    assert answer(store, "b") == 2
    store.unload("b")
    assert states(store, "b") == {"1": State.UNLOADED}
    put_version(tmp_path, "b", 2, w=3, b=0)
    store.look()
    assert states(store, "b") == {"1": State.UNLOADED, "2": State.UNLOADED}
    put_version(tmp_path, "c", 1, w=5, b=0)
    store.load("c")
    assert answer(store, "c") == 5
    for call in (store.load, store.unload):
        with pytest.raises(NotFound, match="no model 'd'"):
            call("d")


def test_loading_changes_the_rules_and_says_what_did_not_load(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(control="explicit", start=("net",))
    put_version(tmp_path, "net", 2, broken="load")
    with pytest.raises(NotReady) as caught:
        store.load("net")
    assert "net/2: a file of the bundle is damaged" in caught.value.seen
    assert caught.value.remedy == "version 1 serves on"
    put_version(tmp_path, "net", 3, w=3, b=0)
    store.load("net", Rules(Policy.parse("specific:1,3")))
    assert (answer(store, version="1"), answer(store, version="3")) == (1, 3)


def test_a_failed_version_is_loaded_again_on_request(tmp_path, opened):
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(control="explicit", start=("net",))
    store.servables[0]._lifecycle.fail("the device died")
    store.look()
    assert states(store) == {"1": State.FAILED}
    store.load("net")
    assert answer(store) == 1


def machine(limit: int, loader_device=None):
    """A device whose memory a test sets, but which runs as the CPU does."""
    return SimpleNamespace(
        platform="gpu", id=0, memory_stats=lambda: {"bytes_limit": limit, "bytes_in_use": loader_device or 0}
    )


def test_a_version_that_does_not_fit_is_refused_with_numbers(tmp_path, opened):
    """By hand: 1500 free; 1000 of parameters and 600 of programs are 100 too many. Reused programs cost nothing."""
    loader = ToyLoader(parameter_bytes=1000, program_bytes=600, device=machine(2500, 1000))
    put_version(tmp_path, "net", 1, w=1, b=0)
    with pytest.raises(StartupError) as caught:
        opened(loader)
    assert "1.5 KiB free (1500 bytes)" in caught.value.seen
    assert "100 B lacking" in caught.value.seen
    loader.program_bytes = 500
    store = opened(loader)
    put_version(tmp_path, "net", 2, w=2, b=0)
    loader.device = machine(2500, 1501)
    store.look()
    assert answer(store) == 1
    assert states(store)["2"] is State.FAILED
    told = reason(store, "2")
    assert "does not fit beside what is loaded" in told
    assert "1 B lacking" in told
    assert "--swap=unload-first, which unloads version 1 first and frees 1000 bytes" in told
    loader.device = machine(2500, 1500)
    store.look()
    assert answer(store) == 2


def test_unload_first_takes_the_old_version_away_before_the_new_one_is_loaded(tmp_path, opened):
    loader = ToyLoader(parameter_bytes=1000, device=machine(2000, 1000))
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(loader, swap="unload-first")
    put_version(tmp_path, "net", 2, w=2, b=0)
    loader.device = machine(2000, 1500)
    seen = []
    loader.on_load = lambda: seen.append((states(store), reason(store, "2"), store.catalog.model("net").ready))
    store.look()
    told = "version 1 was unloaded to make room for version 2 (--swap unload-first)"
    assert seen == [({"1": State.UNLOADED, "2": State.UNLOADED}, told, False)]
    assert answer(store) == 2
    assert loader.loads[-1] == ("net", "2", True)


def test_the_old_version_comes_back_when_the_new_one_fails_after_unload_first(tmp_path, opened):
    loader = ToyLoader(parameter_bytes=1000, device=machine(2000, 1000))
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(loader, swap="unload-first")
    old = store.servables[0]
    put_version(tmp_path, "net", 2, broken="load")
    loader.device = machine(2000, 1500)
    loader.on_load = lambda: setattr(loader, "device", machine(2000, 500))  # what the old version held is free now
    store.look()
    assert old.state is State.UNLOADED
    assert states(store) == {"1": State.READY, "2": State.FAILED}
    assert answer(store) == 1
    assert loader.loads[1:] == [("net", "2", True), ("net", "1", True)]


def test_unload_first_keeps_what_serves_where_the_new_one_would_not_fit_even_so(tmp_path, opened):
    loader = ToyLoader(parameter_bytes=1000, device=machine(2000, 1000))
    put_version(tmp_path, "net", 1, w=1, b=0)
    store = opened(loader, swap="unload-first")
    put_version(tmp_path, "net", 2, w=2, b=0)
    loader.parameter_bytes, loader.device = 3000, machine(2000, 1000)
    store.look()
    assert answer(store) == 1
    assert "does not fit even in place of what it replaces" in reason(store, "2")


def test_a_store_without_models_does_not_start_unless_it_waits_for_them(tmp_path, opened):
    with pytest.raises(StartupError, match="the store has no model"):
        opened()
    with pytest.raises(StartupError, match="no such model"):
        opened(control="explicit", start=("net",))
    opened(control="explicit")
    opened(poll=60.0)


def test_a_model_of_which_nothing_loads_fails_the_start_unless_it_polls(tmp_path, opened):
    put_version(tmp_path, "net", 1, broken="load")
    put_version(tmp_path, "good", 1)
    with pytest.raises(StartupError) as caught:
        opened()
    assert "net/1: a file of the bundle is damaged" in caught.value.seen
    store = opened(poll=60.0)
    assert not store.catalog.model("net").ready
    assert store.catalog.model("good").ready


def test_options_are_checked():
    for wrong in ({"poll": 0.0}, {"control": "poll"}, {"swap": "both"}):
        with pytest.raises(UsageError):
            StoreOptions(**wrong)


def test_closing_does_not_wait_for_a_version_that_is_being_loaded(tmp_path, opened):
    loader = ToyLoader()
    put_version(tmp_path, "net", 1)
    store = opened(loader)
    put_version(tmp_path, "net", 2)
    loading, release = threading.Event(), threading.Event()

    def on_load():
        loading.set()
        assert release.wait(60)

    loader.on_load = on_load
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(store.look)
        loading.wait()
        assert store.busy
        assert store.close(0.01) is False
        release.set()
        looking.result()
    assert store.close() is True
    assert store.servables == ()


def test_closing_unloads_everything(tmp_path, opened):
    put_version(tmp_path, "net", 1)
    store = opened(poll=60.0)
    (servable,) = store.servables
    store.close()
    assert servable.state is State.UNLOADED
    assert store.servables == ()
    assert jax.devices()  # the process goes on
