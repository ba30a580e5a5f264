import asyncio
import io
import re

import httpx2
import pytest

import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.access_log import AccessLog
from servax.server.app import create_app
from servax.server.auth import Access, Keys, KeySources
from servax.server.gate import Gate

KEY = "k" * 16
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
MADE = re.compile(r"[0-9a-f]{20}")


class Behind:
    """An application that notes what comes through."""

    def __init__(self, status: int = 200, body: bytes = b"{}", headers=()) -> None:
        self.seen: list[str] = []
        self._answer = (status, body, headers)

    async def __call__(self, scope, receive, send) -> None:
        self.seen.append(scope["path"])
        status, body, headers = self._answer
        length = (b"content-length", b"%d" % len(body))
        start = {"type": "http.response.start", "status": status, "headers": [length, *headers]}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def ask(gate: Gate, *requests: tuple[str, str] | tuple[str, str, dict[str, str]], **options) -> list[httpx2.Response]:
    async def scene():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url="http://host") as http:
            return [
                await http.request(method, path, headers=headers[0] if headers else {}, **options)
                for method, path, *headers in requests
            ]

    return asyncio.run(scene())


def gate(app=None, **options) -> Gate:
    return Gate(app or Behind(), options.pop("plane", DataPlane()), **options)


def closed(**options) -> Access:
    return Access(Keys(KeySources(key=KEY)), **options)


def test_an_id_is_made_or_taken_over():
    first, second, given, odd, long = ask(
        gate(),
        ("GET", "/"),
        ("GET", "/"),
        ("GET", "/", {"x-request-id": "trace-1/2:3"}),
        ("GET", "/", {"x-request-id": "a b"}),
        ("GET", "/", {"x-request-id": "x" * 129}),
    )
    ids = [each.headers["x-request-id"] for each in (first, second, given, odd, long)]
    assert ids[2] == "trace-1/2:3"
    made = [ids[0], ids[1], ids[3], ids[4]]
    assert len(set(made)) == 4
    assert all(map(MADE.fullmatch, made))


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_error_says_its_id_in_the_body(status):
    (answer,) = ask(gate(Behind(status, b'{"error":"no"}')), ("GET", "/", {"x-request-id": "r1"}))
    assert answer.json() == {"error": "no", "request_id": "r1"}
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    ("body", "headers"), [(b"", ()), (b"{}", ()), (b"oops", ()), (b"\x1f\x8b}", ((b"content-encoding", b"gzip"),))]
)
def test_an_error_that_is_no_json_object_stays_as_it_is(body, headers):
    async def scene():
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": "/", "method": "GET", "query_string": b"", "headers": []}
        await gate(Behind(500, body, headers))(scope, None, send)
        return sent

    start, rest = asyncio.run(scene())
    assert rest["body"] == body
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)


PATHS = [
    "/",
    "/metrics",
    "/openapi.json",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/toy",
    "/v2/models/toy/ready",
    "/v2/models/toy/infer",
    "/v2/models/toy/stats",
    "/v2/models/toy/config",
    "/v2/repository/index",
    "/v2/repository/models/toy/load",
    "/v1/models/toy",
    "/v1/models/toy:predict",
    "/v1/models/toy/metadata",
    "/nope",
    "//v2",
    "/v2/%2e%2e/metrics",
]


OPENAI = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
]
"""Paths of the OpenAI API, which tells errors in its own form."""


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_no_route_is_reached_without_a_key(method):
    behind = Behind()
    answers = ask(gate(behind, access=closed()), *((method, path) for path in [*PATHS, *OPENAI]))
    assert {each.status_code for each in answers} == {401}
    assert {each.headers["www-authenticate"] for each in answers} == {'Bearer realm="servax"'}
    assert behind.seen == []
    if method != "HEAD":
        told = [each.json() for each in answers]
        assert {each["details"]["type"] for each in told[: len(PATHS)]} == {"Unauthorized"}
        assert {each["error"]["code"] for each in told[len(PATHS) :]} == {"invalid_api_key"}


def test_every_route_of_the_application_is_among_those_tried():
    with toys.toy() as servable:
        (document,) = ask(gate(create_app(servable)), ("GET", "/openapi.json"))
    tried = {re.sub(r"toy", "{model}", path) for path in [*PATHS, *OPENAI]}
    described = {re.sub(r"toy|\{\w+\}", "{model}", path) for path in document.json()["paths"]}
    unversioned = {path for path in described if "/versions/" not in path and "/labels/" not in path}
    assert unversioned <= tried | {"/v2/repository/models/{model}/unload", "/v2/models/stats"}


def test_with_a_key_the_application_answers():
    behind = Behind()
    headers = {"authorization": f"Bearer {KEY}"}
    answers = ask(gate(behind, access=closed()), *(("GET", path, headers) for path in ("/", "/v2/models/toy")))
    assert [each.status_code for each in answers] == [200, 200]
    assert behind.seen == ["/", "/v2/models/toy"]


def test_probes_can_be_opened_and_are_told_no_more_than_they_ask():
    with toys.toy("secret") as servable:
        plane = DataPlane([servable])
        opened = gate(create_app(plane), plane=plane, access=closed(open_health=True))
        live, ready, other = ask(opened, *(("GET", f"/v2/health/{each}") for each in ("live", "ready", "nope")))
        assert (live.status_code, live.json()) == (200, {"live": True})
        assert (ready.status_code, ready.json().keys()) == (503, {"ready", "request_id"})
        assert other.status_code == 401
        assert [each.status_code for each in ask(opened, ("GET", "/health"), ("GET", "/v1/models"))] == [503, 401]
        servable.warm()
        assert [each.status_code for each in ask(opened, ("GET", "/health"), ("GET", "/v1/models"))] == [200, 401]
        ready, whole = ask(opened, ("GET", "/v2/health/ready"), ("GET", "/v2/health/ready", {"x-api-key": KEY}))
        assert (ready.status_code, ready.json()) == (200, {"ready": True})
        assert whole.json()["models"][0]["name"] == "secret"


def test_pages_of_no_other_origin_may_call_unless_they_are_named():
    preflight = {"origin": "http://a", "access-control-request-method": "POST"}
    (refused,) = ask(gate(create_app(DataPlane())), ("OPTIONS", "/v2/models/toy/infer", preflight))
    assert refused.status_code == 405
    assert "access-control-allow-origin" not in refused.headers


def test_pages_of_a_named_origin_may_call():
    opened = gate(access=closed(), origins=["http://a"])
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    mine, other, unkeyed, answered, foreign = ask(
        opened,
        ("OPTIONS", "/v2/models/toy/infer", {"origin": "http://a", **asked}),
        ("OPTIONS", "/v2/models/toy/infer", {"origin": "http://b", **asked}),
        ("POST", "/v2/models/toy/infer", {"origin": "http://a"}),
        ("POST", "/v2/models/toy/infer", {"origin": "http://a", "x-api-key": KEY}),
        ("POST", "/v2/models/toy/infer", {"origin": "http://b", "x-api-key": KEY}),
    )
    assert (mine.status_code, mine.headers["access-control-allow-origin"]) == (204, "http://a")
    assert "x-api-key" in mine.headers["access-control-allow-headers"]
    assert (other.status_code, other.headers.get("access-control-allow-origin")) == (403, None)
    assert (unkeyed.status_code, unkeyed.headers["access-control-allow-origin"]) == (401, "http://a")
    assert (answered.status_code, answered.headers["vary"]) == (200, "origin")
    assert "x-request-id" in answered.headers["access-control-expose-headers"]
    assert (foreign.status_code, foreign.headers.get("access-control-allow-origin")) == (200, None)


def test_or_of_every_origin():
    (answer,) = ask(gate(origins=["*"]), ("GET", "/", {"origin": "http://any"}))
    assert answer.headers["access-control-allow-origin"] == "*"


def log_of(access: Access | None, *requests) -> list[str]:
    stream = io.StringIO()
    log = AccessLog(stream)
    ask(gate(access=access, log=log), *requests)
    log.flush()
    return stream.getvalue().splitlines()


def test_each_request_has_a_line_and_no_key_is_in_it():
    keyed = {"x-api-key": KEY, "x-request-id": "r1"}
    wrong = {"authorization": "Bearer wrong-and-secret"}
    good, bad = log_of(closed(), ("POST", f"/v2/models/net/infer?key={KEY}", keyed), ("GET", "/", wrong))
    assert " id=r1 " in good
    assert ' key=api method=POST path="/v2/models/net/infer?key=***" model=net status=200 ' in good
    assert " method=GET path=/ status=401 " in bad
    assert KEY not in good
    assert "secret" not in bad


def test_probes_and_scrapes_have_none_unless_they_are_refused():
    paths = ("/v2/health/live", "/v2/health/ready", "/metrics", "/v2/models/net/ready")
    assert log_of(None, *(("GET", path) for path in paths)) == []
    assert len(log_of(closed(), *(("GET", path) for path in paths))) == 4


def test_a_client_that_goes_first_is_written_down_too():
    stream = io.StringIO()

    async def goes(scope, receive, send) -> None:
        return

    async def scene():
        log = AccessLog(stream)
        scope = {"type": "http", "path": "/a", "method": "GET", "query_string": b"", "headers": []}
        await gate(goes, log=log)(scope, None, None)
        log.flush()

    asyncio.run(scene())
    assert " status=gone " in stream.getvalue()


def test_responses_are_counted_by_status():
    responses: dict[int, int] = {}
    opened = gate(access=closed(), responses=responses)
    ask(opened, ("GET", "/"), ("GET", "/", {"x-api-key": KEY}), ("GET", "/", {"x-api-key": KEY}))
    assert responses == {401: 1, 200: 2}
