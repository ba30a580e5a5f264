"""Exact answers, written by hand from the OpenAI API's reference; `speller` says what `text_toys.SPELLED` says."""

import pytest

import text_toys as toys

ASK = {"model": "speller", "messages": [{"role": "user", "content": "spell"}], "temperature": 0}
PROMPT = 8  # <user> s p e l l <end> <assistant>
ANSWER = 9  # H i space, four bytes of the emoji, !, <end>


def head(answer, kind):
    """What every message begins with; the rest is given back."""
    answer = dict(answer)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert (answer.pop("object"), answer.pop("model")) == (kind, "speller")
    return answer


def usage(prompt, answer, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def shown(byte, logprob):
    """A token of one byte: a byte of a longer character shows as replacement character."""
    return {
        "token": bytes([byte]).decode("utf-8", "replace"),
        "logprob": pytest.approx(logprob, abs=1e-5),
        "bytes": [byte],
    }


def test_a_whole_answer(http):
    answer = http.post("/v1/chat/completions", json=ASK)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = head(answer.json(), "chat.completion")
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}  # whatever ran before
    assert body == {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi 😀!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage(PROMPT, ANSWER, 0),
    }


def test_a_streamed_answer(http):
    answer = http.post("/v1/chat/completions", json=ASK | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    first, *middle, last = [head(each, "chat.completion.chunk") for each in toys.frames(answer.text)]
    assert first == {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    }
    assert last == {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]}
    texts = []
    for event in middle:
        texts.append(event["choices"][0]["delta"]["content"])
        assert event == {
            "choices": [{"index": 0, "delta": {"content": texts[-1]}, "logprobs": None, "finish_reason": None}]
        }
    assert "".join(texts) == "Hi 😀!"
    assert all(texts)
    assert len({each["id"] for each in toys.frames(answer.text)}) == 1


def test_usage_comes_last_and_alone(http):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = toys.frames(http.post("/v1/chat/completions", json=ASK | options).text)
    assert all(each["usage"] is None for each in events[:-1])
    last = head(events[-1], "chat.completion.chunk")
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (PROMPT, ANSWER)


def test_usage_in_every_event(http):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = toys.frames(http.post("/v1/chat/completions", json=ASK | options).text)
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts)
    assert counts[-1] == ANSWER
    assert all(each["usage"]["total_tokens"] == PROMPT + each["usage"]["completion_tokens"] for each in events)


def test_logprobs(http):
    body = http.post("/v1/chat/completions", json=ASK | {"logprobs": True, "top_logprobs": 2}).json()
    told = body["choices"][0]["logprobs"]
    # The likeliest other is the first of the vocabulary, byte 0: all others are equally unlikely.
    assert told == {
        "content": [
            {
                **shown(byte, toys.LOGPROB),
                "top_logprobs": [shown(byte, toys.LOGPROB), shown(0, toys.OTHER)],
            }
            for byte in toys.SPELLED.encode()
        ],
        "refusal": None,
    }


def test_logprobs_in_a_stream_are_those_of_the_whole(http):
    ask = ASK | {"logprobs": True, "top_logprobs": 20}
    whole = http.post("/v1/chat/completions", json=ask).json()["choices"][0]["logprobs"]["content"]
    assert all(len(each["top_logprobs"]) == 20 for each in whole)
    events = toys.frames(http.post("/v1/chat/completions", json=ask | {"stream": True}).text)
    told = [each["choices"][0]["logprobs"] for each in events]
    assert [token for each in told if each is not None for token in each["content"]] == whole


def test_a_stop_string_across_tokens_leaks_into_nothing(http):
    ask = ASK | {"stop": ["i 😀"], "logprobs": True}
    body = http.post("/v1/chat/completions", json=ask).json()
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "stop")
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["H"]
    assert body["usage"]["completion_tokens"] == 7, "up to the emoji's last byte"
    events = toys.frames(http.post("/v1/chat/completions", json=ask | {"stream": True}).text)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in events) == "H"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["!", ["!"], ["x", "!"]])
def test_stop_as_text_and_list(http, stop):
    choice = http.post("/v1/chat/completions", json=ASK | {"stop": stop}).json()["choices"][0]
    assert choice["message"]["content"] == "Hi 😀"


def test_what_means_nothing_is_ignored(http):
    ask = ASK | {"stop": None, "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "new": [1]}
    assert http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]["content"] == "Hi 😀!"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_one_token(http, field):
    body = http.post("/v1/chat/completions", json=ASK | {field: 1}).json()
    choice = body["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "length")
    assert body["usage"]["completion_tokens"] == 1


def test_parts_of_text_and_the_roles_newer_name(http):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts}]
    body = http.post("/v1/chat/completions", json=ASK | {"messages": messages}).json()
    # <system> c <end> <user> a newline b <end> <assistant>
    assert body["usage"]["prompt_tokens"] == 9


def test_several_answers(http):
    ask = ASK | {"model": "rambler", "n": 4, "temperature": 1, "seed": 5, "max_tokens": 12}
    body = http.post("/v1/chat/completions", json=ask).json()
    assert [each["index"] for each in body["choices"]] == [0, 1, 2, 3]
    texts = [each["message"]["content"] for each in body["choices"]]
    assert len(set(texts)) == 4
    assert body["usage"]["prompt_tokens"] == PROMPT, "a prompt counts once"
    for number, text in enumerate(texts):  # the same text, whatever else is in the batch
        alone = http.post("/v1/chat/completions", json=ask | {"n": 1, "seed": 5 + number}).json()
        assert alone["choices"][0]["message"]["content"] == text
    events = toys.frames(http.post("/v1/chat/completions", json=ask | {"stream": True}).text)
    streamed = [""] * 4
    for event in events:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, extra, param):
    answer = http.post("/v1/chat/completions", json=ASK | extra)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert error["message"]
