import time

import httpx2
import pytest

import text_toys as toys
from servax.core.errors import ExecutionError, NotReady
from servax.generation.entrance import EngineLimits
from servax.generation.template import ChatTemplate
from servax.protocols.dataplane import DataPlane
from servax.server.background import serve

CHAT = {"model": "rambler", "messages": [{"role": "user", "content": "go"}], "seed": 1}


@pytest.fixture
def alone():
    """A servable and a server of its own, for what breaks them."""
    template = ChatTemplate(toys.TEMPLATE, {})
    limits = EngineLimits(requests=5)
    with (
        toys.rambler().servable(
            name="rambler", tokenizer=toys.tokenizer(), template=template, limits=limits
        ) as servable,
        serve(servable, port=0) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
    ):
        yield servable, http


def error(answer):
    return answer.status_code, answer.json()["error"]


def test_models(http):
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    assert [each["id"] for each in body["data"]] == ["embedder", "rambler", "speller"]
    created = body["data"][0]["created"]
    assert body["data"][1] == {
        "id": "rambler",
        "object": "model",
        "created": created,
        "owned_by": "servax",
        "max_model_len": 96,
    }


def test_one_model_is_told_in_both_apis_words(http):
    body = http.get("/v1/models/speller").json()
    assert (body["id"], body["object"], body["owned_by"]) == ("speller", "model", "servax")
    assert body["model_version_status"][0]["state"] == "AVAILABLE"
    assert set(http.get("/v1/models/toy").json()) == {"model_version_status"}


def test_tokenize_and_back(http):
    body = http.post("/tokenize", json={"model": "speller", "prompt": "é<end>", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [0xC3, 0xA9, toys.END],
        "token_strs": ["�", "�", "<end>"],
    }
    body = http.post("/detokenize", json={"model": "speller", "tokens": [0xC3, 0xA9]}).json()
    assert body == {"prompt": "é"}


def test_tokenize_a_conversation(http):
    messages = [{"role": "user", "content": "a"}]
    body = http.post("/tokenize", json={"model": "speller", "messages": messages}).json()
    assert body["tokens"] == [toys.USER, ord("a"), toys.END, toys.ASSISTANT]
    given = {"model": "speller", "messages": messages, "add_generation_prompt": False}
    assert http.post("/tokenize", json=given).json()["tokens"] == [toys.USER, ord("a"), toys.END]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "speller"}, "prompt"),
        ("/detokenize", {"model": "speller", "tokens": [270]}, "tokens"),
        ("/detokenize", {"model": "speller"}, "tokens"),
        ("/v1/chat/completions", {"messages": []}, "model"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, path, body, param):
    status, told = error(http.post(path, json=body))
    assert (status, told["param"], told["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request(http, body):
    status, told = error(http.post("/v1/completions", content=body))
    assert (status, told["code"]) == (400, None)


def test_an_unknown_model(http):
    status, told = error(http.post("/v1/completions", json={"model": "nobody", "prompt": "a"}))
    assert (status, told["code"], told["param"]) == (404, "model_not_found", "model")
    assert "rambler" in told["message"]


def test_another_method(http):
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_request_id_is_given_back(http):
    answer = http.post("/v1/completions", json={"model": "nobody"}, headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def test_health(alone, monkeypatch):
    servable, http = alone
    answer = http.get("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    with monkeypatch.context() as patch:  # an engine that has work and ends no step
        patch.setattr(type(servable.engine), "busy", property(lambda self: True))
        patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 100)
        assert http.get("/health").status_code == 503


def test_keys(rambler, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-characters-and-more\n")
    with serve(rambler, port=0, api_key_file=keys) as server, httpx2.Client(base_url=server.url) as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
            status, told = error(http.post(path, json=CHAT))
            assert (status, told["code"]) == (401, "invalid_api_key")
        assert error(http.get("/v1/models"))[0] == 401
        assert http.get("/health").status_code == 401
        headers = {"authorization": "Bearer a-key-of-sixteen-characters-and-more"}
        assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}, headers=headers).status_code == 200


def test_an_error_in_the_middle_is_an_event(alone):
    servable, http = alone
    real, calls = servable.engine._read, []

    def fails_later(burst):
        calls.append(burst)
        if len(calls) > 1:
            raise ExecutionError("the device failed")
        return real(burst)

    servable.engine._read = fails_later
    answer = http.post("/v1/chat/completions", json=CHAT | {"stream": True, "ignore_eos": True})
    assert answer.status_code == 200
    *_, last = toys.frames(answer.text)
    assert last["error"]["type"] == "server_error"
    assert "the device failed" in last["error"]["message"]
    servable.engine._read = real
    assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200, "it goes on"


def test_a_version_that_drains_before_it_has_accepted_is_replaced(alone, monkeypatch):
    """By the one that is served by then: no request fails by a swap."""
    former, _ = alone
    plane = DataPlane([former])
    template = ChatTemplate(toys.TEMPLATE, {})
    fresh = toys.speller().servable(name="rambler", tokenizer=toys.tokenizer(), template=template, version="2")

    async def drains(*arguments, **options):
        plane.add(fresh)
        raise NotReady("draining")
        yield

    monkeypatch.setattr(former, "stream", drains)
    with fresh, serve(plane, port=0) as server:
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=CHAT | {"temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"] == "Hi 😀!"


def test_what_a_model_has_not_is_said():
    bare = toys.rambler().servable(name="bare")
    untemplated = toys.rambler().servable(name="untemplated", tokenizer=toys.tokenizer())
    with bare, untemplated, serve([bare, untemplated], port=0) as server, httpx2.Client(base_url=server.url) as http:
        for path, body in (
            ("/v1/chat/completions", CHAT | {"model": "untemplated"}),
            ("/v1/completions", {"model": "bare", "prompt": "text"}),
            ("/v1/completions", {"model": "bare", "prompt": [1], "guided_regex": "a"}),
            ("/tokenize", {"model": "bare", "prompt": "text"}),
            ("/tokenize", {"model": "untemplated", "messages": CHAT["messages"]}),
        ):
            assert error(http.post(path, json=body))[0] == 400
        answer = http.post("/v1/completions", json={"model": "bare", "prompt": [1, 2], "max_tokens": 2, "logprobs": 1})
        assert answer.json()["choices"][0]["text"] == "", "ids in, and their log probabilities out"


def test_tools_of_a_model_whose_template_takes_them():
    template = ChatTemplate("{% for tool in tools %}<system>{{ tool.function.name }}<end>{% endfor %}<assistant>", {})
    servable = toys.speller().servable(tokenizer=toys.tokenizer(), template=template)
    ask = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 1}
    tools = [{"type": "function", "function": {"name": "abc"}}]
    with servable, serve(servable, port=0) as server, httpx2.Client(base_url=server.url) as http:

        def counted(**extra):
            return http.post("/v1/chat/completions", json=ask | extra)

        assert counted(tools=tools).json()["usage"]["prompt_tokens"] == 6
        assert counted(tools=tools, tool_choice="none").json()["usage"]["prompt_tokens"] == 1
        assert error(counted(tools=tools, tool_choice="required"))[1]["param"] == "tool_choice"


def test_too_many_wait(alone):
    """Twelve answers for four slots and five places in the queue."""
    _, http = alone
    answer = http.post("/v1/chat/completions", json=CHAT | {"n": 12, "stream": True})
    status, told = error(answer)
    assert (status, told["type"], told["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("n", [1, 4])
def test_a_client_that_goes_away_ends_its_answers(alone, n):
    servable, http = alone
    ask = CHAT | {"stream": True, "n": n, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=ask) as answer:
        assert answer.status_code == 200
        next(answer.iter_bytes())
    deadline = time.monotonic() + 30
    while servable.in_flight or servable.engine.busy:  # nothing tells when a client is missed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert servable.engine.status.running == 0


def test_the_path_below_a_mount(rambler):
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    from servax.server.app import create_app

    service = Starlette()
    service.mount("/llm/v1", create_app(rambler))
    with TestClient(service) as http:
        assert http.get("/llm/v1/models").json()["data"][0]["id"] == "rambler"
