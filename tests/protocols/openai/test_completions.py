"""Exact answers, written by hand from the OpenAI API's reference; `speller` says what `text_toys.SPELLED` says."""

import math

import pytest

import text_toys as toys

ASK = {"model": "speller", "prompt": "say:", "temperature": 0}
ROW = [*b"say:"]


def post(http, **extra):
    answer = http.post("/v1/completions", json=ASK | extra)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_whole_answer(http):
    body = post(http)
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    body["usage"].pop("prompt_tokens_details")
    assert body == {
        "object": "text_completion",
        "model": "speller",
        "choices": [{"text": "Hi 😀!", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13},
    }


def test_a_streamed_answer(http):
    events = toys.frames(http.post("/v1/completions", json=ASK | {"stream": True}).text)
    assert {each["object"] for each in events} == {"text_completion"}
    choices = [choice for each in events for choice in each["choices"]]
    assert "".join(each["text"] for each in choices) == "Hi 😀!"
    assert [each["finish_reason"] for each in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "stop"
    assert set(choices[0]) == {"text", "index", "logprobs", "finish_reason"}


@pytest.mark.parametrize("prompt", [ROW, "say:"])
def test_a_prompt_as_text_and_as_ids(http, prompt):
    assert post(http, prompt=prompt)["choices"][0]["text"] == "Hi 😀!"


@pytest.mark.parametrize("prompt", [["say:", "a:"], [ROW, [*b"a:"]]])
def test_several_prompts_of_several_answers(http, prompt):
    body = post(http, prompt=prompt, n=2)
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(index, "Hi 😀!") for index in range(4)]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 36)


def test_logprobs(http):
    told = post(http, logprobs=1, max_tokens=2)["choices"][0]["logprobs"]
    assert told == {
        "text_offset": [0, 1],
        "token_logprobs": [pytest.approx(toys.LOGPROB, abs=1e-5)] * 2,
        "tokens": ["H", "i"],
        "top_logprobs": [{each: pytest.approx(toys.LOGPROB, abs=1e-5)} for each in "Hi"],
    }


def test_logprobs_of_the_token_alone(http):
    told = post(http, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{"H": pytest.approx(toys.LOGPROB, abs=1e-5)}]


def test_twenty_logprobs(http):
    (top,) = post(http, logprobs=20, max_tokens=1)["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == 20
    assert top.pop("H") == pytest.approx(toys.LOGPROB, abs=1e-5)
    assert all(each == pytest.approx(toys.OTHER, abs=1e-5) for each in top.values())


def test_a_completion_has_sixteen_tokens_unless_it_says_more(http):
    body = post(http, model="rambler", ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_the_cache_is_told(http):
    ids = [200 + index % 40 for index in range(60)]
    post(http, model="rambler", prompt=ids, max_tokens=1)
    details = post(http, model="rambler", prompt=ids, max_tokens=1)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 59}, "all but the last, which the answer begins with"


@pytest.mark.parametrize("temperature", [0, 1e-6])
def test_hardly_any_temperature_is_none(http, temperature):
    assert post(http, temperature=temperature)["choices"][0]["text"] == "Hi 😀!"


def test_a_bias_that_leaves_one_token(http):
    bias = {str(token): -100 for token in range(toys.VOCABULARY) if token != ord("z")}
    assert post(http, logit_bias=bias, max_tokens=3, temperature=1)["choices"][0]["text"] == "zzz"


def test_minus_infinity_for_all_but_one(rambler):
    bias = {token: -math.inf for token in range(toys.VOCABULARY) if token != ord("z")}
    answer = rambler.generate("say:", logit_bias=bias, max_tokens=4, temperature=1, logprobs=20)
    assert answer.text == "zzzz"


def test_vllms_sampling_fields(http):
    body = post(
        http,
        model="rambler",
        temperature=1,
        seed=1,
        top_k=1,
        min_p=0.1,
        repetition_penalty=1.0,
        min_tokens=5,
        ignore_eos=True,
        stop_token_ids=[toys.USER],
        priority=-3,
        max_tokens=8,
    )
    greedy = post(http, model="rambler", min_tokens=5, ignore_eos=True, stop_token_ids=[toys.USER], max_tokens=8)
    assert body["choices"] == greedy["choices"], "the likeliest alone is left"


def test_a_stop_id_ends_the_answer(http):
    body = post(http, stop_token_ids=[ord(" ")])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


def test_a_prompt_at_the_limit_and_one_over(http):
    context = 64
    ids = [ord("x")] * (context - 2) + [ord(":")]
    body = post(http, prompt=ids, max_tokens=1)
    assert (body["choices"][0]["text"], body["usage"]["total_tokens"]) == ("H", context)
    answer = http.post("/v1/completions", json=ASK | {"prompt": [ord("x"), *ids], "max_tokens": 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "prompt",
        "context_length_exceeded",
    )
    assert "maximum context length is 64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, extra, param):
    answer = http.post("/v1/completions", json=ASK | extra)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("extra", [{"best_of": 1}, {"echo": False}, {"suffix": None}])
def test_what_means_nothing_is_taken(http, extra):
    assert post(http, **extra)["choices"][0]["text"] == "Hi 😀!"


@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_a_regular_expression(http, field):
    given = "(yes|no), [0-9]{3}"
    extra = {field: given if field == "guided_regex" else {"regex": given}}
    text = post(http, model="rambler", temperature=1, max_tokens=40, **extra)["choices"][0]["text"]
    assert text[:2] in ("ye", "no")
    assert text.partition(", ")[2].isdigit()


def test_a_regular_expression_that_cannot_be_met(http):
    answer = http.post("/v1/completions", json=ASK | {"guided_regex": r"[^\s\S]"})
    assert answer.status_code == 400
    assert "no text meets" in answer.json()["error"]["message"]


def test_a_choice(http):
    text = post(http, model="rambler", temperature=1, guided_choice=["left", "right"])["choices"][0]["text"]
    assert text in ("left", "right")


def test_two_grammars_are_one_too_many(http):
    answer = http.post("/v1/completions", json=ASK | {"guided_regex": "a", "guided_choice": ["a"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_choice")
