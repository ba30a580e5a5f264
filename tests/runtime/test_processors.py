import asyncio

import numpy as np
import pytest

import serving_toys as toys
from servax.core.errors import InvalidInput, StartupError
from servax.core.tensors import Signature, TensorSpec
from servax.model.processors import Text
from servax.runtime.processors import Processing
from servax.runtime.runner import ServedFunction


@pytest.fixture
def tokenizer(tmp_path):
    """A word-level tokenizer written by hand: each word is its own number."""
    return toys.word_tokenizer(tmp_path, {"[UNK]": 0, "hello": 1, "world": 2, "again": 3})


def function(tokenizer, max_length: int = 3) -> ServedFunction:
    return ServedFunction(
        Signature((TensorSpec("tokens", "int32", ("batch", "length")),)),
        processors={"tokens": Text(tokenizer, max_length)},
    )


def test_texts_become_ragged_rows_cut_to_the_longest_allowed(tokenizer):
    processing = Processing.of(function(tokenizer))
    rows = processing({"text": ["hello", "hello world again hello", "who"]})["tokens"]
    assert [row.tolist() for row in rows] == [[1], [1, 2, 3], [0]]
    assert {row.dtype.name for row in rows} == {"int32"}
    assert processing.texts == {"text": "tokens"}


def test_arrays_of_text_and_bytes_are_read(tokenizer):
    processing = Processing.of(function(tokenizer))
    for texts in (np.array(["world"]), np.array(["world"], object), [b"world"]):
        assert processing({"text": texts})["tokens"][0].tolist() == [2]


def test_requests_with_tokens_pass_untouched(tokenizer):
    tensors = {"tokens": [[1]]}
    processing = Processing.of(function(tokenizer))
    assert processing(tensors) is tensors
    assert not processing.needed(tensors)
    assert processing.needed({"text": []})


@pytest.mark.parametrize(
    ("tensors", "what", "seen"),
    [
        ({"text": "hello"}, "not a list of texts", "a single str"),
        ({"text": [["hello"]]}, "not a list of texts", "rank 2"),
        ({"text": ["hello", 3]}, "not a text", "int"),
        ({"text": [b"\xff"]}, "not UTF-8", "invalid start byte"),
        ({"text": ["hello"], "tokens": [[1]]}, "both sent", None),
        ({"text": ["\ud800"]}, "not Unicode", "U+D800 at character 0"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(tokenizer, tensors, what, seen):
    with pytest.raises(InvalidInput) as caught:
        Processing.of(function(tokenizer))(tensors)
    assert what in caught.value.what
    assert caught.value.where.startswith("text")
    assert seen is None or seen in caught.value.seen


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(StartupError) as caught:
        Processing.of(function(path))
    assert caught.value.where == str(path)
    assert "tokenizer.json" in caught.value.expected


def test_a_servable_takes_text_in_place_of_tokens(tokenizer):
    with toys.reading_toy(tokenizer) as servable:
        assert servable.texts == {"total": {"text": "x"}}
        assert servable.predict(text=["hello world", "again"])["sum"].tolist() == [3, 3]
        assert asyncio.run(servable.predict_async(text=["world"]))["sum"].tolist() == [2]
