from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servax.core.errors import TooLarge, UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket, BucketGrid, choose, make_grid


def function(name: str, *inputs: str, **buckets: list[int]) -> Function:
    specs = tuple(TensorSpec.parse(f"x{index}", text) for index, text in enumerate(inputs))
    return Function(name, Signature(specs), lambda params, state, arrays: (None, arrays), buckets=buckets)


PREDICT = function("predict", "int32[batch, length]", batch=[1, 8], length=[32])
PREFILL = function("prefill", "int32[batch, chunk]", batch=[1], chunk=[64])
BOTH = {"predict": PREDICT, "prefill": PREFILL}


def labels(grid: BucketGrid, name: str) -> list[str]:
    return [bucket.label for bucket in grid[name]]


def test_label_and_parse() -> None:
    bucket = Bucket.of(length=32, batch=8)
    assert bucket.label == "batch=8,length=32"
    assert Bucket.parse("batch=8,length=32") == bucket
    assert Bucket.parse("length=32, batch=8") == bucket
    assert Bucket(()).label == "static"
    assert Bucket.parse("static") == Bucket(())
    assert bucket["length"] == 32
    assert bucket.volume() == 256


@pytest.mark.parametrize(
    "label",
    ["", "batch", "batch=", "batch=0", "batch=-1", "batch=x", "batch=1,batch=2", "=3", "batch=2147483648", "batch=²"],
)
def test_a_label_that_cannot_be_read(label: str) -> None:
    with pytest.raises(UsageError) as caught:
        Bucket.parse(label)
    assert caught.value.seen == repr(label)
    assert "batch=8,length=32" in str(caught.value.expected)


@pytest.mark.parametrize("label", ["batch=" + "9" * 5000, "b" * 5000, "=" * 5000, "\0" * 5000, "batch=1," * 5000])
def test_a_label_of_thousands_of_characters_is_refused_in_short(label: str) -> None:
    with pytest.raises(UsageError) as caught:
        Bucket.parse(label)
    assert len(str(caught.value)) < 400


def test_the_largest_size_is_read() -> None:
    assert Bucket.parse("batch=0002147483647") == Bucket.of(batch=2**31 - 1)


def test_fits() -> None:
    bucket = Bucket.of(batch=8, length=32)
    assert bucket.fits({"batch": 8, "length": 32})
    assert not bucket.fits({"batch": 9, "length": 1})


def test_the_grid_is_the_product_of_the_defaults_smallest_first() -> None:
    grid = make_grid({"predict": function("predict", "int32[batch, length]", batch=[8, 1], length=[128, 32])})
    assert labels(grid, "predict") == [
        "batch=1,length=32",  # 32
        "batch=1,length=128",  # 128
        "batch=8,length=32",  # 256
        "batch=8,length=128",  # 1024
    ]
    assert len(grid) == 4
    assert next(iter(grid)) == ("predict", Bucket.of(batch=1, length=32))


def test_an_option_changes_every_function_that_has_the_dimension() -> None:
    grid = make_grid(BOTH, ["batch=2,4"])
    assert labels(grid, "predict") == ["batch=2,length=32", "batch=4,length=32"]
    assert labels(grid, "prefill") == ["batch=2,chunk=64", "batch=4,chunk=64"]


def test_an_option_for_one_function_wins_over_one_for_all() -> None:
    grid = make_grid(BOTH, ["batch=2", "prefill:batch=3", "prefill:chunk=128,512"])
    assert labels(grid, "predict") == ["batch=2,length=32"]
    assert labels(grid, "prefill") == ["batch=3,chunk=128", "batch=3,chunk=512"]


def test_options_for_the_same_dimension_add_up() -> None:
    grid = make_grid({"predict": PREDICT}, ["batch=2", "batch=4, 2"])
    assert labels(grid, "predict") == ["batch=2,length=32", "batch=4,length=32"]


def test_a_function_without_named_dimensions_has_one_bucket() -> None:
    grid = make_grid({"scale": function("scale", "float32[3]")})
    assert grid["scale"] == (Bucket(()),)
    assert choose(grid["scale"], {}) == Bucket(())


def test_every_dimension_without_sizes_is_listed() -> None:
    with pytest.raises(UsageError) as caught:
        make_grid({"predict": function("predict", "int32[batch, length]"), "embed": function("embed", "int32[length]")})
    error = caught.value
    assert "'batch' of predict, 'length' of predict, 'length' of embed" in error.what
    assert "--bucket batch=SIZE,SIZE --bucket length=SIZE,SIZE" in str(error.remedy)


def test_every_option_that_cannot_be_used_is_listed() -> None:
    with pytest.raises(UsageError) as caught:
        make_grid(BOTH, ["batch=0", "width=3", "decode:batch=1", "prefill:length=3", "batch"])
    seen = str(caught.value.seen)
    assert "'batch=0' is not a dimension with positive sizes" in seen
    assert "'width=3' names the dimension 'width'; there are batch, chunk, length" in seen
    assert "'decode:batch=1' names the function 'decode'; there are predict, prefill" in seen
    assert "'prefill:length=3' names the dimension 'length'; there are batch, chunk" in seen
    assert "'batch' is not a dimension" in seen
    assert "prefill:chunk=128,512" in str(caught.value.expected)


def test_options_too_large_or_no_text_are_listed_with_the_others() -> None:
    options: list[Any] = ["batch=2147483648", "batch=" + "9" * 5000, 7, ["batch=1"], "x" * 5000]
    with pytest.raises(UsageError) as caught:
        make_grid(BOTH, options)
    seen = str(caught.value.seen)
    assert "'batch=2147483648' has sizes over 2147483647" in seen
    assert "999... has sizes over 2147483647" in seen
    assert "7 is not a text; ['batch=1'] is not a text" in seen
    assert "xxx... is not a dimension" in seen
    assert len(seen) < 700


def test_a_single_text_is_one_option() -> None:
    assert labels(make_grid({"predict": PREDICT}, "batch=4"), "predict") == ["batch=4,length=32"]


def test_every_wrong_size_of_every_model_is_listed() -> None:
    huge = 10**5000
    functions = {
        "a": function("a", "int32[batch, length]", batch=[1, 2**31], length=[0]),
        "b": function("b", "int32[batch]", batch=[huge]),
    }
    with pytest.raises(UsageError) as caught:
        make_grid(functions)
    assert caught.value.where == (
        "buckets of a, dimension 'batch'; buckets of a, dimension 'length'; buckets of b, dimension 'batch'"
    )
    assert caught.value.seen == f"2147483648, 0, an integer of {huge.bit_length()} bits"
    assert caught.value.expected == "integers from 1 to 2147483647"
    assert labels(make_grid(functions, ["batch=1", "length=1"]), "a") == ["batch=1,length=1"]


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_sizes_of_the_model_are_positive_integers(size: int) -> None:
    with pytest.raises(UsageError) as caught:
        make_grid({"predict": function("predict", "int32[batch]", batch=[1, size])})
    assert caught.value.where == "buckets of predict, dimension 'batch'"
    assert caught.value.seen == repr(size)


def test_the_file_lists_buckets_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps({"predict": [{"batch": 32, "length": 16}, {"batch": 1, "length": 128}]}))
    grid = make_grid(BOTH, ["batch=2"], file)
    assert labels(grid, "predict") == ["batch=1,length=128", "batch=32,length=16"]
    assert labels(grid, "prefill") == ["batch=2,chunk=64"]


def test_every_fault_of_the_file_is_listed(tmp_path: Path) -> None:
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps({"decode": [{}], "prefill": [], "predict": [{"batch": 1}, {"batch": 0, "length": 2}]}))
    with pytest.raises(UsageError) as caught:
        make_grid(BOTH, (), file)
    seen = str(caught.value.seen)
    assert str(file) in caught.value.what
    assert "function 'decode'; there are predict, prefill" in seen
    assert "prefill: no list of buckets" in seen
    assert 'predict: {"batch": 1}; its dimensions are batch, length' in seen
    assert 'predict: {"batch": 0, "length": 2}' in seen


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"predict": ' + "9" * 5000 + "}", "\0"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    file = tmp_path / "buckets.json"
    file.write_text(content)
    with pytest.raises(UsageError, match="bucket file"):
        make_grid(BOTH, (), file)


@pytest.mark.parametrize("batch", ["2147483648", "9" * 4000, "[" * 500 + "]" * 500, '"' + "x" * 5000 + '"'])
def test_odd_sizes_in_a_file_are_repeated_in_short(tmp_path: Path, batch: str) -> None:
    file = tmp_path / "buckets.json"
    file.write_text('{"predict": [{"batch": ' + batch + ', "length": 1}]}')
    with pytest.raises(UsageError, match="bucket file") as caught:
        make_grid(BOTH, (), file)
    assert "of sizes from 1 to 2147483647" in str(caught.value.seen)
    assert len(str(caught.value.seen)) < 250


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make_grid(BOTH, (), tmp_path / "none.json")
    assert caught.value.where == str(tmp_path / "none.json")


def test_a_file_and_an_option_for_the_same_function_contradict(tmp_path: Path) -> None:
    file = tmp_path / "buckets.json"
    file.write_text(json.dumps({"predict": [{"batch": 1, "length": 2}]}))
    with pytest.raises(UsageError, match="given twice") as caught:
        make_grid(BOTH, ["predict:batch=1"], file)
    assert caught.value.where == "predict"


GRID = [Bucket.of(batch=batch, length=length) for batch in (1, 4, 8) for length in (16, 64)]


@pytest.mark.parametrize(
    ("batch", "length", "expected"),
    [(1, 1, (1, 16)), (1, 16, (1, 16)), (1, 17, (1, 64)), (2, 16, (4, 16)), (5, 60, (8, 64)), (8, 64, (8, 64))],
)
def test_choose_takes_the_smallest_that_fits(batch: int, length: int, expected: tuple[int, int]) -> None:
    assert choose(GRID, {"batch": batch, "length": length}) == Bucket.of(batch=expected[0], length=expected[1])


def test_the_limit_need_not_be_a_power_of_two() -> None:
    assert choose([Bucket.of(length=32), Bucket.of(length=40959)], {"length": 40959}) == Bucket.of(length=40959)


def test_larger_than_the_largest_bucket() -> None:
    with pytest.raises(TooLarge) as caught:
        choose(GRID, {"batch": 3, "length": 65})
    error = caught.value
    assert error.status == 413
    assert error.where == "length"
    assert error.seen == "length=65"
    assert error.expected == "length at most 64"
    assert "--bucket length=65" in str(error.remedy)


def test_every_dimension_that_is_too_large_is_named() -> None:
    with pytest.raises(TooLarge) as caught:
        choose(GRID, {"batch": 9, "length": 65})
    assert caught.value.seen == "batch=9, length=65"
    assert caught.value.expected == "batch at most 8, length at most 64"


def test_a_combination_that_no_bucket_holds() -> None:
    buckets = [Bucket.of(batch=1, length=16), Bucket.of(batch=32, length=16), Bucket.of(batch=1, length=128)]
    with pytest.raises(TooLarge, match="combination") as caught:
        choose(buckets, {"batch": 2, "length": 100})
    assert caught.value.seen == "batch=2, length=100"
    assert caught.value.expected == "at most one of batch=32,length=16; batch=1,length=128"


def test_corners_are_the_extremes_of_volume_and_of_each_dimension() -> None:
    grid = BucketGrid({"predict": tuple(GRID)})
    assert [bucket.label for bucket in grid.corners("predict")] == [
        "batch=1,length=16",
        "batch=1,length=64",
        "batch=8,length=16",
        "batch=8,length=64",
    ]
