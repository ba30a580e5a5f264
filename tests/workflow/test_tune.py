"""Tuning: a grid from recorded shapes, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servax.core.errors import UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket, BucketGrid, make_grid
from servax.workflow.traffic import Shape
from servax.workflow.tune import Subject, tune

SIGNATURE = Signature((TensorSpec.parse("x", "float32[batch, length]"),))
EMBED = Signature((TensorSpec.parse("x", "float32[batch]"),))


def buckets(*pairs: tuple[int, int]) -> tuple[Bucket, ...]:
    return tuple(Bucket.of(batch=batch, length=length) for batch, length in pairs)


PRESENT = buckets((1, 32), (8, 32))
SUBJECT = Subject("net", {"predict": SIGNATURE}, BucketGrid({"predict": PRESENT}))


def request(batch: int, length: int, count: int = 1, function: str = "predict", model: str = "net"):
    return Shape("request", model, function, (("batch", batch), ("length", length))), count


def run(rows: int, length: int, count: int = 1):
    return Shape("run", "net", "predict", (("batch", 1), ("length", length)), rows), count


def test_a_grid_by_hand_in_padded_elements() -> None:
    # 100 requests of (1, 5), 10 of (4, 20); (8, 32) must be served, as it is now.
    tuning = tune(SUBJECT, [request(1, 5, 100), request(4, 20, 10)], executables=3)
    tuned = tuning.functions["predict"]
    assert tuning.grid["predict"] == tuned.fitted.buckets == buckets((1, 5), (4, 20), (8, 32))
    assert tuned.fitted.cost == 100 * 5 + 10 * 80
    assert tuned.present.cost == 100 * 32 + 10 * 256
    assert tuned.powers.buckets == buckets((1, 8), (4, 32), (8, 32))
    assert tuned.powers.cost == 100 * 8 + 10 * 128
    assert tuned.observed == 110
    assert not tuning.measured


def test_as_many_executables_as_now_unless_told() -> None:
    tuning = tune(SUBJECT, [request(1, 5, 100), request(4, 20, 10)])
    assert tuning.limit == 2
    assert tuning.grid["predict"] == buckets((1, 5), (8, 32))


def test_the_largest_recorded_is_enough_when_told() -> None:
    tuning = tune(SUBJECT, [request(1, 5, 100), request(4, 20, 10)], shrink=True)
    assert tuning.grid["predict"] == buckets((1, 5), (4, 20))


def test_what_is_larger_than_the_present_grid_is_served_too() -> None:
    tuning = tune(SUBJECT, [request(1, 100)], executables=1)
    assert tuning.grid["predict"] == buckets((8, 100))
    assert tuning.functions["predict"].present.cost == float("inf")
    assert "does not hold all" in repr(tuning.table())


def test_runs_count_before_requests_and_by_their_rows() -> None:
    shapes = [request(1, 5, 60), run(6, 5, 10)]
    assert tune(SUBJECT, shapes).grid["predict"] == buckets((6, 5), (8, 32))
    assert tune(SUBJECT, shapes, by="request").grid["predict"] == buckets((1, 5), (8, 32))
    assert tune(SUBJECT, shapes).functions["predict"].observed == 10


def test_more_rows_than_the_largest_batch_run_in_parts() -> None:
    tuning = tune(SUBJECT, [request(19, 32, 10)], executables=2)  # 8 + 8 + 3 rows
    assert tuning.grid["predict"] == buckets((3, 32), (8, 32))
    assert tuning.functions["predict"].fitted.cost == 10 * (2 * 8 + 3) * 32


def test_measured_costs_decide() -> None:
    # Each run costs 1 s whatever its size, but for 1 ms a row: 3 rows may as well run in 4.
    present = tuple(Bucket.of(batch=size) for size in (1, 4, 16))
    costs = {("predict", bucket): 1 + 1e-3 * bucket["batch"] for bucket in present}
    subject = Subject("net", {"predict": EMBED}, BucketGrid({"predict": present}), costs)
    shapes = [
        (Shape("request", "net", "predict", (("batch", 3),)), 2),
        (Shape("request", "net", "predict", (("batch", 16),)), 3),
    ]
    tuning = tune(subject, shapes, executables=2)
    assert tuning.measured
    tuned = tuning.functions["predict"]
    assert tuned.fitted.cost == pytest.approx(2 * 1.003 + 3 * 1.016)
    assert tuned.present.cost == pytest.approx(2 * 1.004 + 3 * 1.016)
    assert tuned.model is not None
    assert tuned.model.text() == "1e+03 ms + 1 ms x batch"


def test_executables_are_shared_among_functions_and_the_unseen_keep_theirs() -> None:
    subject = Subject(
        "net",
        {"predict": SIGNATURE, "embed": EMBED, "other": EMBED},
        BucketGrid({"predict": PRESENT, "embed": (Bucket.of(batch=8),), "other": (Bucket.of(batch=2),)}),
    )
    embed = Shape("request", "net", "embed", (("batch", 1),))
    tuning = tune(subject, [request(1, 5, 100), (embed, 1)], executables=4)
    assert tuning.grid["predict"] == buckets((1, 5), (8, 32))
    assert tuning.grid["embed"] == (Bucket.of(batch=8),) or len(tuning.grid["embed"]) == 1
    assert tuning.grid["other"] == (Bucket.of(batch=2),)
    with pytest.raises(UsageError, match="leaves some functions without any"):
        tune(subject, [request(1, 5, 100), (embed, 1)], executables=2)


def test_shapes_of_others_are_left_out() -> None:
    shapes = [request(1, 5), request(1, 9, model="another"), request(1, 11, function="nothing")]
    assert tune(SUBJECT, shapes).functions["predict"].observed == 1
    assert tune(SUBJECT, [request(1, 5, model="served_under_a_name")]).functions["predict"].observed == 1
    with pytest.raises(UsageError, match="nothing was recorded"):
        tune(SUBJECT, [request(1, 5, function="nothing")])


def test_a_shape_without_a_dimension_is_named() -> None:
    with pytest.raises(UsageError, match="lacks a dimension") as caught:
        tune(SUBJECT, [(Shape("request", "", "predict", (("batch", 1),)), 1)])
    assert caught.value.where == "length"


def test_the_file_is_one_that_a_build_reads(tmp_path: Path) -> None:
    tuning = tune(SUBJECT, [request(1, 5, 100), request(4, 20, 10)], executables=3)
    tuning.write(tmp_path / "buckets.json")
    function = Function("predict", SIGNATURE, lambda params, state, inputs: (None, inputs))
    grid = make_grid({"predict": function}, bucket_file=tmp_path / "buckets.json")
    assert grid == tuning.grid


def test_the_table_shows_grids_and_savings() -> None:
    tuning = tune(SUBJECT, [request(1, 5, 100), request(4, 20, 10)], executables=3)
    shown = repr(tuning.table())
    assert "length=5: batch=1; length=20: batch=4; length=32: batch=8" in shown
    assert "1,300" in shown
    assert f"{1 - 1300 / 5760:.1%}" in shown
    assert json.loads(json.dumps(tuning.as_json()))["functions"]["predict"]["fitted"]["cost"] == 1300
