"""Errors: their parts, their texts, their codes."""

from __future__ import annotations

import inspect

import pytest

from servax.core import errors
from servax.core.errors import ServaxError

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, ServaxError)]


def test_all_parts_are_shown_and_kept():
    error = ServaxError("it broke.", where="here", seen="this", expected="that", remedy="Do so.")
    assert str(error) == ("it broke.\n  where:    here\n  seen:     this\n  expected: that\n  remedy:   Do so.")
    assert error.sentence() == "it broke; at here; seen this; expected that. Do so."
    assert (error.what, error.where, error.seen, error.expected, error.remedy) == (
        "it broke.",
        "here",
        "this",
        "that",
        "Do so.",
    )


def test_absent_parts_are_left_out():
    assert str(ServaxError("it broke")) == "it broke"
    assert ServaxError("it broke").sentence() == "it broke."


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_stands_in_the_tree_of_the_module(kind: type[ServaxError]):
    assert kind.__name__ in (errors.__doc__ or "")
    assert isinstance(kind("x"), ServaxError)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.StartupError, 3),
        (errors.ArtifactUnavailable, 3),
        (errors.PlatformError, 3),
        (errors.MemoryShortage, 3),
        (errors.BuildError, 1),
        (errors.ParityError, 1),
        (errors.RequestError, 1),
    ],
)
def test_exit_codes(kind: type[ServaxError], code: int):
    assert kind.exit_code == code


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidInput, 400),
        (errors.NotFound, 404),
        (errors.TooLarge, 413),
        (errors.NotReady, 503),
        (errors.Overloaded, 429),
        (errors.DeadlineExceeded, 504),
        (errors.ExecutionError, 500),
        (errors.RecompileError, 500),
    ],
)
def test_http_statuses(kind, status: int):
    assert kind.status == status
