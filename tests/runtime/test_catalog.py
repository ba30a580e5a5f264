import math
import random

import pytest

import serving_toys as toys
from servax.core.errors import InvalidInput, NotFound, NotReady
from servax.runtime.catalog import Catalog, ModelStatus, ServedModel
from servax.runtime.labels import Split
from servax.runtime.servable import State


class Version:
    """What the catalog asks of a servable."""

    def __init__(self, version, state=State.READY, reason=None):
        self.name, self.version, self.state, self.reason, self.progress = "net", version, state, reason, None


def catalog_of(*versions, chance=random.random, **changes) -> Catalog:
    catalog = Catalog(chance)
    catalog.put(ServedModel("net", {each.version: each for each in versions}, **changes))
    return catalog


def test_the_newest_ready_version_is_meant_when_none_is_named():
    catalog = catalog_of(Version("10", State.FAILED), Version("9"), Version("2"))
    assert catalog.resolve("net").version == "9"
    assert catalog.resolve("net", "10").version == "10"


def test_the_newest_version_is_told_of_where_none_is_ready():
    assert catalog_of(Version("2", State.WARMING), Version("1", State.FAILED)).resolve("net").version == "2"


def test_labels_name_loaded_versions_only():
    catalog = catalog_of(Version("1"), Version("2"), labels={"stable": "1", "canary": "3"})
    assert catalog.resolve("net", label="stable").version == "1"
    with pytest.raises(NotFound) as caught:
        catalog.resolve("net", label="canary")
    assert (caught.value.what, caught.value.expected) == ("model 'net' has no label 'canary'", "stable")
    with pytest.raises(InvalidInput, match="not both"):
        catalog.resolve("net", "1", "stable")


def test_shares_are_within_four_standard_deviations_of_the_binomial():
    catalog = catalog_of(
        Version("1"), Version("2"), labels={"stable": "1"}, split=Split({"stable": 0.9, "2": 0.1}),
        chance=random.Random(7).random,
    )  # fmt: skip
    n, p = 10_000, 0.1
    drawn = sum(catalog.resolve("net").version == "2" for _ in range(n))
    assert abs(drawn - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_the_share_of_a_version_that_does_not_serve_goes_to_the_others():
    split = Split({"canary": 0.5, "1": 0.25, "2": 0.25})
    catalog = catalog_of(
        Version("1"), Version("2"), Version("3", State.FAILED), labels={"canary": "3"}, split=split,
        chance=random.Random(7).random,
    )  # fmt: skip
    drawn = [catalog.resolve("net").version for _ in range(2000)]
    assert set(drawn) == {"1", "2"}
    assert abs(drawn.count("1") - 1000) < 4 * math.sqrt(2000 / 4)


def test_what_describes_a_model_does_not_draw():
    catalog = catalog_of(Version("1"), Version("2"), split=Split({"1": 1.0}))
    assert catalog.resolve("net").version == "1"
    assert catalog.resolve("net", drawing=False).version == "2"


def test_versions_that_are_not_loaded_are_known_with_their_reason():
    failed = ModelStatus("net", "3", State.FAILED, "a file is damaged")
    catalog = catalog_of(Version("1"), labels={"stable": "1"}, absent={"3": failed})
    with pytest.raises(NotReady) as caught:
        catalog.resolve("net", "3")
    assert caught.value.seen == "FAILED: a file is damaged"
    with pytest.raises(NotFound) as caught:
        catalog.resolve("net", "4")
    assert caught.value.expected == "1"
    model = catalog.model("net")
    assert [(each.version, each.state, each.labels) for each in model.statuses] == [
        ("1", State.READY, ("stable",)),
        ("3", State.FAILED, ()),
    ]


def test_a_model_without_a_loaded_version_says_why():
    catalog = Catalog()
    catalog.put(ServedModel("net", absent={"1": ModelStatus("net", "1", State.FAILED, "damaged")}))
    with pytest.raises(NotReady) as caught:
        catalog.resolve("net")
    assert caught.value.seen == "FAILED: damaged"
    catalog.put(ServedModel("empty"))
    with pytest.raises(NotFound, match="'empty' has no version"):
        catalog.resolve("empty")
    with pytest.raises(NotFound) as caught:
        catalog.resolve("other")
    assert caught.value.expected == "empty or net"


def test_servables_are_added_and_models_removed():
    with toys.toy("a").warm() as first, toys.toy("a", version="2") as second:
        catalog = Catalog()
        catalog.add(second)
        catalog.add(first)
        assert list(catalog.model("a").versions) == ["1", "2"]
        assert catalog.resolve("a") is first
        catalog.remove("a")
        assert "a" not in catalog
        assert len(catalog) == 0
