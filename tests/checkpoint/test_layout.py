import shutil

import numpy as np
import pytest

from servax.checkpoint.layout import locate
from servax.core.errors import CheckpointError


def test_a_run_a_step_and_an_item_are_the_same_checkpoint(run):
    for path, step in ((run, 20), (run / "20", None), (run / "20" / "state", None)):
        location = locate(path, step=step)
        assert (location.layout, location.step, location.items) == ("orbax v0", 20, ("state",))
        assert str(location.directory) == str(run / "20")


@pytest.mark.parametrize(("step", "number"), [(None, 30), ("latest", 30), ("best", 20), (10, 10)])
def test_a_step_of_a_run(run, step, number):
    assert locate(run, step=step).step == number


def test_a_missing_step_lists_those_there_are(run):
    with pytest.raises(CheckpointError) as caught:
        locate(run, step=25)
    assert "no step 25" in caught.value.what
    assert caught.value.seen == "steps: 10, 20, 30"


def test_best_without_metrics_lists_the_steps(run):
    for step in run.iterdir():
        shutil.rmtree(step / "metrics")
    with pytest.raises(CheckpointError) as caught:
        locate(run, step="best")
    assert "no metrics" in caught.value.what
    assert caught.value.seen == "steps: 10, 20, 30"


def test_a_missing_item_lists_those_there_are(run):
    with pytest.raises(CheckpointError) as caught:
        locate(run, step=10, item="params")
    assert caught.value.what == "there is no item 'params'"
    assert caught.value.seen == "items: state"


def test_a_step_of_a_single_checkpoint_is_refused(run):
    with pytest.raises(CheckpointError) as caught:
        locate(run / "20", step=30)
    assert caught.value.seen == "step 20"
    assert locate(run / "20", step=20).step == 20


def test_an_unfinished_step_is_passed_over(run):
    shutil.copytree(run / "30", run / "40.orbax-checkpoint-tmp-1700000000")
    assert locate(run).step == 30


def test_an_unfinished_save_is_refused_by_name(run):
    unfinished = run.parent / "40.orbax-checkpoint-tmp-1700000000"
    shutil.copytree(run / "30", unfinished)
    with pytest.raises(CheckpointError) as caught:
        locate(unfinished)
    assert "never committed" in caught.value.what
    assert caught.value.where == str(unfinished)


def test_a_run_whose_saves_are_all_unfinished(tmp_path):
    (tmp_path / "run" / "10.orbax-checkpoint-tmp-1").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path / "run")
    assert caught.value.what == "no checkpoint here was committed"
    assert "10.orbax-checkpoint-tmp-1" in caught.value.seen


def test_a_path_that_does_not_exist(tmp_path):
    (tmp_path / "gpt").mkdir()
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path / "gtp")
    assert caught.value.what == "the checkpoint does not exist"
    assert caught.value.where == str(tmp_path / "gtp")
    assert caught.value.seen == f"{tmp_path} holds gpt"


def test_an_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match="the directory is empty"):
        locate(tmp_path)


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("model.npz", "a NumPy archive"),
        ("model.pt", "unpickling runs code"),
        ("model.msgpack", "a Flax msgpack file"),
        ("model.what", "an unknown file"),
    ],
)
def test_a_file_that_is_no_checkpoint_says_what_it_looks_like(tmp_path, name, looks):
    (tmp_path / name).write_bytes(b"\x00" * 16)
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path / name)
    assert looks in caught.value.seen
    assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "looks"),
    [("saved_model.pb", "TensorFlow SavedModel"), ("bundle.json", "servax bundle"), ("a.txt", "a.txt")],
)
def test_a_directory_that_is_no_checkpoint_says_what_it_looks_like(tmp_path, name, looks):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as caught:
        locate(tmp_path)
    assert looks in caught.value.seen


def test_a_file_inside_a_checkpoint_points_to_its_directory(run):
    with pytest.raises(CheckpointError) as caught:
        locate(run / "20" / "state" / "manifest.ocdbt")
    assert caught.value.remedy == f"give the directory {run / '20' / 'state'}"


def test_steps_may_have_names_and_hold_safetensors(tmp_path):
    from safetensors.numpy import save_file

    for step in (500, 1500):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": np.ones(2, np.float32)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    location = locate(tmp_path)
    assert (location.layout, location.step) == ("safetensors", 1500)


def test_checkpoints_written_before_orbax_had_checkpoint_metadata(run):
    for file in run.glob("*/_CHECKPOINT_METADATA"):
        file.unlink()
    location = locate(run, step=20)
    assert (location.step, str(location.directory)) == (20, str(run / "20" / "state"))


def test_relative_and_home_paths_are_made_absolute(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("HOME", str(run.parent))
    assert str(locate("run").path) == str(run)
    assert str(locate("~/run").path) == str(run)
