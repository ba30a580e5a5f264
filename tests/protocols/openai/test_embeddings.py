import base64
import struct

import pytest

ROWS = [[3.0, 2.0, 0.5], [7.0, 1.0, 0.5]]


def post(http, **extra):
    return http.post("/v1/embeddings", json={"model": "embedder"} | extra)


@pytest.mark.parametrize("given", [["one two", "seven"], [[1, 2], [7]]])
def test_texts_and_token_ids(http, given):
    assert post(http, input=given).json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(ROWS)],
        "model": "embedder",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize("given", ["seven", [7]])
def test_one_text_and_its_ids(http, given):
    assert [each["embedding"] for each in post(http, input=given).json()["data"]] == [ROWS[1]]


def test_base64_is_little_endian_float32(http):
    (told,) = post(http, input="seven", encoding_format="base64").json()["data"]
    assert struct.unpack("<3f", base64.b64decode(told["embedding"])) == (7.0, 1.0, 0.5)


def test_more_inputs_than_a_batch(http):
    body = post(http, input=["one"] * 11 + ["seven"]).json()
    assert [each["embedding"][0] for each in body["data"]] == [1.0] * 11 + [7.0]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["one"] * 2049}, "input"),
        ({"input": "one", "dimensions": 2}, "dimensions"),
        ({"input": "one", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "one", "model": "rambler"}, "model"),
        ({"input": "one", "model": "toy"}, "model"),
        ({}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, extra, param):
    answer = post(http, **extra)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_more_tokens_than_the_model_takes(http):
    answer = post(http, input=[[1] * 17])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_dimensions_that_are_the_models_own(http):
    assert post(http, input="one", dimensions=3).status_code == 200
