"""New versions from the same programs: answers by NumPy, and no compilation on any thread."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.monitoring
import numpy as np
import pytest
from orbax.checkpoint import v1
from typer.testing import CliRunner

import bundle_toys as toys
import servax
from servax.cli.app import app
from servax.core.errors import BundleError, CheckpointError, UsageError
from servax.core.trees import unflatten
from servax.runtime.store import StoreOptions
from servax.stages.buckets import Bucket
from servax.targets import golden
from servax.targets.bundle import Bundle, BundleWriter
from servax.targets.manifest import SavedModelRecord, VerdictRecord
from servax.targets.samples import from_bytes, to_bytes
from servax.workflow.load import LoadOptions
from servax.workflow.refresh import refresh
from servax.workflow.store import open_store
from servax.workflow.verify import verify

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: COMPILES.append(name) if name.startswith("/jax/core/compile") else None
)
verb = importlib.import_module("servax.workflow.refresh")  # the package gives the function under this name
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def params(w: float, b: float):
    return {"dense": {"b": np.full(4, b, np.float32), "w": np.full((4, 4), w, np.float32)}}


def checkpoint(path: Path, w: float, b: float) -> Path:
    v1.save(path, {"model": params(w, b), "step": np.full(1, 7, np.int32)})
    return path


def with_golden(source: Path, target: Path, **update) -> Path:
    """A copy of a toy bundle with golden samples of `predict`, and more in its manifest."""
    bundle = Bundle.open(source)
    with BundleWriter(target) as writer:
        for rel in bundle.manifest.files:
            writer.write(rel, bundle.read(rel))
        made = golden.make_all(
            {"predict": toys.PREDICT},
            {"predict": (toys.SMALL, toys.LARGE)},
            toys.PARAMS,
            lambda each: each,
            thorough={"predict": ()},
        )
        files = {}
        for each in made:
            file = golden.golden_file("predict", Bucket.parse(each.bucket))
            writer.write(file, to_bytes(each))
            files[f"predict@{each.bucket}"] = file
        writer.finish(bundle.manifest.model_copy(update={"golden": files, **update}))
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A store of one model, `net`, with the version 3."""
    folder = tmp_path_factory.mktemp("refresh")
    toys.write_bundle(folder / "plain", executables=True)
    manifest = Bundle.open(folder / "plain").manifest
    with_golden(
        folder / "plain",
        folder / "store" / "net" / "3",
        verdicts=(
            VerdictRecord(target="aot", platform="cpu", function="predict", bucket=toys.SMALL.label, verdict="proved"),
            VerdictRecord(
                target="saved_model", platform="cpu", function="predict", bucket=toys.SMALL.label, verdict="proved"
            ),
        ),
        targets=(*manifest.targets, "saved_model"),
        saved_model=SavedModelRecord(tensorflow="2.21.0", stablehlo="1.13.0", signatures={}),
    )
    return folder / "store"


@pytest.fixture
def store(built, tmp_path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "store"))


def test_the_new_version_gives_the_function_s_numbers_with_the_new_weights(store, tmp_path):
    new = checkpoint(tmp_path / "new", 0.5, 2.0)
    before = len(COMPILES)
    made = refresh(store / "net", checkpoint=new)
    assert COMPILES[before:] == []
    assert (made.version, made.leaves, made.bytes) == (4, 2, 80)
    with servax.load(store / "net") as servable:
        assert servable.version == "4"
        np.testing.assert_allclose(servable.predict(x=X)["y"], 0.5 * X.sum(2, keepdims=True) + np.full(4, 2), rtol=1e-6)
        assert COMPILES[before:] == []


def test_what_does_not_depend_on_the_weights_is_linked_and_the_rest_is_new(store, tmp_path):
    made = refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 0.5, 2.0))
    old, new = Bundle.open(store / "net" / "3"), Bundle.open(store / "net" / "4")
    assert new.manifest == made.bundle.manifest
    for prefix in ("programs", "executables"):
        new.check(prefix)
        for rel in new.manifest.files:
            if rel.startswith(f"{prefix}/"):
                assert os.path.samefile(old.path(rel), new.path(rel))
    assert new.manifest.programs == old.manifest.programs
    assert new.manifest.executables == old.manifest.executables
    provenance = new.manifest.provenance
    assert (provenance.checkpoint, provenance.select) == (str(tmp_path / "new"), "model")
    assert sorted(os.listdir(store / "net")) == ["3", "4"]


def test_drift_and_finiteness_are_recorded_and_verdicts_of_programs_stay(store, tmp_path):
    """Drift by hand: |0.5 sum(x) + 2 - (x @ w + b)| over the largest |x @ w + b|, on the golden inputs."""
    made = refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 0.5, 2.0))
    old = Bundle.open(store / "net" / "3")
    expected = 0.0
    for file in old.manifest.golden.values():
        for sample in from_bytes(old.read(file)).samples:
            for step in sample.steps:
                x = step.inputs["x"].astype(np.float64)
                was, now = toys.predict_by_numpy(x), 0.5 * x.sum(2, keepdims=True) + np.full(4, 2)
                expected = max(expected, float(np.abs(now - was).max() / np.abs(was).max()))
    record = made.bundle.manifest.refresh
    assert (record.version, record.built, record.finite) == ("3", old.manifest.created, True)
    assert record.drift["predict"] == pytest.approx(expected, rel=1e-4)
    assert [verdict.target for verdict in made.bundle.manifest.verdicts] == ["aot"]


def test_golden_samples_are_the_new_version_s_own(store, tmp_path):
    refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 0.5, 2.0))
    checked = verify(store / "net" / "4", targets=["aot"])
    assert [verdict.verdict for verdict in checked.manifest.verdicts if verdict.function == "predict"] == ["proved"] * 2
    again = refresh(store / "net", checkpoint=checkpoint(tmp_path / "again", 0.5, 2.0))
    assert again.bundle.manifest.refresh.drift == {"predict": 0.0}
    assert again.bundle.manifest.refresh.built == Bundle.open(store / "net" / "3").manifest.created


def test_a_saved_model_is_left_out_and_that_is_said(store, tmp_path):
    made = refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 1.0, 1.0))
    manifest = made.bundle.manifest
    assert manifest.saved_model is None
    assert "saved_model" not in manifest.targets
    assert "servax build --from" in manifest.refresh.left_out["saved_model"]


def test_without_executables_nothing_is_answered_and_that_is_said(store, tmp_path):
    made = refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 1.0, 1.0), executables=False)
    assert made.record.drift == {}
    assert "--no-executables" in made.record.left_out["golden"]
    assert made.bundle.manifest.golden == {}
    assert not (store / "net" / "4" / "golden").exists()


def test_a_running_store_takes_the_new_version_without_a_compilation(store, tmp_path):
    served = open_store(store, StoreOptions(), LoadOptions())
    served.start()
    try:
        before = len(COMPILES)
        refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 0.5, 2.0))
        served.look()
        assert COMPILES[before:] == []
        servable = served.catalog.resolve("net")
        assert servable.version == "4"
        np.testing.assert_allclose(servable.predict(x=X)["y"], 0.5 * X.sum(2, keepdims=True) + np.full(4, 2), rtol=1e-6)
    finally:
        served.close()


def test_refreshes_that_race_each_get_a_number(store, tmp_path, monkeypatch):
    """All but the last step one after another: within one process Orbax saves and restores one thing at a time."""
    news = [checkpoint(tmp_path / f"new{number}", 1.0, float(number)) for number in range(4)]
    alone, barrier = threading.Lock(), threading.Barrier(4)
    finish = verb._finish

    def at_once(*arguments):
        alone.release()
        barrier.wait()
        return finish(*arguments)

    monkeypatch.setattr(verb, "_finish", at_once)

    def run(path: Path) -> int:
        alone.acquire()
        return refresh(store / "net", checkpoint=path, base=3).version

    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(run, news))
    assert sorted(versions) == [4, 5, 6, 7]
    for number, version in enumerate(versions):
        with servax.load(store / "net" / str(version)) as servable:
            assert servable.predict(x=np.zeros((1, 1, 4), np.float32))["y"].tolist() == [[[float(number)] * 4]]
    assert sorted(os.listdir(store / "net")) == ["3", "4", "5", "6", "7"]


def test_weights_that_do_not_fit_or_are_not_finite_leave_nothing_behind(store, tmp_path):
    wide = {"dense": {"b": np.zeros(5, np.float32), "w": np.zeros((4, 4), np.float32)}}
    v1.save(tmp_path / "wide", wide)
    with pytest.raises(CheckpointError, match="dense/b"):
        refresh(store / "net", checkpoint=tmp_path / "wide")
    with pytest.raises(CheckpointError) as caught:
        refresh(store / "net", checkpoint=checkpoint(tmp_path / "nan", float("nan"), 1.0))
    assert caught.value.seen == "dense/w"
    assert os.listdir(store / "net") == ["3"]
    made = refresh(store / "net", checkpoint=tmp_path / "nan", allow_nonfinite=True)
    assert made.record.finite is False
    assert made.record.drift == {"predict": None}
    assert Bundle.open(store / "net" / "4").manifest.refresh.drift == {"predict": None}


def test_a_damaged_base_is_not_handed_on(store, tmp_path):
    program = next(path for path in (store / "net" / "3" / "programs").rglob("*") if path.is_file())
    program.write_bytes(program.read_bytes()[:-1] + b"?")
    with pytest.raises(BundleError, match="damaged") as caught:
        refresh(store / "net", checkpoint=checkpoint(tmp_path / "new", 1.0, 1.0))
    assert program.name in caught.value.where
    assert os.listdir(store / "net") == ["3"]


def test_there_must_be_a_version_to_begin_with(tmp_path, store):
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no version to take the programs of"):
        refresh(tmp_path / "none", checkpoint="x")
    with pytest.raises(UsageError) as caught:
        refresh(store / "net", checkpoint="x", base=9)
    assert caught.value.seen == "3"


def test_leaves_of_the_definition_are_kept_where_the_checkpoint_lacks_them(tmp_path, store):
    base = Bundle.open(store / "net" / "3")
    b, w = base.manifest.parameters
    shutil.rmtree(tmp_path / "store")
    lifted = (b.model_copy(update={"origin": "model"}), w)
    toys.write_bundle(tmp_path / "plain", executables=True)
    with_golden(tmp_path / "plain", tmp_path / "store" / "net" / "1", parameters=lifted)
    v1.save(tmp_path / "partial", unflatten({("dense", "w"): np.zeros((4, 4), np.float32)}))
    made = refresh(tmp_path / "store" / "net", checkpoint=tmp_path / "partial")
    assert [record.origin for record in made.bundle.manifest.parameters] == ["model", "checkpoint"]
    with servax.load(tmp_path / "store" / "net") as servable:
        assert servable.predict(x=X)["y"][0, 0].tolist() == [0, 1, 2, 3]


def test_the_verb(store, tmp_path):
    new = str(checkpoint(tmp_path / "new", 1.0, 1.0))
    done = CliRunner().invoke(app, ["refresh", str(store / "net"), "--checkpoint", new])
    assert done.exit_code == 0, done.output
    assert "version 4: 2 leaves, 80 B, all finite" in done.output
    assert "answers of predict moved by" in done.output
    done = CliRunner().invoke(app, ["refresh", str(store / "net"), "--checkpoint", new, "--base", "3", "--json"])
    told = json.loads(done.stdout)
    assert (told["version"], told["programs_of"], told["leaves"], told["finite"]) == (5, "3", 2, True)
    assert CliRunner().invoke(app, ["refresh", str(store / "net")]).exit_code != 0
