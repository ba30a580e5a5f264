import json

import pytest

from servax.api.serve import run
from servax.core.errors import UsageError


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
