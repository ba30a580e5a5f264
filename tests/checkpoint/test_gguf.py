import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from servax.checkpoint import restore
from servax.core.errors import CheckpointError

Q = gguf.GGMLQuantizationType


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731 (one line beats five)
    return {"token_embd.weight": draw(11, 64), "blk.0.attn_q.weight": draw(32, 256), "blk.0.attn_norm.weight": draw(64)}


def write(path, values, kinds):
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None or kind in (Q.F16,):
            writer.add_tensor(name, value if kind is None else value.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_plain_tensors_keep_their_dtypes_and_numpys_axes(tmp_path, values):
    kinds = {"token_embd.weight": Q.F16, "blk.0.attn_q.weight": Q.BF16}
    restored = restore(write(tmp_path / "a.gguf", values, kinds), like=None)
    assert restored.provenance.layout == "gguf"
    embed, layer = restored.params["token_embd"]["weight"], restored.params["blk"]["0"]
    np.testing.assert_array_equal(embed, values["token_embd.weight"].astype(np.float16))
    np.testing.assert_array_equal(layer["attn_norm"]["weight"], values["blk.0.attn_norm.weight"])
    np.testing.assert_array_equal(layer["attn_q"]["weight"], values["blk.0.attn_q.weight"].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q5_1])
def test_quantised_tensors_are_dequantised(tmp_path, values, kind):
    path = write(tmp_path / "a.gguf", values, {"token_embd.weight": kind, "blk.0.attn_q.weight": kind})
    restored = restore(path, like=None).params["blk"]["0"]["attn_q"]["weight"]
    expected = values["blk.0.attn_q.weight"]
    assert restored.dtype == np.float32
    step = np.abs(expected).max() / (127 if kind == Q.Q8_0 else 7)
    np.testing.assert_allclose(restored, expected, atol=step)


def test_blocks_of_rows_give_what_the_whole_gives(tmp_path, monkeypatch, values):
    path = write(tmp_path / "a.gguf", values, {"blk.0.attn_q.weight": Q.Q8_0})
    monkeypatch.setattr("servax.checkpoint.gguf._BLOCK_BYTES", 3 * 4 * 256)
    restored = restore(path, like=None).params["blk"]["0"]["attn_q"]["weight"]
    whole = gguf.dequantize(gguf.quantize(values["blk.0.attn_q.weight"], Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(restored, whole)


def test_the_models_dtype_decides(tmp_path, values):
    path = write(tmp_path / "a.gguf", {"w": values["blk.0.attn_q.weight"]}, {"w": Q.Q8_0})
    restored = restore(path, like={"w": jax.ShapeDtypeStruct((32, 256), "bfloat16")})
    assert restored.params["w"].dtype == ml_dtypes.bfloat16
    assert jax.eval_shape(lambda tree: tree, restore(path, like=None).params) == {
        "w": jax.ShapeDtypeStruct((32, 256), "float32")
    }


def test_parts_of_a_split_file_are_read_together(tmp_path, values):
    for part, name in enumerate(sorted(values), 1):
        write(tmp_path / f"net-{part:05}-of-00003.gguf", {name: values[name]}, {})
    for path in (tmp_path, tmp_path / "net-00001-of-00003.gguf"):
        restored = restore(path, like=None)
        np.testing.assert_array_equal(restored.params["token_embd"]["weight"], values["token_embd.weight"])
        assert "attn_norm" in restored.params["blk"]["0"]


def test_several_models_in_a_folder_are_listed(tmp_path, values):
    for name in ("small.gguf", "large.gguf"):
        write(tmp_path / name, values, {})
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path, like=None)
    assert caught.value.seen == "items: large.gguf, small.gguf"


@pytest.mark.parametrize("keep", [3, 40, 200, -100])
def test_a_truncated_file_is_named(tmp_path, values, keep):
    path = write(tmp_path / "a.gguf", values, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        restore(path, like=None)
    assert caught.value.where == str(path)
