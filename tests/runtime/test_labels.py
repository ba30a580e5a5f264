import pytest

from servax.core.errors import UsageError
from servax.runtime.labels import Split, draw, parse_labels


def test_a_split_is_read_from_a_line():
    assert Split.parse("stable=0.9, canary=0.1").weights == {"stable": 0.9, "canary": 0.1}


@pytest.mark.parametrize("text", ["", "stable", "stable=", "=1", "a=x", "a=1,a=2"])
def test_a_split_that_cannot_be_read_is_shown(text):
    with pytest.raises(UsageError, match="a split cannot be read"):
        Split.parse(text)


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 3.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_weights_are_numbers_of_which_one_is_above_zero(weights):
    with pytest.raises(UsageError, match="weights cannot be used"):
        Split(weights)


def test_points_fall_on_shares_by_their_ratio():
    """By hand: 3 to 1 of the unit interval is cut at 0.75."""
    shares = [(3.0, "a"), (0.0, "never"), (1.0, "b")]
    assert [draw(point, shares) for point in (0.0, 0.7499, 0.75, 0.9999)] == ["a", "a", "b", "b"]
    assert draw(0.5, []) is None


def test_labels_are_read_from_lines():
    assert parse_labels(["stable=3", "canary=04"]) == {"stable": "3", "canary": "4"}


@pytest.mark.parametrize("texts", [["3=4"], ["stable=new"], ["stable=1", "stable=2"], ["stable"]])
def test_labels_that_cannot_be_read_are_shown(texts):
    with pytest.raises(UsageError, match="a label cannot be read"):
        parse_labels(texts)
