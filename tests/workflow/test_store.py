"""Stores of real bundles: programs are reused where they are the same, loaded where not, and never compiled in vain."""

from __future__ import annotations

import gc
import os
import shutil
import time
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest

import bundle_toys as toys
import servax
from servax.core.errors import UsageError
from servax.core.events import Notice, listening
from servax.runtime.labels import Split
from servax.runtime.policy import Policy, Rules
from servax.runtime.servable import State
from servax.runtime.store import StoreOptions
from servax.stages.buckets import Bucket
from servax.targets.bundle import Bundle
from servax.workflow.load import LoadOptions
from servax.workflow.store import BundleLoader, open_store, programs_digest

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: COMPILES.append(name) if name.startswith("/jax/core/compile") else None
)
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def params(scale: float):
    return {"dense": {name: (scale * leaf).astype(np.float32) for name, leaf in toys.PARAMS["dense"].items()}}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> Path:
    """Bundles by name: `one` and `two` have the same programs, `other` has not; `exports` lacks executables."""
    folder = tmp_path_factory.mktemp("bundles")
    toys.write_bundle(folder / "one", executables=True)
    toys.write_bundle(folder / "two", params=params(2.0), executables=True)
    toys.write_bundle(folder / "exports", params=params(2.0))
    toys.write_bundle(folder / "other", {"predict": (toys.PREDICT, (toys.SMALL,))}, params(3.0), executables=True)
    return folder


def opened(root: Path, **options):
    return open_store(root, StoreOptions(**options), LoadOptions())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def predict(store) -> np.ndarray:
    return store.catalog.resolve("net").predict(x=X)["y"]


@pytest.mark.parametrize("second", ["two", "exports"])
def test_a_version_with_the_same_programs_compiles_nothing(bundles, tmp_path, second):
    shutil.copytree(bundles / "one", tmp_path / "net" / "1")
    store = opened(tmp_path)
    store.start()
    try:
        np.testing.assert_allclose(predict(store), toys.predict_by_numpy(X))
        shutil.copytree(bundles / second, tmp_path / "net" / "2")
        before = len(COMPILES)
        store.look()
        assert COMPILES[before:] == []
        (servable,) = store.servables
        assert servable.version == "2"
        np.testing.assert_allclose(predict(store), 2 * toys.predict_by_numpy(X), rtol=1e-6)
        assert "stablehlo.dot_general" in servable.table["predict", toys.SMALL].stablehlo()
        assert store.catalog.resolve("net").platform == "jax_executable"
    finally:
        store.close()


def test_a_version_with_other_programs_brings_its_own(bundles, tmp_path):
    shutil.copytree(bundles / "one", tmp_path / "net" / "1")
    store = opened(tmp_path)
    store.start()
    try:
        shutil.copytree(bundles / "other", tmp_path / "net" / "2")
        before = len(COMPILES)
        store.look()
        assert COMPILES[before:] == []
        np.testing.assert_allclose(predict(store), 3 * toys.predict_by_numpy(X), rtol=1e-6)
        assert list(store.servables[0].signatures) == ["predict"]
    finally:
        store.close()


def test_programs_are_the_same_only_where_all_that_they_take_is(bundles):
    one, two, exports, other = (Bundle.open(bundles / name).manifest for name in ("one", "two", "exports", "other"))
    assert programs_digest(one) == programs_digest(two) == programs_digest(exports)
    assert programs_digest(other) != programs_digest(one)
    first, *rest = one.parameters
    wider = one.model_copy(update={"parameters": (first.model_copy(update={"shape": (5,)}), *rest)})
    assert programs_digest(wider) != programs_digest(one)
    changed = one.programs[0].model_copy(update={"stablehlo_digest": "another"})
    assert programs_digest(one.model_copy(update={"programs": (changed, *one.programs[1:])})) != programs_digest(one)


def test_a_damaged_version_is_refused_and_named(bundles, tmp_path):
    shutil.copytree(bundles / "one", tmp_path / "net" / "1")
    store = opened(tmp_path)
    store.start()
    try:
        bad = shutil.copytree(bundles / "two", tmp_path / "net" / "2")
        file = next(path for path in (bad / "params").rglob("*") if path.is_file())
        file.write_bytes(bytes(len(file.read_bytes())))
        store.look()
        np.testing.assert_allclose(predict(store), toys.predict_by_numpy(X))
        told = {status.version: status for status in store.catalog.model("net").statuses}
        assert told["2"].state is State.FAILED
        assert file.name in told["2"].reason
    finally:
        store.close()


def test_memory_is_free_again_once_a_model_is_unloaded(tmp_path):
    """64 MiB of parameters, of which at most 8 MiB may stay; the collector is not asked."""
    wide = toys.make_function(
        "predict",
        {"x": "float32[batch, 4096]"},
        {"y": "float32[batch, 4096]"},
        lambda params, state, inputs: (None, {"y": inputs["x"] @ params["w"]}),
    )
    weights = {"w": np.ones((4096, 4096), np.float32)}
    toys.write_bundle(tmp_path / "wide" / "1", {"predict": (wide, (Bucket.of(batch=1),))}, weights, executables=True)
    del weights
    store = opened(tmp_path, control="explicit", start=())
    store.start()
    gc.collect()
    gc.disable()
    try:
        store.load("wide")
        before = resident()
        store.unload("wide")
        assert not [array for array in jax.live_arrays() if array.nbytes >= 64 << 20]
        ends = time.monotonic() + 60  # XLA frees a buffer on a thread of its own
        while before - resident() < 56 << 20 and time.monotonic() < ends:
            os.sched_yield()
        assert before - resident() >= 56 << 20
    finally:
        gc.enable()
        store.close()


def test_versions_of_other_signatures_are_not_shared_out_in_silence(bundles, tmp_path):
    shutil.copytree(bundles / "one", tmp_path / "net" / "1")
    shutil.copytree(bundles / "other", tmp_path / "net" / "2")
    store = opened(tmp_path, rules=Rules(Policy("all"), split=Split({"1": 1.0, "2": 1.0})))
    told = []
    with listening(lambda event: told.append(event.message) if isinstance(event, Notice) else None):
        store.start()
    store.close()
    assert "net is split between versions of different signatures: 2, 1" in told


def test_two_models_share_a_device(bundles, tmp_path):
    shutil.copytree(bundles / "one", tmp_path / "a" / "1")
    shutil.copytree(bundles / "two", tmp_path / "b" / "4")
    store = opened(tmp_path)
    store.start()
    try:
        a, b = (store.catalog.resolve(name) for name in "ab")
        assert (a.name, a.version, b.name, b.version) == ("a", "1", "b", "4")
        np.testing.assert_allclose(2 * a.predict(x=X)["y"], b.predict(x=X)["y"], rtol=1e-6)
    finally:
        store.close()


def test_a_model_of_a_store_is_loaded_by_its_latest_version(bundles, tmp_path):
    shutil.copytree(bundles / "one", tmp_path / "net" / "9")
    shutil.copytree(bundles / "two", tmp_path / "net" / "10")
    (tmp_path / "net" / "11").mkdir()
    expected = {tmp_path / "net": ("net", "10"), tmp_path / "net" / "9": ("toy", "9"), bundles / "one": ("toy", "1")}
    for path, told in expected.items():
        with servax.load(path, warm=False) as servable:
            assert (servable.name, servable.version) == told


def test_what_is_no_store_is_refused(bundles):
    with pytest.raises(UsageError, match="not a store"):
        opened(bundles / "one")


def test_what_a_version_needs_is_told_by_its_manifest(bundles):
    """By hand: 4 + 16 float32 numbers are 80 bytes."""
    candidate = BundleLoader(LoadOptions())(bundles / "one", "net", "1")
    assert candidate.parameter_bytes == 80
    memories = [record.memory for record in Bundle.open(bundles / "one").manifest.programs]
    code, peaks = sum(each["code"] for each in memories), [each["temp"] + each["output"] for each in memories]
    assert candidate.program_bytes == code + max(peaks)
