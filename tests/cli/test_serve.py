import json
import shutil
import threading

import httpx2
import pytest

import bundle_toys as toys
import servax
from servax.api.serve import run
from servax.core.errors import StartupError, UsageError


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store" / "net" / "1").mkdir(parents=True)
    (tmp_path / "store" / "net" / "1" / "bundle.json").write_text("{}")
    return str(tmp_path / "store")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing to serve"),
        ({"targets": ["http://host:8000"]}, "served already"),
        ({"targets": ["a.bundle", "b.bundle"], "name": "net"}, "name cannot be said here"),
        ({"targets": ["a.bundle"], "poll": "1s"}, "poll cannot be said here"),
        ({"targets": ["a.bundle"], "control": "explicit", "load": ["net"]}, "control, load cannot be said here"),
        ({"targets": ["a.bundle"], "step": "last"}, "step cannot be read"),
        ({"targets": ["a.bundle"], "max_delay": "soon"}, "a duration cannot be read"),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_listens(given, said):
    with pytest.raises(UsageError, match=said):
        run(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"checkpoint": "runs/net"}, "checkpoint cannot be said here"),
        ({"policy": "newest"}, "policy cannot be read"),
        ({"label": ["stable"]}, "label cannot be read"),
        ({"split": "half"}, "split cannot be read"),
        ({"poll": "0"}, "above 0"),
    ],
)
def test_and_what_a_store_cannot_be_told(store, given, said):
    with pytest.raises(UsageError, match=said):
        run({"targets": [store], **given})
    with pytest.raises(UsageError, match="served alone"):
        run({"targets": [store, "a.bundle"]})


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"targets": ["a.bundle"], "poll": "1s"}, ("seen", "a.bundle")),
        ({"targets": ["a.bundle"], "record_shapes": "/nope/shapes"}, ("where", "/nope/shapes")),
    ],
)
def test_a_program_that_starts_it_is_told_of_them_in_lines(capsys, given, where):
    assert run(given, as_json=True) == 2
    failed, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert (failed["event"], failed["kind"]) == ("failed", "UsageError")
    assert failed[where[0]] == where[1]
    assert ended == {"event": "ended", "code": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A store of `a` and `b`, in one version each."""
    folder = tmp_path_factory.mktemp("models")
    toys.write_bundle(folder / "a" / "3", executables=True)
    shutil.copytree(folder / "a", folder / "b")
    return folder


def test_a_store_is_served_from_python_and_closed_with_its_server(models):
    with servax.serve(str(models), port=0, max_body="1MiB", label=["stable=3"], max_queue=16) as server:
        index = httpx2.post(f"{server.url}/v2/repository/index").json()
        assert [(each["name"], each["version"], each["state"]) for each in index] == [
            ("a", "3", "READY"),
            ("b", "3", "READY"),
        ]
        assert httpx2.get(f"{server.url}/v1/models/a/labels/stable").status_code == 200
        threads = {thread.name for thread in threading.enumerate()}
    assert not server.alive
    gone = threads - {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("servax-http") for name in gone)


def test_explicit_control_begins_with_the_models_named(models):
    with servax.serve(models, port=0, control="explicit", load=["b"]) as server:
        assert httpx2.get(f"{server.url}/v2/models/b/ready").status_code == 200
        assert httpx2.get(f"{server.url}/v2/models/a/ready").status_code == 503  # there, and not loaded
        assert httpx2.post(f"{server.url}/v2/repository/models/a/load").status_code == 200
        assert httpx2.get(f"{server.url}/v2/models/a/ready").status_code == 200
    with pytest.raises(StartupError, match="no such model"):
        servax.serve(models, port=0, control="explicit", load=["nope"])


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("", {"threads": 2}, "threads"),
        ("", {"checkpoint": "runs/net"}, "checkpoint"),
        ("", {"poll": "0s"}, "poll"),
        ("a", {}, "not a store"),
        ("a/3", {}, r"servax\.serve\(servax\.load\("),
    ],
)
def test_what_cannot_be_served_so_is_refused_before_anything_is_loaded(models, path, options, said):
    with pytest.raises(UsageError, match=said):
        servax.serve(models / path, port=0, **options)


def test_what_chooses_from_a_checkpoint_needs_one(models):
    for given in ({"step": 5}, {"select": "ema"}, {"item": "state"}):
        with pytest.raises(UsageError, match=f"{next(iter(given))} cannot be given with a bundle alone"):
            servax.load(models / "a" / "3", **given)
