import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from servax.core import events
from servax.core.errors import ModelError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets import golden
from servax.targets.samples import from_bytes, to_bytes

BUCKET = Bucket.of(batch=4, length=8)
X = {"x": "float32[batch, length, 3]"}
Y = {"y": "float32[batch, length, 3]"}
POOLED = {"y": "float32[batch, 3]"}


def function(call, inputs, outputs, *, state=None, batch="batch", lengths=None, name="predict"):
    def specs(texts):
        return tuple(TensorSpec.parse(key, texts[key]) for key in sorted(texts))

    return Function(
        name,
        Signature(specs(inputs), specs(outputs), batch=batch, lengths=lengths or {}),
        call,
        state=None if state is None else specs(state),
    )


def stateless(call, inputs, outputs, **options):
    return function(lambda params, _, given: (None, call(params, given)), inputs, outputs, **options)


def make(made, bucket=BUCKET, params=None, **options):
    params = {} if params is None else params
    return golden.make(made, bucket, params, golden.profile(made, [bucket], params), **options)


def sample(made, name):
    (found,) = [each for each in made.samples if each.name == name]
    return found


def notices(call):
    seen = []
    with events.listening(lambda event: seen.append(event) if isinstance(event, events.Notice) else None):
        result = call()
    return result, [notice.message for notice in seen]


W = np.random.RandomState(0).randn(3, 3).astype(np.float32)
LINEAR = stateless(lambda params, given: {"y": jnp.tanh(given["x"] @ params["w"])}, X, Y)


def test_samples_are_full_alone_and_padded_with_the_functions_answers():
    made = make(LINEAR, params={"w": jnp.asarray(W)})
    assert made.function == "predict"
    assert made.bucket == "batch=4,length=8"
    assert [(each.name, dict(each.sizes)) for each in made.samples] == [
        ("full", {"batch": 4, "length": 8}),
        ("alone", {"batch": 1, "length": 8}),
        ("padded", {"batch": 2, "length": 5}),
    ]
    for each in made.samples:
        (step,) = each.steps
        x = step.inputs["x"]
        assert x.shape == (each.sizes["batch"], each.sizes["length"], 3)
        np.testing.assert_allclose(step.outputs["y"].values, np.tanh(x.astype(np.float64) @ W), atol=1e-6)
    np.testing.assert_array_equal(
        sample(made, "alone").steps[0].inputs["x"], sample(made, "full").steps[0].inputs["x"][2:3]
    )
    assert made.rounding["y"]["cpu"].unit == 2.0**-24
    assert made.precision is None


def test_samples_are_the_same_each_time_and_survive_their_file():
    params = {"w": jnp.asarray(W)}
    assert to_bytes(make(LINEAR, params=params)) == to_bytes(make(LINEAR, params=params))
    read = from_bytes(to_bytes(make(LINEAR, params=params)))
    x = sample(read, "padded").steps[0].inputs["x"]
    np.testing.assert_allclose(sample(read, "padded").steps[0].outputs["y"].values, np.tanh(x @ W), atol=1e-6)


def test_the_function_runs_op_by_op_at_highest_precision():
    seen = []

    def call(params, given):
        if not isinstance(given["x"], jax.core.Tracer):
            seen.append(jax.config.jax_default_matmul_precision)

        @jax.jit
        def inner(x):
            assert not seen or not isinstance(x, jax.core.Tracer)
            return x * 2

        return {"y": inner(given["x"]) if seen else given["x"] * 2}

    make(stateless(call, X, Y))
    assert len(seen) > 3
    assert set(seen) == {"highest"}


def test_a_function_without_named_dimensions_has_the_full_sample_only():
    made = make(
        stateless(lambda _, given: {"y": given["x"].sum()}, {"x": "float32[4]"}, {"y": "float32[]"}, batch=None),
        Bucket(()),
    )
    assert [each.name for each in made.samples] == ["full"]
    step = made.samples[0].steps[0]
    np.testing.assert_allclose(step.outputs["y"].values, step.inputs["x"].sum(dtype=np.float64), atol=1e-6)


def test_a_batch_of_one_has_no_neighbours():
    made = make(LINEAR, Bucket.of(batch=1, length=8), {"w": jnp.asarray(W)})
    assert [(each.name, each.sizes["batch"]) for each in made.samples] == [("full", 1), ("padded", 1)]


def test_an_output_without_a_batch_dimension_is_fine():
    made = make(
        stateless(
            lambda params, given: {"y": given["x"] * 2, "scale": params["s"] + 1},
            X,
            {**Y, "scale": "float32[]"},
        ),
        params={"s": jnp.float32(2)},
    )
    assert [float(each.steps[0].outputs["scale"].values) for each in made.samples] == [3, 3, 3]


def test_an_output_that_changes_with_padding_is_named_with_its_remedy():
    mean = stateless(lambda _, given: {"y": given["x"].mean(axis=1), "z": given["x"]}, X, {**POOLED, "z": Y["y"]})
    with pytest.raises(ModelError) as caught:
        make(mean)
    error = caught.value
    assert error.what == "outputs of function 'predict' change with padding"
    assert error.where == "predict@batch=4,length=8, output y"
    assert "output 'y': max difference" in str(error.seen)
    assert "when padded in length" in str(error.seen)
    assert error.expected == "the values of the unpadded run"
    assert 'declare lengths={"n": "length"} and mask with n' in str(error.remedy)
    assert 'pad={"x": ...}' in str(error.remedy)


def test_the_difference_that_padding_makes_is_measured():
    count = stateless(lambda _, given: {"y": given["x"].sum(1) * 0 + given["x"].shape[1]}, X, POOLED)
    with pytest.raises(ModelError, match=r"max difference 3, .*\[0, 0\] is 8\.0, expected 5\.0"):
        make(count)


@pytest.mark.parametrize(
    ("call", "dtype", "sign"),
    [
        (lambda x: x.max(1), "float32", "all negative"),
        (lambda x: x.min(1), "float32", "all positive"),
        (lambda x: jnp.argmax(x, 1).astype(jnp.int32), "int32", "all negative"),
        (lambda x: jax.nn.relu(x).min(1), "float32", "all positive"),
        (lambda x: (x >= 0).any(1), "bool", "all negative"),
        (lambda x: (x > 0).all(1), "bool", "all positive"),
    ],
)
def test_padding_that_only_inputs_of_one_sign_tell_of_is_found(call, dtype, sign):
    """Zeros are the largest of negative values, and the smallest of positive ones."""
    made = stateless(lambda _, given: {"y": call(given["x"])}, X, {"y": f"{dtype}[batch, 3]"})
    with pytest.raises(ModelError) as caught:
        make(made, Bucket.of(batch=4, length=24))
    error = caught.value
    assert error.what == "outputs of function 'predict' change with padding"
    assert error.where == "predict@batch=4,length=24, output y"
    assert error.expected == "the values of the unpadded run"
    assert "when padded in length" in str(error.seen)
    assert 'declare lengths={"n": "length"} and mask with n' in str(error.remedy)
    assert f"for float inputs that are {sign}" in str(error.seen)


def test_a_maximum_masked_wrongly_is_found_in_the_shorter_row():
    def call(_, given):
        valid = jnp.arange(given["x"].shape[1]) < given["n"][:, None]
        return {"y": jnp.where(valid[..., None], given["x"], 0).max(axis=1)}

    with pytest.raises(ModelError) as caught:
        make(stateless(call, RAGGED, POOLED, lengths={"n": "length"}))
    assert "mask what lies past 'n' in 'length'" in str(caught.value.remedy)


def masked_max(_, given):
    valid = jnp.arange(given["x"].shape[1]) < given["n"][:, None]
    return {"y": jnp.where(valid[..., None], given["x"], -jnp.inf).max(axis=1)}


def test_a_maximum_by_mask_passes():
    made = make(stateless(masked_max, {**X, "n": "int32[batch]"}, POOLED, lengths={"n": "length"}))
    step = sample(made, "padded").steps[0]
    expected = [step.inputs["x"][0].max(axis=0), step.inputs["x"][1, :2].max(axis=0)]
    np.testing.assert_array_equal(step.outputs["y"].values, expected)


def test_a_pad_value_that_never_wins_passes():
    signature = Signature(
        (TensorSpec.parse("x", X["x"], pad=-1e30),), (TensorSpec.parse("y", POOLED["y"]),), batch="batch"
    )
    made = make(Function("predict", signature, lambda _, __, given: (None, {"y": given["x"].max(1)})))
    step = sample(made, "padded").steps[0]
    np.testing.assert_array_equal(step.outputs["y"].values, step.inputs["x"].max(1))


def test_whether_any_is_positive_does_not_change_with_zeros():
    make(stateless(lambda _, given: {"y": (given["x"] > 0).any(1)}, X, {"y": "bool[batch, 3]"}))


def test_a_sign_that_gives_nan_is_not_tried():
    """Roots of negative values are NaN, and padding with zeros would give 0 in their place."""
    made = make(stateless(lambda _, given: {"y": jnp.nanmax(jnp.sqrt(given["x"]), axis=1)}, X, POOLED))
    step = sample(made, "padded").steps[0]
    roots = np.sqrt(np.maximum(step.inputs["x"], 0))
    np.testing.assert_allclose(step.outputs["y"].values, roots.max(axis=1), rtol=1e-6)


def test_causal_attention_passes():
    def call(params, given):
        q, k, v = (given["x"] @ params[name] for name in "qkv")
        scores = jnp.einsum("bqc,bkc->bqk", q, k)
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return {"y": jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v}

    stream = np.random.RandomState(3)
    params = {name: stream.randn(3, 3).astype(np.float32) for name in "qkv"}
    made = make(stateless(call, X, Y), params={name: jnp.asarray(each) for name, each in params.items()})
    step = sample(made, "padded").steps[0]
    # The first position attends to itself alone.
    np.testing.assert_allclose(step.outputs["y"].values[:, 0], step.inputs["x"][:, 0] @ params["v"], atol=1e-5)


def test_the_first_step_of_a_stateful_function_is_tried_with_one_sign():
    def call(_, state, given):
        return {"seen": state["seen"] + 1}, {"y": given["x"].max(1)}

    made = function(call, X, POOLED, state={"seen": "float32[1]"})
    with pytest.raises(ModelError, match="change with padding"):
        make(made, Bucket.of(batch=4, length=24))


@pytest.mark.parametrize("call", [jnp.sum, jnp.max, jnp.min, lambda x: x.mean(axis=0), lambda x: x[0]])
@pytest.mark.parametrize("rows", [2, 4])
def test_an_output_without_the_batch_axis_that_mixes_rows_is_named(call, rows):
    shape = "float32[3]" if call(jnp.ones((rows, 3))).ndim else "float32[]"
    mixed = stateless(
        lambda params, given: {"a": given["x"] @ params["w"], "m": call(given["x"])},
        {"x": "float32[batch, 3]"},
        {"a": "float32[batch, 3]", "m": shape},
    )
    with pytest.raises(ModelError) as caught:
        make(mixed, Bucket.of(batch=rows), {"w": jnp.asarray(W)}, thorough=False)
    error = caught.value
    assert error.what == "a row's answer from function 'predict' depends on the other rows of its batch"
    assert error.where == f"predict@batch={rows}, output m"
    assert "output 'm': max difference" in str(error.seen)
    assert error.expected == "the values of the same row alone"
    assert "keep the batch axis in output 'm'" in str(error.remedy)
    assert "batch=None" in str(error.remedy)
    assert "evaluation mode" not in str(error.remedy)


def test_rows_that_are_mixed_in_both_kinds_of_output_are_named_together():
    both = stateless(
        lambda _, given: {"a": given["x"] - given["x"].mean(0), "m": given["x"].mean(0)},
        {"x": "float32[batch, 3]"},
        {"a": "float32[batch, 3]", "m": "float32[3]"},
    )
    with pytest.raises(ModelError) as caught:
        make(both, Bucket.of(batch=4))
    assert caught.value.where == "predict@batch=4, output a, m"
    assert "keep the batch axis in output 'm'" in str(caught.value.remedy)
    assert "use_running_average" in str(caught.value.remedy)


def test_an_output_of_a_multiple_of_the_batch_is_not_taken_for_a_common_one():
    signature = Signature(
        (TensorSpec.parse("x", "float32[batch]"),), (TensorSpec("y", "float32", ("2*batch",)),), batch="batch"
    )
    twice = Function("predict", signature, lambda _, __, given: (None, {"y": jnp.repeat(given["x"], 2)}))
    made = make(twice, Bucket.of(batch=4))
    step = sample(made, "full").steps[0]
    np.testing.assert_array_equal(step.outputs["y"].values, np.repeat(step.inputs["x"], 2))


def test_an_output_that_depends_on_the_number_of_rows_changes_with_padding_in_batch():
    share = stateless(
        lambda _, given: {"y": given["x"] / given["x"].shape[0]}, {"x": "float32[batch]"}, {"y": "float32[batch]"}
    )
    with pytest.raises(ModelError) as caught:
        make(share, Bucket.of(batch=4))
    assert "when padded in batch" in str(caught.value.seen)
    assert "an output over the whole batch cannot be served from a bucket" in str(caught.value.remedy)


def masked_mean(params, given):
    valid = jnp.arange(given["x"].shape[1]) < given["n"][:, None]
    total = jnp.where(valid[..., None], given["x"], 0).sum(axis=1)
    return {"y": total / given["n"][:, None]}


RAGGED = {**X, "n": "int32[batch]"}


def test_with_lengths_rows_differ_and_the_mask_holds():
    made = make(stateless(masked_mean, RAGGED, POOLED, lengths={"n": "length"}))
    step = sample(made, "padded").steps[0]
    assert step.inputs["n"].tolist() == [5, 2]
    assert (step.inputs["x"][1, 2:] == 0).all()
    expected = [step.inputs["x"][0].mean(axis=0), step.inputs["x"][1, :2].mean(axis=0)]
    np.testing.assert_allclose(step.outputs["y"].values, expected, atol=1e-6)
    assert sample(made, "full").steps[0].inputs["n"].tolist() == [8, 8, 8, 8]


def test_a_mask_that_is_missing_is_found_in_the_shorter_row():
    made = stateless(
        lambda _, given: {"y": given["x"].mean(1) + 0 * given["n"][:, None]}, RAGGED, POOLED, lengths={"n": "length"}
    )
    with pytest.raises(ModelError) as caught:
        make(made)
    assert "mask what lies past 'n' in 'length'" in str(caught.value.remedy)


def test_what_a_ragged_row_holds_past_its_length_is_nobodys_concern():
    made = make(stateless(lambda _, given: {"y": given["x"] - 1}, RAGGED, Y, lengths={"n": "length"}))
    step = sample(made, "padded").steps[0]
    np.testing.assert_allclose(step.outputs["y"].values, step.inputs["x"] - 1)


def test_train_mode_batch_norm_is_named_as_a_dependence_on_neighbours():
    def normalize(_, given):
        x = given["x"]
        return {"y": (x - x.mean(axis=0)) / jnp.sqrt(x.var(axis=0) + 1e-5)}

    with pytest.raises(ModelError) as caught:
        make(stateless(normalize, X, Y))
    error = caught.value
    assert "depends on the other rows of its batch" in error.what
    assert error.where == "predict@batch=4,length=8, output y"
    assert "max difference" in str(error.seen)
    assert error.expected == "the values of the same row alone"
    assert "evaluation mode" in str(error.remedy)
    assert "use_running_average" in str(error.remedy)


def test_chance_is_named_with_its_remedy():
    stream = np.random.default_rng()

    def dropout(_, given):
        return {"y": given["x"] * jnp.asarray(stream.random() < 0.5) + stream.normal()}

    with pytest.raises(ModelError) as caught:
        make(stateless(dropout, X, Y))
    error = caught.value
    assert "other values when it is called again" in error.what
    assert "output 'y'" in str(error.seen)
    assert error.expected == "the same values in both calls"
    assert "seed: uint32[batch]" in str(error.remedy)
    assert "evaluation mode" in str(error.remedy)


def test_a_seed_makes_randomness_reproducible():
    def noise(_, given):
        keys = jax.vmap(jax.random.key)(given["seed"])
        return {"y": jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)}

    made = make(stateless(noise, {"seed": "uint32[batch]"}, POOLED), Bucket.of(batch=4))
    step = sample(made, "full").steps[0]
    assert step.inputs["seed"].max() > 2**24
    alone = sample(made, "alone").steps[0]
    np.testing.assert_array_equal(alone.outputs["y"].values, step.outputs["y"].values[2:3])


TABLE = np.random.RandomState(1).randn(10, 3).astype(np.float32)
TOKENS = {"tokens": "int32[batch, length]"}


def test_tokens_stay_inside_the_table():
    made = make(
        stateless(lambda params, given: {"y": jnp.take(params["e"], given["tokens"], axis=0)}, TOKENS, Y),
        params={"e": jnp.asarray(TABLE)},
    )
    step = sample(made, "full").steps[0]
    assert step.inputs["tokens"].max() == 9
    np.testing.assert_array_equal(step.outputs["y"].values, TABLE[step.inputs["tokens"]])


def test_integers_that_give_nan_are_drawn_smaller():
    made = make(
        stateless(lambda params, given: {"y": jnp.take(params["e"], given["tokens"] * 3, axis=0)}, TOKENS, Y),
        params={"e": jnp.asarray(TABLE)},
    )
    step = sample(made, "full").steps[0]
    assert step.inputs["tokens"].max() == 3
    np.testing.assert_array_equal(step.outputs["y"].values, TABLE[step.inputs["tokens"] * 3])


def test_floats_that_give_nan_are_drawn_positive():
    step = sample(make(stateless(lambda _, given: {"y": jnp.log(given["x"])}, X, Y)), "full").steps[0]
    assert step.inputs["x"].min() > 0
    np.testing.assert_allclose(step.outputs["y"].values, np.log(step.inputs["x"]), rtol=1e-5, atol=1e-6)


def test_outputs_that_are_always_nan_are_kept_and_said():
    made, messages = notices(lambda: make(stateless(lambda _, given: {"y": given["x"] * jnp.nan}, X, Y)))
    assert np.isnan(sample(made, "full").steps[0].outputs["y"].values).all()
    assert any("outputs of predict hold NaN" in message for message in messages)


def test_infinities_are_no_reason_to_draw_again():
    def masked(_, given):
        return {"y": jnp.where(given["x"] > 0, given["x"], -jnp.inf)}

    step = sample(make(stateless(masked, X, Y)), "full").steps[0]
    x = step.inputs["x"]
    np.testing.assert_array_equal(step.outputs["y"].values, np.where(x > 0, x, -np.inf))


def test_bfloat16_reports_its_distance_to_float32():
    low = stateless(
        lambda params, given: {"y": (given["x"].astype(params["w"].dtype) @ params["w"])},
        X,
        {"y": "bfloat16[batch, length, 3]"},
    )
    made = make(low, params={"w": jnp.asarray(W, jnp.bfloat16)}, float32={"w": jnp.asarray(W)})
    step = sample(made, "full").steps[0]
    assert step.outputs["y"].values.dtype == ml_dtypes.bfloat16
    exact = step.inputs["x"].astype(np.float64) @ W
    np.testing.assert_allclose(step.outputs["y"].values.astype(np.float64), exact, atol=0.05)
    apart = np.abs(step.outputs["y"].values.astype(np.float64) - exact).max() / np.abs(exact).max()
    assert made.precision == pytest.approx(apart, rel=1e-3)
    assert 2.0**-12 < apart < 2.0**-6
    assert made.rounding["y"]["cpu"].unit == 2.0**-8


def counts_rows(_, state, given):
    seen = state["seen"] + given["x"].shape[0]
    return {"seen": seen}, {"y": given["x"] + state["seen"][0]}


def test_a_state_starts_as_zeros_and_goes_from_step_to_step():
    shift = function(
        lambda _, state, given: ({"last": given["x"]}, {"y": state["last"]}),
        {"x": "float32[4]"},
        {"y": "float32[4]"},
        state={"last": "float32[4]"},
        batch=None,
    )
    first, second = sample(make(shift, Bucket(())), "full").steps
    assert not np.array_equal(first.inputs["x"], second.inputs["x"])
    np.testing.assert_array_equal(first.outputs["y"].values, np.zeros(4))
    np.testing.assert_array_equal(first.state["last"].values, first.inputs["x"])
    np.testing.assert_array_equal(second.outputs["y"].values, first.inputs["x"])
    np.testing.assert_array_equal(second.state["last"].values, second.inputs["x"])


def test_an_output_may_tell_of_all_rows_in_a_state_that_they_share():
    def call(_, state, given):
        total = state["total"] + given["x"].sum(0)
        return {"total": total}, {"total": total}

    made = function(call, {"x": "float32[batch, 3]"}, {"total": "float32[3]"}, state={"total": "float32[3]"})
    first, second = sample(make(made, Bucket.of(batch=4)), "full").steps
    np.testing.assert_allclose(first.outputs["total"].values, first.inputs["x"].sum(0), atol=1e-6)
    expected = first.inputs["x"].sum(0) + second.inputs["x"].sum(0)
    np.testing.assert_allclose(second.outputs["total"].values, expected, atol=1e-6)


def test_padding_may_write_into_a_state_that_nobody_reads():
    """A step that writes the padding's marks into its state, but gives them to no later answer."""

    def call(_, state, given):
        state = {"seen": jnp.zeros_like(state["seen"]).at[: given["x"].shape[0]].set(1)}
        return state, {"y": given["x"] * 2}

    made = make(function(call, {"x": "float32[batch, 3]"}, POOLED, state={"seen": "float32[8]"}), Bucket.of(batch=4))
    first, _ = sample(made, "padded").steps
    assert first.inputs["x"].shape == (2, 3)
    np.testing.assert_array_equal(first.state["seen"].values, [1, 1, 1, 1, 0, 0, 0, 0])


def test_padding_that_reaches_a_later_answer_through_the_state_is_found():
    made = function(counts_rows, {"x": "float32[batch, 3]"}, POOLED, state={"seen": "float32[1]"})
    with pytest.raises(ModelError) as caught:
        make(made, Bucket.of(batch=4))
    assert "change with padding" in caught.value.what
    assert "at step 2" in str(caught.value.seen)


def test_buckets_that_are_not_thorough_run_at_the_buckets_shape_only():
    shapes = set()

    def call(params, given):
        shapes.add(given["x"].shape)
        return {"y": given["x"] + 1}

    made = stateless(call, X, Y)
    known = golden.profile(made, [BUCKET], {})
    result = golden.make(made, BUCKET, {}, known, thorough=False)
    assert shapes == {(4, 8, 3)}
    step = sample(result, "padded").steps[0]
    np.testing.assert_allclose(step.outputs["y"].values, step.inputs["x"] + 1)
    golden.make(made, BUCKET, {}, known)
    assert shapes == {(4, 8, 3), (2, 5, 3), (1, 8, 3)}


def test_a_function_that_runs_at_its_buckets_only_is_said():
    def pairs(_, given):
        x = given["x"]
        return {"y": (x.reshape(x.shape[0], -1, 2, 3) * 2).reshape(x.shape)}

    made, messages = notices(lambda: make(stateless(pairs, X, Y)))
    assert any("predict does not run unpadded at batch=2,length=5" in message for message in messages)
    step = sample(made, "padded").steps[0]
    np.testing.assert_allclose(step.outputs["y"].values, step.inputs["x"] * 2)


def test_all_buckets_of_all_functions_come_with_progress():
    seen = []
    buckets = {"predict": (Bucket.of(batch=1, length=2), Bucket.of(batch=2, length=4)), "double": (Bucket.of(batch=2),)}
    functions = {
        "predict": LINEAR,
        "double": stateless(
            lambda _, given: {"y": given["x"] * 2}, {"x": "float32[batch]"}, {"y": "float32[batch]"}, name="double"
        ),
    }
    with events.listening(seen.append):
        made = golden.make_all(
            functions,
            buckets,
            {"w": jnp.asarray(W)},
            lambda golden: f"{golden.function}@{golden.bucket}",
            thorough=buckets,
        )
    assert made == [
        "predict@batch=1,length=2",
        "predict@batch=2,length=4",
        "double@batch=2",
    ]
    # Compilations are events too, and come before, between and after them.
    steps = [each for each in seen if isinstance(each, events.StepStarted | events.StepAdvanced | events.StepFinished)]
    assert steps[0] == events.StepStarted("golden", 3)
    assert sorted(each.detail for each in steps if isinstance(each, events.StepAdvanced)) == sorted(made)
    assert isinstance(steps[-1], events.StepFinished)
    assert golden.golden_file("predict", buckets["predict"][0]) == "golden/predict/batch=1,length=2.safetensors"


def test_a_random_normalization_does_not_pass_as_rounding():
    """An output that moves by a thousandth with padding is caught, one that moves by the last bits is not."""
    much = stateless(lambda _, given: {"y": given["x"].sum(1) * (1 + 1e-3 * given["x"].shape[1] / 8)}, X, POOLED)
    with pytest.raises(ModelError, match="change with padding"):
        make(much)
    little = stateless(lambda _, given: {"y": given["x"].sum(1) * (1 + 1e-5 * given["x"].shape[1] / 8)}, X, POOLED)
    make(little)
