import pytest

from servax.core.errors import UsageError
from servax.runtime.policy import Policy, Rules


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("latest", (10,)),
        ("latest:1", (10,)),
        ("latest:2", (10, 9)),
        ("latest:99", (10, 9, 2)),
        ("all", (10, 9, 2)),
        ("specific:2,10,7", (10, 2)),
    ],
)
def test_policies_choose_versions_by_number_the_newest_first(text, chosen):
    assert Policy.parse(text).choose([2, 10, 9]) == chosen


@pytest.mark.parametrize(
    "text", ["", "newest", "latest:0", "latest:-1", "latest:x", "latest:1,2", "all:1", "specific", "specific:"]
)
def test_a_policy_that_cannot_be_read_is_shown(text):
    with pytest.raises(UsageError) as caught:
        Policy.parse(text)
    assert caught.value.seen == text


@pytest.mark.parametrize("text", ["latest:3", "all", "specific:1,2"])
def test_a_policy_shows_itself_as_it_is_written(text):
    assert str(Policy.parse(text)) == text


def test_labelled_versions_are_served_besides():
    rules = Rules(labels={"stable": "3", "canary": "latest", "old": "1"})
    assert rules.wanted([3, 4, 5]) == (5, 3)
    assert rules.labels_of([3, 5]) == {"stable": "3", "canary": "5"}
    assert rules.labels_of([]) == {}
