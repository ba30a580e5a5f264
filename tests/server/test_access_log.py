import asyncio
import io
import json

import pytest

from servax.server.access_log import Access, AccessLog

LINE = Access("id-1", "10.0.0.7", "alice", "POST", b"/v2/models/net/infer", b"", 200, 0.0012345, b"78", 239)


def written(*lines: Access, as_json: bool = False) -> list[str]:
    stream = io.StringIO()

    async def scene() -> None:
        log = AccessLog(stream, as_json=as_json)
        for line in lines:
            log.add(line)
        log.flush()

    asyncio.run(scene())
    return stream.getvalue().splitlines()


def changed(**changes) -> Access:
    return Access(**{name: getattr(LINE, name) for name in Access._fields} | changes)


def test_a_line_of_logfmt():
    (line,) = written(LINE)
    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("timestamp=20")
    assert stamp.endswith("Z")
    assert rest == (
        "level=info event=request id=id-1 client=10.0.0.7 key=alice method=POST path=/v2/models/net/infer model=net "
        "status=200 ms=1.234 received=78 sent=239"
    )


def test_a_line_of_json():
    (line,) = written(LINE, as_json=True)
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "level": "info",
        "event": "request",
        "id": "id-1",
        "client": "10.0.0.7",
        "key": "alice",
        "method": "POST",
        "path": "/v2/models/net/infer",
        "model": "net",
        "status": 200,
        "ms": 1.234,
        "received": 78,
        "sent": 239,
    }


def test_what_is_not_known_is_left_out():
    (line,) = written(changed(key=None, path=b"/", received=None, status=None))
    assert line.endswith("client=10.0.0.7 method=POST path=/ status=gone ms=1.234 sent=239")


@pytest.mark.parametrize("as_json", [False, True])
def test_values_of_a_query_are_masked(as_json):
    (line,) = written(changed(query=b"api_key=hunter2&x=hunter2&flag"), as_json=as_json)
    assert "hunter2" not in line
    assert "/infer?api_key=***&x=***&flag" in line


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("query", [b"", b'a\n"b=1'])
def test_a_path_cannot_forge_a_line(as_json, query):
    lines = written(changed(path=b'/a b"\nlevel=error event=forged', query=query), as_json=as_json)
    assert len(lines) == 1
    assert not lines[0].startswith("level=error")


@pytest.mark.parametrize(
    ("path", "model"),
    [(b"/v2/models/net/versions/3/infer", "net"), (b"/v1/models/net:predict", "net"), (b"/v2/models/a%20b", "a%20b")],
)
def test_the_model_is_named(path, model):
    (line,) = written(changed(path=path))
    assert f" model={model} " in line


def test_paths_that_clients_make_up_are_not_kept_for_ever():
    log = AccessLog(io.StringIO())

    async def scene() -> None:
        for number in range(5000):
            log.add(changed(path=b"/%d" % number))

    asyncio.run(scene())
    assert len(log._paths) <= 1024


def test_lines_wait_for_one_another_and_not_for_ever():
    stream = io.StringIO()

    async def scene() -> None:
        log = AccessLog(stream)
        log.add(LINE)
        assert stream.getvalue() == ""
        async with asyncio.timeout(30):
            while not stream.getvalue():
                await asyncio.sleep(0)
        assert stream.getvalue().count("\n") == 1
        for _ in range(2000):
            log.add(LINE)
        assert stream.getvalue().count("\n") > 1000
        log.flush()

    asyncio.run(scene())
    assert stream.getvalue().count("\n") == 2001
