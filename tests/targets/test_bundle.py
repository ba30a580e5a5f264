import hashlib
import json
import threading

import pytest

from servax.core.errors import BundleError, UsageError
from servax.targets.bundle import Bundle, BundleWriter, amend, is_bundle
from servax.targets.manifest import FileRecord, Manifest, ProvenanceRecord


def manifest(name="toy") -> Manifest:
    return Manifest(
        name=name,
        created="2026-11-30T12:00:00Z",
        versions={},
        platforms=("cpu",),
        targets=("export",),
        provenance=ProvenanceRecord(),
        parameters=(),
        functions={},
    )


def write(path, *, name="toy", files=None, **options) -> Bundle:
    with BundleWriter(path, **options) as writer:
        for rel, data in (files or {"params/a/b": b"weights", "README.md": "text"}).items():
            writer.write(rel, data)
        return writer.finish(manifest(name))


def names(directory):
    return sorted(each.name for each in directory.iterdir())


def test_written_bundle_opens_with_the_digest_of_every_file(tmp_path):
    write(tmp_path / "net.bundle")
    bundle = Bundle.open(tmp_path / "net.bundle")
    assert bundle.manifest.files == {
        "README.md": FileRecord(sha256=hashlib.sha256(b"text").hexdigest(), bytes=4),
        "params/a/b": FileRecord(sha256=hashlib.sha256(b"weights").hexdigest(), bytes=7),
    }
    assert bundle.read("params/a/b") == b"weights"
    bundle.check("params")
    bundle.check("params/")
    bundle.check("README.md")
    assert names(tmp_path) == ["net.bundle"]


def test_files_written_past_the_writer_are_digested_too(tmp_path):
    with BundleWriter(tmp_path / "net.bundle") as writer:
        (writer.root / "params").mkdir()
        (writer.root / "params" / "data").write_bytes(b"by orbax")
        writer.finish(manifest())
    assert Bundle.open(tmp_path / "net.bundle").read("params/data") == b"by orbax"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_behind_on_an_error(tmp_path, error):
    def build():
        with BundleWriter(tmp_path / "net.bundle") as writer:
            writer.write("a", b"1")
            writer.draft(manifest())
            raise error

    with pytest.raises(error):
        build()
    assert names(tmp_path) == []


def test_nothing_is_left_behind_when_finish_was_forgotten(tmp_path):
    with BundleWriter(tmp_path / "net.bundle") as writer:
        writer.write("a", b"1")
    assert names(tmp_path) == []


def test_draft_opens_in_its_temporary_place(tmp_path):
    with BundleWriter(tmp_path / "net.bundle") as writer:
        writer.write("a", b"1")
        draft = Bundle.open(writer.draft(manifest()).root)
        assert draft.read("a") == b"1"
        assert not (tmp_path / "net.bundle").exists()
        amended = amend(draft, {"b": b"2"}, lambda each: each)
        finished = writer.finish(amended.manifest)
    assert finished.read("b") == b"2"


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("mine")])
def test_what_is_not_a_bundle_is_never_overwritten(tmp_path, make):
    make(tmp_path / "net.bundle")
    with pytest.raises(UsageError, match="not a bundle") as caught:
        write(tmp_path / "net.bundle", overwrite=True)
    assert caught.value.where == str(tmp_path / "net.bundle")
    assert names(tmp_path) == ["net.bundle"]


def test_a_bundle_is_overwritten_only_when_allowed(tmp_path):
    path = tmp_path / "net.bundle"
    write(path, name="old", files={"old": b"1"})
    with pytest.raises(UsageError) as caught:
        write(path, name="new")
    assert "--overwrite" in str(caught.value)
    assert Bundle.open(path).manifest.name == "old"
    write(path, name="new", files={"new": b"2"}, overwrite=True)
    assert Bundle.open(path).manifest.name == "new"
    assert names(path) == ["bundle.json", "new"]
    assert names(tmp_path) == ["net.bundle"]


def test_a_path_taken_meanwhile_is_refused_at_the_end(tmp_path):
    def build():
        with BundleWriter(tmp_path / "net.bundle") as writer:
            write(tmp_path / "net.bundle", name="other")
            writer.finish(manifest())

    with pytest.raises(UsageError):
        build()
    assert Bundle.open(tmp_path / "net.bundle").manifest.name == "other"
    assert names(tmp_path) == ["net.bundle"]


def test_a_path_taken_at_the_last_moment_is_not_taken_back(tmp_path, monkeypatch):
    other = write(tmp_path / "other", name="other")
    with BundleWriter(tmp_path / "net.bundle") as writer:
        refuse = BundleWriter._refuse_existing

        def taken_right_after(self):
            refuse(self)
            (tmp_path / "other").rename(tmp_path / "net.bundle")

        monkeypatch.setattr(BundleWriter, "_refuse_existing", taken_right_after)
        with pytest.raises(OSError, match="exists"):
            writer.finish(manifest())
    assert Bundle.open(tmp_path / "net.bundle").manifest == other.manifest
    assert names(tmp_path) == ["net.bundle"]


def test_the_old_bundle_is_put_back_when_the_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "net.bundle"
    write(path, name="old")
    rename = type(Bundle.open(path).root).rename

    def fail(self, target):
        if ".tmp-" in self.name:
            raise OSError("disk")
        return rename(self, target)

    monkeypatch.setattr(type(Bundle.open(path).root), "rename", fail)
    with pytest.raises(OSError, match="disk"):
        write(path, name="new", overwrite=True)
    assert Bundle.open(path).manifest.name == "old"
    assert names(tmp_path) == ["net.bundle"]


@pytest.mark.parametrize("changed", [b"weightz", b"weight", b""])
def test_a_changed_byte_is_named_with_both_digests(tmp_path, changed):
    bundle = write(tmp_path / "net.bundle")
    file = tmp_path / "net.bundle" / "params" / "a" / "b"
    file.write_bytes(changed)
    for look in (lambda: bundle.read("params/a/b"), lambda: bundle.check("params")):
        with pytest.raises(BundleError) as caught:
            look()
        message = str(caught.value)
        assert str(file) in message
        assert hashlib.sha256(changed).hexdigest() in message
        assert hashlib.sha256(b"weights").hexdigest() in message
        assert caught.value.remedy is not None


def test_every_damaged_file_under_a_prefix_is_listed(tmp_path):
    files = {f"params/{number}": bytes([number]) for number in range(20)} | {"paramsother": b"1"}
    bundle = write(tmp_path / "net.bundle", files=files)
    root = tmp_path / "net.bundle"
    (root / "params" / "3").write_bytes(b"x")
    (root / "params" / "11").unlink()
    (root / "paramsother").write_bytes(b"not under params")
    with pytest.raises(BundleError) as caught:
        bundle.check("params")
    where = caught.value.where
    assert where is not None
    assert str(root / "params" / "3") in where
    assert f"{root / 'params' / '11'}: no such file" in where
    assert "paramsother" not in where


def test_a_large_file_is_checked_in_blocks(tmp_path):
    data = bytes(range(256)) * 20_000
    bundle = write(tmp_path / "net.bundle", files={"params/big": data})
    assert bundle.manifest.files["params/big"] == FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    bundle.check("params")


def test_unlisted_files_are_not_read(tmp_path):
    bundle = write(tmp_path / "net.bundle")
    (tmp_path / "net.bundle" / "extra").write_bytes(b"1")
    with pytest.raises(BundleError, match="no file extra"):
        bundle.read("extra")
    with pytest.raises(BundleError, match="no files under nothing"):
        bundle.check("nothing")


@pytest.mark.parametrize("rel", ["../evil", "/etc/passwd", "a/../../b", ""])
def test_no_path_leads_out_of_the_bundle(tmp_path, rel):
    bundle = write(tmp_path / "net.bundle")
    with pytest.raises(BundleError, match="out of the bundle"):
        bundle.path(rel)
    with pytest.raises(BundleError, match="out of the bundle"), BundleWriter(tmp_path / "other") as writer:
        writer.write(rel, b"")
    with pytest.raises(BundleError, match="out of the bundle"):
        amend(bundle, {rel: b""}, lambda each: each)


@pytest.mark.parametrize(
    ("prepare", "seen"),
    [
        (lambda path: None, "no such path"),
        (lambda path: path.write_text("x"), "a file"),
        (lambda path: path.mkdir(), "a directory with nothing"),
        (lambda path: (path.mkdir(), (path / "_CHECKPOINT_METADATA").write_text("{}")), "an Orbax checkpoint"),
    ],
)
def test_what_is_not_a_bundle_is_said(tmp_path, prepare, seen):
    path = tmp_path / "thing"
    prepare(path)
    with pytest.raises(BundleError, match="not a bundle") as caught:
        Bundle.open(path)
    assert caught.value.seen == seen
    assert caught.value.where == str(path)
    assert caught.value.remedy is not None


def test_the_versions_of_a_stored_model_are_named(tmp_path):
    for version in ("9", "10"):
        write(tmp_path / "net" / version)
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "net")
    assert caught.value.seen == "a model of a store, with versions 9, 10"
    assert caught.value.remedy == f"name one of them: {tmp_path / 'net' / '10'}"


@pytest.mark.parametrize(
    ("text", "seen"),
    [("{", "not JSON"), ("[]", "a JSON list"), ("", "not JSON"), ('{"format": 1}', "name: Field required")],
)
def test_a_damaged_manifest_is_said(tmp_path, text, seen):
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(BundleError, match="manifest is damaged") as caught:
        Bundle.open(tmp_path)
    assert seen in str(caught.value.seen)
    assert caught.value.where == str(tmp_path / "bundle.json")


def test_bytes_that_are_no_text_are_a_damaged_manifest(tmp_path):
    (tmp_path / "bundle.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BundleError, match="manifest is damaged"):
        Bundle.open(tmp_path)


def test_a_higher_format_asks_for_a_newer_servax(tmp_path):
    (tmp_path / "bundle.json").write_text(json.dumps({"format": 99, "future": True}))
    with pytest.raises(BundleError, match="newer servax") as caught:
        Bundle.open(tmp_path)
    assert caught.value.seen == "format 99"
    assert caught.value.expected == "format 1 or lower"
    assert "upgrade servax" in str(caught.value.remedy)


def test_every_missing_file_is_listed_at_open(tmp_path):
    write(tmp_path / "net.bundle")
    (tmp_path / "net.bundle" / "README.md").unlink()
    (tmp_path / "net.bundle" / "params" / "a" / "b").unlink()
    with pytest.raises(BundleError, match="2 of the files") as caught:
        Bundle.open(tmp_path / "net.bundle")
    assert "README.md" in str(caught.value.where)
    assert "params/a/b" in str(caught.value.where)


def test_amend_adds_files_and_changes_the_manifest(tmp_path):
    bundle = write(tmp_path / "net.bundle")
    source = tmp_path / "source"
    source.write_bytes(b"copied")
    amend(
        bundle,
        {"executables/f/x": b"code", "copy": source, "README.md": b"new text"},
        lambda each: each.model_copy(update={"targets": ("aot", "export")}),
    )
    opened = Bundle.open(tmp_path / "net.bundle")
    assert opened.manifest.targets == ("aot", "export")
    assert [opened.read(rel) for rel in ("executables/f/x", "copy", "README.md")] == [b"code", b"copied", b"new text"]
    assert names(tmp_path / "net.bundle") == ["README.md", "bundle.json", "copy", "executables", "params"]


def test_a_failed_amend_leaves_the_bundle_as_it_was(tmp_path):
    bundle = write(tmp_path / "net.bundle")
    before = {path: path.read_bytes() for path in (tmp_path / "net.bundle").rglob("*") if path.is_file()}

    def fail(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        amend(bundle, {"README.md": b"new", "executables/f/x": b"code"}, fail)
    assert {path: path.read_bytes() for path in (tmp_path / "net.bundle").rglob("*") if path.is_file()} == before


def test_two_amends_at_once_lose_nothing(tmp_path):
    bundle = write(tmp_path / "net.bundle")

    def add(number):
        def change(current):
            return current.model_copy(update={"golden": {**current.golden, str(number): f"golden/{number}"}})

        amend(bundle, {f"golden/{number}": b"1"}, change)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Bundle.open(tmp_path / "net.bundle").manifest.golden) == sorted(map(str, range(8)))


def test_reading_a_bundle_imports_no_jax(tmp_path):
    import subprocess
    import sys

    write(tmp_path / "net.bundle")
    code = (
        "import sys; from servax.targets.bundle import Bundle; Bundle.open(sys.argv[1]).check('params');"
        "print([name for name in ('jax', 'flax', 'orbax', 'tensorflow') if name in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "net.bundle")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert child.stdout.strip() == "[]"


def test_what_is_a_bundle(tmp_path):
    write(tmp_path / "net.bundle")
    assert is_bundle(tmp_path / "net.bundle")
    assert is_bundle(str(tmp_path / "net.bundle"))
    assert not is_bundle(tmp_path)
    assert not is_bundle(tmp_path / "nothing")
    assert not is_bundle("http://localhost:8000")
    assert not is_bundle("net.py:model")
