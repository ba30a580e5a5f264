"""The sweep of bucket sizes: what is kept, by hand; what is measured, of a real model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import servax
from servax.bench.sweep import Measured, Sweep, inputs_of, knee, measure, only
from servax.core.errors import UsageError
from servax.stages.buckets import Bucket


def at(seconds: float, **sizes: int) -> Measured:
    return Measured(
        sizes, Bucket.of(**sizes).label, sizes.get("batch", 1), 10, seconds, seconds, seconds, 1.0, None, None
    )


def test_a_larger_batch_is_kept_only_if_it_gains() -> None:
    # rows/s: 1000, 1800, 1900 (6 % more than 1800), 2400 (33 % more), 2400
    measured = [at(1e-3, batch=1), at(2 / 1800, batch=2), at(4 / 1900, batch=4), at(8 / 2400, batch=8)]
    measured.append(at(16 / 2400, batch=16))
    assert knee(measured, "batch", 0.1) == {"batch": [1, 2, 8]}
    assert knee(measured, "batch", 0.0) == {"batch": [1, 2, 4, 8, 16]}
    assert knee(measured, "batch", 0.5) == {"batch": [1, 2]}


def test_a_smaller_length_is_kept_only_if_it_saves() -> None:
    measured = [at(seconds, length=length) for length, seconds in ((16, 1.0), (32, 1.05), (64, 1.9), (128, 2.0))]
    assert knee(measured, None, 0.1) == {"length": [32, 128]}


def test_each_dimension_is_judged_at_the_largest_of_the_others() -> None:
    measured = [
        at(1.0, batch=1, length=8),
        at(2.0, batch=2, length=8),  # no gain with short rows,
        at(2.0, batch=1, length=16),
        at(2.5, batch=2, length=16),  # but with long ones
    ]
    assert knee(measured, "batch", 0.1) == {"batch": [1, 2], "length": [8, 16]}


def test_the_line_to_paste() -> None:
    sweep = Sweep("predict", "batch", (at(1.0, batch=1, length=8),), 0.1, {"batch": [1, 4], "length": [8]})
    assert sweep.bucket_options == "--bucket batch=1,4 --bucket length=8"
    several = Sweep("embed", "batch", sweep.measured, 0.1, {"batch": [1, 4]}, several=True)
    assert several.bucket_options == "--bucket embed:batch=1,4"
    assert sweep.rule == "nothing was swept"
    measured = (at(1.0, batch=1, length=8), at(1.0, batch=2, length=8))
    rule = Sweep("predict", "batch", measured, 0.1, {"batch": [1], "length": [8]}).rule
    assert rule == "a larger batch is kept if it computes 10% more rows a second than the size kept before it"


MODEL = servax.Model(
    lambda params, x: x * params["w"],
    inputs={"x": "float32[batch, length]"},
    buckets={"batch": [1], "length": [4, 8]},
    name="net",
)
MODEL.function(inputs={"x": "float32[batch]"}, name="other")(lambda params, x: x)


def test_a_bucket_that_another_ran_for_says_so() -> None:
    odd = Measured({"batch": 1}, "batch=2", 1, 10, 1.0, 1.0, 1.0, 1.0, None, None)
    shown = repr(Sweep("predict", "batch", (odd, at(1.0, batch=2)), 0.1, {"batch": [1]}).table())
    assert "batch=1 (ran as batch=2)" in shown
    assert shown.count("ran as") == 1


def test_one_function_with_the_sizes_asked_for() -> None:
    reduced, buckets = only(MODEL, "predict", {"batch": [1, 2]})
    assert list(reduced.functions) == ["predict"]
    assert buckets == ["batch=1,2", "length=8"]
    assert list(MODEL.functions) == ["predict", "other"]


@pytest.mark.parametrize(
    ("function", "sizes", "said"),
    [("none", {}, "no function"), ("predict", {"width": [1]}, "no such dimension")],
)
def test_what_there_is_not(function: str, sizes: dict[str, list[int]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        only(MODEL, function, sizes)
    bare = servax.Model(lambda params, x: x, inputs={"x": "float32[batch, length]"}, name="bare")
    with pytest.raises(UsageError, match="no size is given of length"):
        only(bare, "predict", {"batch": [1]})


def test_a_real_model_is_measured_at_each_size() -> None:
    reduced, buckets = only(MODEL, "predict", {"batch": [1, 2], "length": [4]})
    with servax.load(reduced, params={"w": np.float32(2)}, buckets=buckets) as servable:
        sweep = measure(servable, "predict", seconds=0.01, gain=0.1, several=True, sizes={"length": [4]})
        with pytest.raises(UsageError, match="no bucket of these sizes"):
            measure(servable, "predict", seconds=0.01, gain=0.1, several=True, sizes={"length": [5]})
    assert [each.sizes for each in sweep.measured] == [{"batch": 1, "length": 4}, {"batch": 2, "length": 4}]
    for each in sweep.measured:
        assert each.rows == each.sizes["batch"]
        assert each.runs >= 10
        assert 0 < each.p50 <= each.p95
        assert 0 < each.device <= each.p95
        assert each.rows_per_second == pytest.approx(each.rows / each.p50)
        assert each.compile > 0
        assert each.argument_bytes == 4 + 4 * each.rows * 4
    assert sweep.kept["length"] == [4]
    shown = repr(sweep.table())
    assert "tokens/s" in shown
    assert "batch=2,length=4" in shown
    assert json.loads(json.dumps(sweep.as_json()))["bucket_options"] == sweep.bucket_options


def test_inputs_have_the_sizes() -> None:
    inputs = inputs_of(MODEL.functions["predict"].signature, Bucket.of(batch=3, length=5))
    assert {name: array.shape for name, array in inputs.items()} == {"x": (3, 5)}
