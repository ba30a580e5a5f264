import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from servax.checkpoint import restore
from servax.core.errors import CheckpointError


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "encoder.layer.0.weight": rng.standard_normal((3, 4), dtype=np.float32),
        "encoder.layer.0.bias": rng.standard_normal((4,), dtype=np.float32).astype(ml_dtypes.bfloat16),
        "encoder.layer.1.weight": rng.standard_normal((2, 2)).astype(np.float16),
        "ids": np.arange(5, dtype=np.int32),
        "flag": np.array([True, False]),
        "scale": np.array(1.5, np.float32),
    }


@pytest.fixture
def file(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_every_tensor_is_read_as_it_is_stored(file, tensors):
    restored = restore(file, like=None)
    assert restored.provenance.layout == "safetensors"
    layers = restored.params["encoder"]["layer"]
    for name, array in (
        ("encoder.layer.0.bias", layers["0"]["bias"]),
        ("encoder.layer.1.weight", layers["1"]["weight"]),
    ):
        assert array.dtype == tensors[name].dtype
        np.testing.assert_array_equal(array, tensors[name])
    for name in ("ids", "flag", "scale"):
        np.testing.assert_array_equal(restored.params[name], tensors[name])
        assert restored.params[name].committed


def test_a_subtree_is_cast_to_what_the_model_wants(file, tensors):
    like = {"0": {"weight": jax.ShapeDtypeStruct((3, 4), "bfloat16"), "bias": jax.ShapeDtypeStruct((4,), "float32")}}
    with pytest.raises(CheckpointError, match="1 extra"):
        restore(file, like=like)
    like["1"] = {"weight": jax.ShapeDtypeStruct((2, 2), "float32")}
    restored = restore(file, like=like)
    assert restored.provenance.select == "encoder/layer"
    np.testing.assert_array_equal(
        restored.params["0"]["weight"], tensors["encoder.layer.0.weight"].astype(ml_dtypes.bfloat16)
    )
    np.testing.assert_array_equal(restored.params["0"]["bias"], tensors["encoder.layer.0.bias"].astype(np.float32))


def test_names_with_slashes_are_paths_too(tmp_path):
    save_file({"params/dense/kernel": np.ones((2, 2), np.float32)}, tmp_path / "a.safetensors")
    tree = jax.eval_shape(lambda tree: tree, restore(tmp_path / "a.safetensors", like=None).params)
    assert tree == {"params": {"dense": {"kernel": jax.ShapeDtypeStruct((2, 2), "float32")}}}


def test_a_tensor_larger_than_a_block_of_the_cast(tmp_path):
    big = np.random.default_rng(0).standard_normal((3, (1 << 20) + 7), dtype=np.float32)
    save_file({"w": big}, tmp_path / "a.safetensors")
    restored = restore(tmp_path / "a.safetensors", like=None, dtype="bfloat16")
    np.testing.assert_array_equal(restored.params["w"], big.astype(ml_dtypes.bfloat16))


def sharded(folder, tensors):
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for part, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / part)
    index = {"weight_map": {name: part for part, inside in parts.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("by", ["folder", "index"])
def test_an_index_names_the_files(tmp_path, tensors, by):
    sharded(tmp_path, tensors)
    path = tmp_path if by == "folder" else tmp_path / "model.safetensors.index.json"
    restored = restore(path, like=None)
    np.testing.assert_array_equal(restored.params["ids"], tensors["ids"])
    np.testing.assert_array_equal(restored.params["encoder"]["layer"]["0"]["weight"], tensors["encoder.layer.0.weight"])


def test_a_missing_file_of_the_index_is_named(tmp_path, tensors):
    sharded(tmp_path, tensors)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, like=None)
    assert caught.value.seen == "no model-2.safetensors"


def test_two_files_with_the_same_tensor_are_refused_until_one_is_named(tmp_path, tensors):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": tensors["scale"]}, tmp_path / name)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, like=None)
    assert caught.value.seen == "w in a.safetensors and b.safetensors"
    assert restore(tmp_path, like=None, item="b.safetensors").params["w"] == tensors["scale"]


def test_a_truncated_file_is_named(file):
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError) as caught:
        restore(file, like=None)
    assert caught.value.where == str(file)
    assert "promises" in caught.value.seen


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 8, b"\xff" * 16, (10).to_bytes(8, "little") + b"not a json", (2).to_bytes(8, "little") + b"[]"],
)
def test_a_damaged_header_is_named(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "a.safetensors", like=None)
    assert caught.value.where == str(tmp_path / "a.safetensors")


def test_a_header_whose_offsets_do_not_fit_its_shapes(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x00" * 8)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        restore(tmp_path / "a.safetensors", like=None)
    assert "w is float32[4] in 8 bytes" in caught.value.seen


def test_a_file_that_shrinks_between_header_and_read_is_named(file):
    from servax.checkpoint.layout import locate
    from servax.checkpoint.placement import sharding_of
    from servax.checkpoint.safetensors import open_safetensors
    from servax.checkpoint.stored import Wanted

    source = open_safetensors(locate(file))
    file.write_bytes(file.read_bytes()[:-1])
    targets = {path: Wanted(leaf.dtype, sharding_of(None)) for path, leaf in source.leaves.items()}
    with pytest.raises(CheckpointError) as caught:
        source.read(targets)
    assert caught.value.where == str(file)
    assert "the file ends 1 bytes early" in caught.value.seen
