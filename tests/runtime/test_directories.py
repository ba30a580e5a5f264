import os
import shutil

import pytest
from etils import epath

from servax.core.errors import BundleError
from servax.runtime import directories
from store_toys import manifest_of, put_version


def test_versions_are_whole_numbers_and_nothing_else(tmp_path):
    for version in (10, 9):
        put_version(tmp_path, "net", version)
    for other in ("net/07", "net/-1", "net/.11.tmp-12ab", "net/new", "empty", ".hidden/1", "none/x"):
        (tmp_path / other).mkdir(parents=True)
    (tmp_path / "net" / "3").write_text("a file")
    assert directories.models_of(epath.Path(tmp_path)) == ("net",)
    assert list(directories.versions_of(epath.Path(tmp_path / "net"))) == [9, 10]
    assert directories.latest_bundle(tmp_path / "net").name == "10"
    assert directories.latest_bundle(tmp_path / "empty") is None


def test_names_that_nobody_can_ask_for_are_passed_over(tmp_path):
    put_version(tmp_path, "net", 1)
    odd = os.fsencode(tmp_path) + b"/b\xff"
    shutil.copytree(os.fsencode(tmp_path / "net"), odd)
    assert directories.models_of(epath.Path(tmp_path)) == ("net",)
    (tmp_path / "net" / "1" / os.fsdecode(b"\xff")).write_text("")
    assert len(directories.stamp(epath.Path(tmp_path / "net" / "1"))) == 64


def test_a_store_is_told_from_a_bundle_and_from_a_checkpoint_by_what_lies_in_it(tmp_path):
    put_version(tmp_path / "store", "net", 1)
    (tmp_path / "run" / "100" / "params").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert directories.is_store(tmp_path / "store")
    assert directories.is_store(tmp_path / "empty")
    assert not directories.is_store(tmp_path / "store" / "net" / "1")
    assert not directories.is_store(tmp_path / "store" / "net")
    assert not directories.is_store(tmp_path / "run")
    assert not directories.is_store(tmp_path / "nowhere")
    assert not directories.is_store("http://127.0.0.1:8000")


def test_a_version_is_unfinished_until_every_file_has_its_size(tmp_path):
    whole = put_version(tmp_path, "net", 1)
    copy = epath.Path(tmp_path / "net" / "2")
    copy.mkdir()
    assert directories.unfinished(copy) == "bundle.json is not there yet"
    shutil.copy(whole / "bundle.json", copy)
    assert "1 of 1 files" in directories.unfinished(copy)
    (copy / "params").write_bytes((whole / "params").read_bytes()[:-1])
    assert "params among them" in directories.unfinished(copy)
    assert not directories.lacks_only_executables(copy)
    shutil.copy(whole / "params", copy)
    assert directories.unfinished(copy) is None


def test_executables_may_be_missing_but_not_half_there(tmp_path):
    path = epath.Path(put_version(tmp_path, "net", 1))
    size = len((path / "params").read_bytes())
    (path / "bundle.json").write_text(manifest_of(size, executable=True).model_dump_json())
    assert directories.lacks_only_executables(path)
    half = path / "executables" / "here" / "predict"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x")
    assert not directories.lacks_only_executables(path)


def test_a_stamp_differs_once_a_file_was_touched(tmp_path):
    path = epath.Path(put_version(tmp_path, "net", 1))
    before = directories.stamp(path)
    assert directories.stamp(path) == before
    content = (path / "params").read_bytes()
    (path / "again").write_bytes(content)
    (path / "again").replace(path / "params")
    assert directories.stamp(path) != before


def test_a_manifest_that_is_no_file_is_a_damaged_bundle(tmp_path):
    (tmp_path / "net" / "1" / "bundle.json").mkdir(parents=True)
    with pytest.raises(BundleError, match="directory"):
        directories.unfinished(epath.Path(tmp_path / "net" / "1"))
