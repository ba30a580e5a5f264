import time

import pytest

from servax.core.errors import InvalidInput
from servax.protocols.open_inference.grpc import schema
from servax.protocols.open_inference.parameters import Choices, choices_of, read_choices


def parameters(**values):
    return schema()["inference.ModelInferRequest"](parameters=values).parameters


def test_nothing_is_said():
    assert read_choices(parameters(), 7.0) == Choices(None, 0, 7.0)
    assert choices_of({}, None, 3) == Choices(None, 3, None)


def test_a_message_and_json_say_the_same():
    message = parameters(
        function={"string_param": "embed"}, priority={"uint64_param": 2}, sequence={"string_param": "unknown"}
    )
    plain = {"function": "embed", "priority": 2, "sequence": "unknown"}
    assert read_choices(message, None) == choices_of(plain, None, 5) == Choices("embed", 2, None)


def test_of_two_deadlines_the_earlier_counts():
    now = time.monotonic()
    early = read_choices(parameters(timeout={"int64_param": 1_000_000}), now + 100).deadline
    assert early is not None
    assert now < early < now + 100
    assert choices_of({"timeout": 10**12}, now + 1).deadline == now + 1


@pytest.mark.parametrize(
    ("values", "where", "seen"),
    [
        ({"function": {"int64_param": 3}}, "parameters.function", "a int"),
        ({"function": {}}, "parameters.function", "nothing"),
        ({"priority": {"string_param": "high"}}, "parameters.priority", "a str"),
        ({"priority": {"bool_param": True}}, "parameters.priority", "a bool"),
        ({"timeout": {"double_param": 0.5}}, "parameters.timeout", "a float"),
        ({"timeout": {"int64_param": -1}}, "parameters.timeout", "-1"),
    ],
)
def test_a_parameter_of_another_kind(values, where, seen):
    with pytest.raises(InvalidInput) as caught:
        read_choices(parameters(**values), None)
    assert (caught.value.where, caught.value.seen) == (where, seen)
