import jax
import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1

from servax.checkpoint import restore, save


def test_what_is_saved_comes_back(tmp_path, net, abstract, same):
    save(tmp_path / "params", jax.tree.map(jax.device_put, net))
    restored = restore(tmp_path / "params", like=abstract(net))
    same(restored.params, net)
    assert restored.provenance.layout == "orbax v1"


def test_orbax_alone_reads_it(tmp_path, net):
    save(tmp_path / "params", jax.tree.map(jax.device_put, net))
    np.testing.assert_array_equal(v1.load(tmp_path / "params")["layers"]["0"]["kernel"], net["layers"]["0"]["kernel"])
    old = v0.StandardCheckpointer().restore(tmp_path / "params" / "state")
    np.testing.assert_array_equal(old["layers"]["0"]["kernel"], net["layers"]["0"]["kernel"])


def test_numpy_arrays_and_low_precision_are_saved(tmp_path, net):
    tree = {"a": net["value"], "b": jax.numpy.ones((3,), "bfloat16"), "n": np.arange(3, dtype=np.int32)}
    save(tmp_path / "params", tree)
    assert jax.eval_shape(lambda tree: tree, restore(tmp_path / "params", like=None).params) == {
        "a": jax.ShapeDtypeStruct((3,), "float32"),
        "b": jax.ShapeDtypeStruct((3,), "bfloat16"),
        "n": jax.ShapeDtypeStruct((3,), "int32"),
    }
    np.testing.assert_array_equal(restore(tmp_path / "params", like=None).params["a"], net["value"])


def test_large_leaves_are_stored_in_chunks(tmp_path):
    save(tmp_path / "params", {"w": np.zeros((3, 8 << 20), np.float32)})
    metadata = v1.metadata(tmp_path / "params").metadata["w"]
    assert np.prod(metadata.storage_metadata.chunk_shape) * 4 <= 16 << 20
