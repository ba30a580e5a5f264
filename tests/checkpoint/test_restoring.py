"""Restores of checkpoints that Orbax wrote, through every layout and shape of tree."""

import contextlib
import json
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax import nnx
from orbax.checkpoint import v1

from servax.checkpoint import restore
from servax.core.errors import CheckpointError
from servax.core.trees import flatten


def device_tree(tree):
    return jax.tree.map(jax.device_put, tree)


class Toy(nnx.Module):
    """Batch statistics, dropout, a list of layers and a variable called `value`."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.value = nnx.Param(jnp.arange(3.0))


@pytest.fixture
def toy():
    return Toy(nnx.Rngs(0))


def parameters(module):
    """What servax calls parameters: all array state but RNG, by string keys."""
    pure = nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))
    text = lambda tree: {str(k): text(v) if isinstance(v, dict) else np.asarray(v) for k, v in tree.items()}  # noqa: E731
    return text(pure)


# Layouts


def test_standard_checkpointer(tmp_path, net, abstract, same, save_v0):
    restored = restore(save_v0(tmp_path / "c", net), like=abstract(net))
    same(restored.params, net)
    assert restored.provenance.layout == "orbax v0"
    assert set(restored.origins.values()) == {"checkpoint"}


@pytest.mark.parametrize("ocdbt", [True, False])
def test_pytree_checkpointer(tmp_path, net, abstract, same, ocdbt):
    v0.PyTreeCheckpointer(use_ocdbt=ocdbt).save(tmp_path / "c", device_tree(net))
    same(restore(tmp_path / "c", like=abstract(net)).params, net)


def test_a_run_with_items_and_metrics(run, net, other_net, abstract, same):
    best = restore(run, like=abstract(net), step="best")
    same(best.params, net)
    assert (best.provenance.step, best.provenance.item, best.provenance.select) == (20, "state", "model")
    same(restore(run, like=abstract(net)).params, other_net)
    same(restore(run / "20", like=abstract(net), item="state").params, net)
    same(restore(run / "20" / "state", like=abstract(net), select="model").params, net)


def test_a_v1_checkpoint(tmp_path, net, abstract, same):
    v1.save(tmp_path / "c", {"model": device_tree(net)})
    for path in (tmp_path / "c", tmp_path / "c" / "state"):
        restored = restore(path, like=abstract(net))
        same(restored.params, net)
        assert restored.provenance.layout == "orbax v1"


def test_a_v1_checkpoint_with_several_items(tmp_path, net, other_net, abstract, same):
    v1.save_checkpointables(tmp_path / "c", {"weights": device_tree(net), "vocabulary": {"ids": np.arange(3)}})
    restored = restore(tmp_path / "c", like=abstract(net))
    same(restored.params, net)
    assert (restored.provenance.item, restored.provenance.select) == ("weights", None)
    v1.save_checkpointables(tmp_path / "d", {"weights": device_tree(net), "average": device_tree(other_net)})
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "d", like=abstract(net))
    assert caught.value.seen == "average, weights"
    same(restore(tmp_path / "d", like=abstract(net), item="average").params, other_net)
    same(restore(tmp_path / "d", like=abstract(net), select="weights").params, net)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "d", like=None)
    assert caught.value.seen == "items: average, weights"


def test_a_run_of_the_v1_checkpointer(tmp_path, net, other_net, abstract, same):
    with v1.training.Checkpointer(tmp_path / "run") as run:
        run.save(0, device_tree(net), metrics={"accuracy": 0.9})
        run.save(7, device_tree(other_net), metrics={"accuracy": 0.2})
    same(restore(tmp_path / "run", like=abstract(net)).params, other_net)
    best = restore(tmp_path / "run", like=abstract(net), step="best")
    same(best.params, net)
    assert (best.provenance.step, best.provenance.layout) == (0, "orbax v1")


# Trees


@pytest.mark.parametrize("form", ["state", "pure"])
def test_nnx_state_and_pure_dictionaries(tmp_path, toy, abstract, same, save_v0, form):  # noqa: PLR0917 (fixtures)
    state = nnx.state(toy)
    path = save_v0(tmp_path / "c", state if form == "state" else nnx.to_pure_dict(state))
    expected = parameters(toy)
    same(restore(path, like=abstract(expected)).params, expected)
    assert sorted(flatten(jax.eval_shape(lambda tree: tree, restore(path, like=None).params))) == sorted(
        flatten(expected)
    )
    same(restore(path, like=None).params, expected)


def test_a_model_and_optimizer_pair(tmp_path, toy, abstract, same, save_v0):
    optimizer = nnx.Optimizer(toy, optax.adam(1e-3), wrt=nnx.Param)
    path = save_v0(tmp_path / "c", (nnx.state(toy), nnx.state(optimizer)))
    expected = parameters(toy)
    restored = restore(path, like=abstract(expected))
    same(restored.params, expected)
    assert restored.provenance.select == "0"


def test_a_train_state_with_adam_and_averages(  # noqa: PLR0917 (fixtures)
    tmp_path, net, other_net, train_state, abstract, same, save_v0
):
    alone = save_v0(tmp_path / "alone", train_state)
    restored = restore(alone, like=abstract(net))
    same(restored.params, net)
    assert restored.provenance.select == "params"
    both = save_v0(tmp_path / "both", {**train_state, "ema_params": other_net})
    with pytest.raises(CheckpointError) as caught:
        restore(both, like=abstract(net))
    assert caught.value.seen == "params, ema_params"
    same(restore(both, like=abstract(net), select="ema_params").params, other_net)


def test_a_bare_pair_of_parameters_and_optax_state(tmp_path, net, abstract, same, save_v0):
    for name, transform in (
        ("adam", optax.adam(1e-3)),
        ("chain", optax.chain(optax.clip(1.0), optax.sgd(1e-2, momentum=0.9))),
    ):
        path = save_v0(tmp_path / name, (net, transform.init(device_tree(net))))
        restored = restore(path, like=abstract(net))
        same(restored.params, net)
        assert restored.provenance.select == "0"


def test_int_keys_lists_and_tuples(tmp_path, save_v0):
    tree = {
        "a": {0: np.ones(2, np.float32), 10: np.zeros(2, np.float32)},
        "b": [np.full(3, 2.0, np.float32), (None, {})],
    }
    path = save_v0(tmp_path / "c", tree)
    like = {
        "a": {"0": jax.ShapeDtypeStruct((2,), "float32"), "10": jax.ShapeDtypeStruct((2,), "float32")},
        "b": {"0": jax.ShapeDtypeStruct((3,), "float32")},
    }
    assert jax.eval_shape(lambda tree: tree, restore(path, like=None).params) == like
    np.testing.assert_array_equal(restore(path, like=like).params["b"]["0"], [2, 2, 2])


def test_typed_prng_keys_and_text_are_left_out_and_harm_nothing(tmp_path, net, abstract, same):
    tree = {
        "net": device_tree(net),
        "net_key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1), 4),
        "name": "gpt",
    }
    path = tmp_path / "c"
    v0.PyTreeCheckpointer().save(path, tree)
    assert sorted(restore(path, like=None).params) == ["net"]
    same(restore(path, like=None).params, {"net": net})
    same(restore(path, like=abstract(net)).params, net)


def test_python_scalars_are_arrays_of_their_own(tmp_path, save_v0):
    path = save_v0(tmp_path / "c", {"scale": 2.5, "count": 3, "w": np.ones(2, np.float32)})
    restored = restore(
        path, like={"scale": jax.ShapeDtypeStruct((), "float32"), "w": jax.ShapeDtypeStruct((2,), "float32")}
    )
    assert restored.params["scale"] == 2.5
    assert restore(path, like=None).params["count"] == 3


# Dtypes, defaults and placement


def test_the_models_dtype_and_the_asked_dtype(tmp_path, net, abstract, save_v0):
    path = save_v0(tmp_path / "c", {**net, "ids": np.arange(4, dtype=np.int32)})
    like = abstract({**net, "ids": np.arange(4, dtype=np.int32)})
    assert restore(path, like=like).params["value"].dtype == np.float32
    restored = restore(path, like=like, dtype="bfloat16").params
    np.testing.assert_array_equal(restored["value"], net["value"].astype(ml_dtypes.bfloat16))
    assert restored["ids"].dtype == np.int32
    assert restore(path, like=None, dtype="float16").params["embed"]["table"].dtype == np.float16


def test_a_bfloat16_checkpoint(tmp_path, net, abstract, same):
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), net)
    v1.save(tmp_path / "c", half)
    rounded = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), net)
    same(restore(tmp_path / "c", like=abstract(rounded)).params, rounded)
    widened = jax.tree.map(lambda leaf: leaf.astype(np.float32), rounded)
    same(restore(tmp_path / "c", like=abstract(net)).params, widened)


def test_64_bit_leaves_come_back_as_jax_holds_them(tmp_path):
    v1.save(tmp_path / "c", {"w": np.arange(3.0), "n": np.arange(3)})
    tree = jax.eval_shape(lambda tree: tree, restore(tmp_path / "c", like=None).params)
    restored = restore(tmp_path / "c", like=None).params
    assert {name: leaf.dtype for name, leaf in tree.items()} == {name: leaf.dtype for name, leaf in restored.items()}
    np.testing.assert_array_equal(restored["w"], [0, 1, 2])


def test_defaults_stand_in_for_what_the_checkpoint_lacks(tmp_path, net, abstract, save_v0):
    mask = np.tril(np.ones((4, 4), bool))
    path = save_v0(tmp_path / "c", net)
    restored = restore(path, like=abstract({**net, "mask": mask}), defaults={("mask",): mask})
    np.testing.assert_array_equal(restored.params["mask"], mask)
    assert restored.params["mask"].committed
    assert restored.origins[("mask",)] == "model"
    assert restored.origins[("value",)] == "checkpoint"
    saved = save_v0(tmp_path / "d", {**net, "mask": ~mask})
    restored = restore(saved, like=abstract({**net, "mask": mask}), defaults={("mask",): mask})
    np.testing.assert_array_equal(restored.params["mask"], ~mask)
    assert restored.origins[("mask",)] == "checkpoint"


CHILD = textwrap.dedent(
    """
    import json, sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from orbax.checkpoint import v1
    from servax.checkpoint import restore

    path, role = sys.argv[1:]
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    tree = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.arange(8, dtype=np.float32)}
    specs = {"w": P("data", "model"), "b": P()}
    if role == "save":
        v1.save(path, {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()})
    else:
        like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in tree.items()}
        restored = {
            "spread": restore(path, like=like, placement=NamedSharding(mesh, P("data"))).params["w"],
            "third": restore(path, like=like, placement=jax.devices()[3]).params["w"],
            "first": restore(path, like=like).params["w"],
        }
        for array in restored.values():
            np.testing.assert_array_equal(array, tree["w"])
        print(json.dumps({k: sorted(d.id for d in v.devices()) for k, v in restored.items()}))
    """
)


def eight_devices(path, role):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), role],
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1] if role != "save" else ""


def test_a_checkpoint_sharded_over_8_devices(tmp_path):
    eight_devices(tmp_path / "c", "save")
    like = {"w": jax.ShapeDtypeStruct((8, 8), "float32"), "b": jax.ShapeDtypeStruct((8,), "float32")}
    restored = restore(tmp_path / "c", like=like).params
    np.testing.assert_array_equal(restored["w"], np.arange(64).reshape(8, 8))
    assert restored["w"].sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = json.loads(eight_devices(tmp_path / "c", "restore"))
    assert placed == {"spread": list(range(8)), "third": [3], "first": [0]}


# Contract 1: a restore compiles nothing


@contextlib.contextmanager
def compilations():
    """Names of what JAX traces, lowers or compiles, on any thread."""
    found = []
    on = [True]

    def listen(event, duration, **kwargs):
        if on[0] and event.startswith("/jax/core/compile/"):
            found.append((event, kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        on[0] = False


@pytest.mark.parametrize("layout", ["orbax", "safetensors", "gguf"])
def test_a_restore_compiles_nothing_and_runs_under_no_tracing(tmp_path, net, layout):
    shape = (5, 96)
    tree = {"blk": {"w": np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}}
    path = tmp_path / f"c.{layout}"
    if layout == "orbax":
        v1.save(path, {"model": tree, "key": jax.random.key(0)})
    elif layout == "safetensors":
        from safetensors.numpy import save_file

        save_file({"blk.w": tree["blk"]["w"]}, path)
    else:
        import gguf

        writer = gguf.GGUFWriter(path, "llama")
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor("blk.w", gguf.quantize(tree["blk"]["w"], kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    like = {"blk": {"w": jax.ShapeDtypeStruct(shape, "float32"), "mask": jax.ShapeDtypeStruct((17, 3), "float32")}}
    defaults = {("blk", "mask"): np.ones((17, 3))}
    with compilations() as found, jax.no_tracing(True):
        restore(path, like=like, defaults=defaults, dtype="bfloat16")
        restore(path, like=like, defaults=defaults)
        restore(path, like=None)
    assert found == []


# The bytes of everything else stay unread


def test_optimizer_state_is_not_read(tmp_path, net, abstract, same):
    state = {"params": device_tree(net), "opt_state": {"mu": device_tree(net), "nu": device_tree(net)}}
    v0.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "c", state)
    chunks = [file for folder in (tmp_path / "c").glob("opt_state.*") for file in folder.glob("[0-9]*")]
    assert chunks
    for file in chunks:
        file.write_bytes(b"")
    same(restore(tmp_path / "c", like=abstract(net)).params, net)
    with pytest.raises(CheckpointError):
        restore(tmp_path / "c", like=abstract(net), select="opt_state/mu")


# Faults


def test_leaves_that_do_not_match_are_all_listed(tmp_path, net, abstract, save_v0):
    changed = {**net, "embed": {"table": np.zeros((9, 4), np.float32)}, "head": {"bias": np.zeros(2, np.float32)}}
    del changed["value"]
    with pytest.raises(CheckpointError) as caught:
        restore(save_v0(tmp_path / "c", changed), like=abstract(net))
    assert caught.value.what == "the checkpoint does not match the model: 1 missing, 1 misshapen, 1 extra"
    for line in (
        "missing    value: the model has float32[3]",
        "misshapen  embed/table: float32[9, 4], the model has float32[7, 4]",
        "extra      head/bias: float32[2]",
    ):
        assert line in caught.value.seen


def damage(path, amount=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * amount)])


@pytest.mark.parametrize("file", ["manifest.ocdbt", "_METADATA", "_sharding", "array_metadatas/process_0", "d/*"])
@pytest.mark.parametrize("api", ["v0", "v1"])
def test_a_truncated_file_is_named(tmp_path, net, abstract, save_v0, api, file):  # noqa: PLR0917 (fixtures)
    if api == "v0":
        tree = save_v0(tmp_path / "c", net)
    else:
        v1.save(tmp_path / "c", device_tree(net))
        tree = tmp_path / "c" / "state"
    (hurt,) = tree.glob(file)
    damage(hurt)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "c", like=abstract(net))
    assert caught.value.what == "the checkpoint's data is damaged or incomplete"
    assert caught.value.where == str(hurt)
    assert str(tmp_path / "c") in caught.value.remedy


def test_a_damaged_chunk_is_named(tmp_path, net, abstract):
    v0.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "c", device_tree(net))
    hurt = tmp_path / "c" / "embed.table" / "0.0"
    damage(hurt)
    with pytest.raises(CheckpointError) as caught:
        restore(tmp_path / "c", like=abstract(net))
    assert caught.value.where == str(hurt)


def test_data_that_is_gone_is_an_error(tmp_path, net, abstract, save_v0):
    path = save_v0(tmp_path / "c", net)
    shutil.rmtree(path / "d")
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        restore(path, like=abstract(net))


def test_a_subtree_without_arrays(tmp_path, save_v0):
    path = save_v0(tmp_path / "c", {"keys": {"a": jax.random.key(0)}, "w": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match="holds no arrays"):
        restore(path, like=None, select="keys")


def test_importing_the_room_is_light():
    code = "import sys, servax.checkpoint; print([m for m in ('jax', 'orbax', 'gguf', 'etils') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
