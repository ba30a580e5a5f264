import math

import msgspec
import pytest

from servax.core import errors
from servax.core.tensors import Signature, TensorSpec
from servax.protocols.http import status_of
from servax.protocols.open_inference import answers, messages

EVERY = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.ServaxError) and each is not errors.ServaxError
]


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_comes_back_as_it_left(kind):
    sent = kind("it broke", where="x", seen="1", expected="2", remedy="mend it")
    back = messages.read_error(status_of(sent), messages.write_error(sent))
    assert type(back) is kind
    assert str(back) == str(sent)


def test_the_error_is_one_sentence_under_the_specification_s_key():
    message = messages.write_error(errors.InvalidInput("tensor 'x' is wrong", where="x", seen="1", remedy="Mend it."))
    assert message["error"] == "tensor 'x' is wrong; at x; seen 1. Mend it."
    assert message["details"] == {
        "type": "InvalidInput",
        "what": "tensor 'x' is wrong",
        "where": "x",
        "seen": "1",
        "remedy": "Mend it.",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidInput),
        (404, errors.NotFound),
        (413, errors.TooLarge),
        (422, errors.InvalidInput),
        (500, errors.ExecutionError),
        (503, errors.NotReady),
        (504, errors.DeadlineExceeded),
    ],
)
def test_errors_of_other_servers_are_known_by_their_status(status, kind):
    for message in ({"error": "no"}, "no", {"error": "no", "details": {"type": "os"}}, [1], None, {"details": []}):
        assert type(messages.read_error(status, message)) is kind


def test_statuses_are_those_of_the_errors():
    assert status_of(errors.TooLarge("x")) == 413
    assert status_of(errors.Overloaded("x")) == 429
    assert status_of(errors.BundleError("x")) == 500


@pytest.mark.parametrize(
    ("body", "what", "where"),
    [
        (b"", "not JSON", None),
        (b"{", "not JSON", None),
        (b"\xff", "not JSON", None),
        (b"[]", "not an inference request", None),
        (b"{}", "not an inference request", None),
        (b'{"inputs": [{"name": "x"}]}', "not an inference request", "$.inputs[0]"),
        (
            b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": ["1"]}]}',
            "not an inference request",
            "$.inputs[0].shape[0]",
        ),
        (b'{"inputs": [], "id": 7}', "not an inference request", "$.id"),
    ],
)
def test_bodies_that_are_no_requests_are_refused_with_the_place(body, what, where):
    with pytest.raises(errors.InvalidInput) as caught:
        messages.read_body(body)
    assert what in caught.value.what
    assert caught.value.where == where


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": ' + DEEP + b"}]}",
        b'{"inputs": [], "parameters": {"function": ' + DEEP + b"}}",
        b'{"inputs": [], "other": ' + DEEP + b"}",
    ],
)
def test_bodies_nested_without_end_are_refused(body):
    with pytest.raises(errors.InvalidInput, match="nested too deeply") as caught:
        messages.read_body(body)
    assert None not in (caught.value.where, caught.value.seen, caught.value.expected)


def test_no_part_of_an_error_is_longer_than_a_log_can_take():
    message = messages.write_error(errors.NotFound("w" * 10_000, where="x" * 10_000, expected="y"))
    assert len(message["error"]) < 5000
    assert message["details"]["where"] == "x" * 1997 + "..."


def test_unknown_keys_are_passed_over():
    body = messages.read_body(b'{"inputs": [], "priority": 1, "parameters": {"function": "f", "sequence_id": 3}}')
    assert body.parameters["function"] == "f"


def test_signatures_come_back_whole():
    signature = Signature(
        (
            TensorSpec("n", "int32", ("batch",)),
            TensorSpec("x", "float32", ("batch", "length", 3), 7, 1.5),
            TensorSpec("z", "float32", ("batch",), -math.inf, math.inf),
        ),
        (TensorSpec("y", "float32", ("batch", "2*length+1")),),
        lengths={"n": "length"},
    )
    written = msgspec.json.encode(messages.write_signature(signature, {"text": "x"}))
    back, texts = answers.read_signature(answers.read(answers.Function, written, "http://host"))
    assert back == signature
    assert texts == {"text": "x"}
