"""Selection over leaves described by hand, without any checkpoint behind them."""

import numpy as np
import pytest

from servax.checkpoint.select import choose
from servax.checkpoint.stored import StoredLeaf
from servax.core.errors import CheckpointError

MODEL = {"embed/table": (7, 4), "layer/kernel": (4, 4), "layer/bias": (4,)}


def leaves(*trees: tuple[str, dict[str, tuple[int, ...]]], dtype="float32", **single: StoredLeaf):
    found = {}
    for prefix, tree in trees:
        for path, shape in tree.items():
            found[tuple(filter(None, (*prefix.split("/"), *path.split("/"))))] = StoredLeaf(shape, np.dtype(dtype))
    found |= {tuple(path.split("/")): leaf for path, leaf in single.items()}
    return found


def wanted(tree=MODEL, dtype="float32"):
    return {tuple(path.split("/")): StoredLeaf(shape, np.dtype(dtype)) for path, shape in tree.items()}


def find(stored, like=None, select=None, optional=()):
    chosen = choose(stored, like or wanted(), select=select, optional=optional, where="run")
    return "/".join(chosen.prefix), {"/".join(to): "/".join(source) for to, source in chosen.sources.items()}


COUNT = StoredLeaf((), np.dtype("int32"))
KEY = StoredLeaf((2,), np.dtype("uint32"))


def test_the_root_is_taken_where_it_fits():
    assert find(leaves(("", MODEL))) == ("", {path: path for path in MODEL})


@pytest.mark.parametrize("prefix", ["model", "params", "state/params", "0", "a/b/c"])
def test_the_only_subtree_that_fits_is_found(prefix):
    found, sources = find(leaves((prefix, MODEL), ("vocabulary", {"size": ()})))
    assert found == prefix
    assert sources["layer/bias"] == f"{prefix}/layer/bias"


@pytest.mark.parametrize(
    "moments",
    [
        ("opt_state/0/mu", "opt_state/0/nu"),
        ("optimizer/m", "optimizer/v"),
        ("1/opt_state/mu", "1/opt_state/nu"),
        ("1/0/mu", "1/0/nu"),
        ("state/trace", "state/momentum"),
        ("anything/mu", "anything/z"),
    ],
)
def test_optimizer_state_is_never_taken(moments):
    stored = leaves(("0" if moments[0].startswith("1") else "params", MODEL), *((path, MODEL) for path in moments))
    assert find(stored)[0] in ("0", "params")


def test_a_tuple_beside_optimizer_state_is_optimizer_state():
    chain = leaves(("params", MODEL), ("foo/0/mu", MODEL), ("foo/0/nu", MODEL), ("foo/1/average", MODEL))
    assert find(chain | {("foo", "0", "count"): COUNT})[0] == "params"


def test_a_model_beside_a_count_is_a_model():
    assert find(leaves(("model", MODEL)) | {("count",): COUNT})[0] == "model"


def test_a_model_may_use_the_names_of_moments():
    encoder = {"encoder/kernel": (4, 4), "mu/kernel": (4, 2), "logvar/kernel": (4, 2)}
    adam = leaves(*((f"1/0/{moment}", encoder) for moment in ("mu", "nu"))) | {("1", "0", "count"): COUNT}
    assert find(leaves(("0", encoder)) | adam, wanted(encoder))[0] == "0"
    with pytest.raises(CheckpointError, match="1 extra"):
        find(leaves(("0", {**encoder, "head/bias": (2,)})) | adam, wanted(encoder))


def test_optimizer_state_alone_is_not_a_model():
    with pytest.raises(CheckpointError) as caught:
        find(leaves(("opt_state/0/mu", MODEL)))
    assert "no subtree" in caught.value.what
    assert "opt_state (3 leaves)" in caught.value.seen


def test_two_equal_candidates_are_listed_and_none_is_taken():
    with pytest.raises(CheckpointError) as caught:
        find(leaves(("model", MODEL), ("ema_params", MODEL), ("opt_state/mu", MODEL)))
    assert caught.value.what == "2 subtrees of the checkpoint fit the model equally well"
    assert caught.value.seen == "model, ema_params"
    assert caught.value.remedy == "say which: select='model'"


def test_select_names_one_of_equals():
    stored = leaves(("model", MODEL), ("ema_params", MODEL))
    assert find(stored, select="ema_params")[1]["layer/bias"] == "ema_params/layer/bias"


def test_select_may_name_a_tree_that_has_the_model_further_down():
    assert find(leaves(("state/model/params", MODEL), ("ema/params", MODEL)), select="state")[0] == "state/model/params"


def test_select_may_name_optimizer_state():
    assert find(leaves(("params", MODEL), ("opt_state/ema", MODEL)), select="opt_state/ema")[0] == "opt_state/ema"


def test_an_unknown_select_lists_what_there_is():
    with pytest.raises(CheckpointError) as caught:
        find(leaves(("model", MODEL)), select="modle")
    assert "'modle'" in caught.value.what
    assert "model (3 leaves)" in caught.value.seen


def test_nnx_value_keys_match():
    boxed = {f"{path}/value": shape for path, shape in MODEL.items()}
    assert find(leaves(("model", boxed)))[1]["layer/bias"] == "model/layer/bias/value"


def test_a_leaf_called_value_is_left_alone():
    model = {**MODEL, "value": (3,)}
    plain = find(leaves(("", model)), wanted(model))[1]
    boxed = find(leaves(("", {f"{path}/value": shape for path, shape in model.items()})), wanted(model))[1]
    assert plain["value"] == "value"
    assert boxed["value"] == "value/value"


def test_linen_variables_match_with_and_without_their_wrapper():
    variables = wanted({f"params/{path}": shape for path, shape in MODEL.items()})
    assert find(leaves(("params", MODEL)), variables)[1]["params/layer/bias"] == "params/layer/bias"
    assert find(leaves(("", MODEL)), variables)[1]["params/layer/bias"] == "layer/bias"
    assert find(leaves(("state/params/params", MODEL)), variables)[0] == "state/params"


def test_a_linen_train_state_with_collections_beside_other_trees():
    like = wanted({"params/w": (2,), "batch_stats/mean": (2,)})
    stored = leaves(("params", {"w": (2,)}), ("batch_stats", {"mean": (2,)}), ("opt_state/mu", {"w": (2,)}))
    stored |= leaves(("ema", {"w": (2,)})) | {("step",): COUNT}
    assert find(stored, like)[0] == ""


def test_missing_misshapen_and_extra_leaves_are_all_listed():
    stored = leaves(("model", {"embed/table": (9, 4), "layer/kernel": (4, 4), "layer/scale": (4,), "head/bias": (7,)}))
    with pytest.raises(CheckpointError) as caught:
        find(stored)
    assert caught.value.what == "the checkpoint does not match the model: 1 missing, 1 misshapen, 2 extra"
    assert caught.value.where == "run, at model"
    lines = [line.split()[:2] for line in caught.value.seen.splitlines() if line.strip()]
    assert lines[:2] == [["missing", "layer/bias:"], ["misshapen", "embed/table:"]]
    assert sorted(lines[2:]) == [["extra", "head/bias:"], ["extra", "layer/scale:"]]
    assert "embed/table: float32[9, 4], the model has float32[7, 4]" in caught.value.seen


def test_rng_state_and_counters_inside_are_not_extra():
    stored = leaves(("model", MODEL)) | {
        ("model", "dropout", "rngs", "key", "value"): KEY,
        ("model", "dropout", "rngs", "count", "value"): StoredLeaf((), np.dtype("uint32")),
        ("model", "noise"): StoredLeaf((2,), np.dtype("uint32"), random=True),
        ("model", "step"): COUNT,
    }
    assert find(stored)[0] == "model"


def test_a_tree_that_fits_without_extras_is_preferred():
    assert find(leaves(("big", {**MODEL, "head/kernel": (4, 2)}), ("small", MODEL)))[0] == "small"


def test_optional_leaves_may_be_absent_but_not_misshapen():
    like = wanted({**MODEL, "mask": (8, 8)})
    assert find(leaves(("model", MODEL)), like, optional={("mask",)})[0] == "model"
    with pytest.raises(CheckpointError, match="1 misshapen"):
        find(leaves(("model", {**MODEL, "mask": (4, 4)})), like, optional={("mask",)})


@pytest.mark.parametrize(
    ("stored", "model", "fits"),
    [
        ("float64", "float32", True),
        ("float32", "bfloat16", True),
        ("int64", "int32", True),
        ("int32", "float32", True),
        ("bool", "int32", True),
        ("float32", "int32", False),
        ("int32", "bool", False),
        ("complex64", "float32", False),
    ],
)
def test_dtypes_may_widen_in_kind_but_not_narrow(stored, model, fits):
    from servax.core.tensors import dtype_of

    have = {("w",): StoredLeaf((2,), dtype_of(stored))}
    like = {("w",): StoredLeaf((2,), dtype_of(model))}
    if fits:
        assert find(have, like)[0] == ""
    else:
        with pytest.raises(CheckpointError, match="1 misshapen"):
            find(have, like)


def test_a_model_without_parameters_takes_nothing():
    assert choose(leaves(("model", MODEL)), {}, select=None, optional=(), where="run").sources == {}
