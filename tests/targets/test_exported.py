import re

import jax
import jax.export
import numpy as np
import pytest

from bundle_toys import (
    COUNT,
    LARGE,
    MANY,
    MANY_LEAVES,
    PARAMS,
    PREDICT,
    SMALL,
    STATIC,
    flat_params,
    make_function,
    predict_by_numpy,
    put,
    write_bundle,
)
from servax.core.errors import ArtifactUnavailable, BundleError, ModelError, PlatformError
from servax.stages.buckets import Bucket
from servax.targets import exported
from servax.targets.bundle import Bundle, amend


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("exported") / "toy.bundle", platforms=("cpu", "cuda", "tpu"))


def with_call(call, inputs=None, outputs=None, **options):
    return make_function(
        "predict", inputs or {"x": "float32[batch, 4]"}, outputs or {"y": "float32[batch, 4]"}, call, **options
    )


def changed(bundle, **updates):
    """The bundle as if its exports' records said this."""
    programs = tuple(each.model_copy(update=updates) for each in bundle.manifest.programs)
    return Bundle(bundle.root, bundle.manifest.model_copy(update={"programs": programs}))


def test_jax_alone_calls_the_artifact_with_dictionaries():
    made = exported.export(PREDICT, SMALL, PARAMS)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    outputs = jax.export.deserialize(bytearray(made.data)).call(PARAMS, {"x": x})
    assert sorted(outputs) == ["double.y", "y"]
    np.testing.assert_allclose(outputs["y"], predict_by_numpy(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs["double.y"], 2 * predict_by_numpy(x), rtol=1e-5, atol=1e-5)


def test_jax_alone_calls_a_stateful_artifact():
    program = jax.export.deserialize(bytearray(exported.export(COUNT, STATIC, PARAMS).data))
    state, outputs = program.call(PARAMS, {"seen": np.ones(4, np.float32)}, {"x": np.arange(4, dtype=np.float32)})
    np.testing.assert_array_equal(state["seen"], [1, 2, 3, 4])
    assert float(outputs["total"]) == 10


def test_the_record_describes_the_artifact():
    record = exported.export(PREDICT, SMALL, PARAMS, ("cpu", "tpu")).record
    assert (record.function, record.bucket) == ("predict", "batch=2,length=3")
    assert record.file == "programs/predict/batch=2,length=3.jaxexport"
    assert record.platforms == ("cpu", "tpu")
    assert exported.export(PREDICT, SMALL, PARAMS, ("cpu",)).record.operations["stablehlo.dot_general"] == 1
    assert record.constant_bytes == 0
    assert set(record.seconds) == {"trace", "lower"}
    assert record.calling_convention >= jax.export.minimum_supported_calling_convention_version


def test_digests_tell_programs_apart():
    one, again = (exported.export(PREDICT, SMALL, PARAMS, ("cpu",)).record.stablehlo_digest for _ in range(2))
    assert one == again
    assert one != exported.export(PREDICT, LARGE, PARAMS, ("cpu",)).record.stablehlo_digest


def test_loaded_programs_give_the_numbers_and_never_compile(bundle):
    device = jax.devices()[0]
    for bucket in (SMALL, LARGE):
        loaded = exported.load(bundle, "predict", bucket, device)
        x = np.random.default_rng(1).normal(size=(bucket["batch"], bucket["length"], 4)).astype(np.float32)
        arguments = flat_params(), (), (put(x),)
        with jax.no_tracing(True), jax.transfer_guard("disallow"):
            state, (double, y) = loaded.program(*arguments)
        assert state == ()
        np.testing.assert_allclose(y, predict_by_numpy(x), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(double, 2 * predict_by_numpy(x), rtol=1e-5, atol=1e-5)
        assert loaded.target == "export"
        assert set(loaded.seconds) == {"load", "trace", "lower", "compile"}
        assert loaded.cost["flops"] > 0
        assert loaded.stablehlo is not None
        assert "stablehlo.dot_general" in loaded.stablehlo()


def test_state_is_donated(bundle):
    loaded = exported.load(bundle, "count", STATIC, jax.devices()[0])
    state = put(np.zeros(4, np.float32))
    (after,), (total,) = loaded.program(flat_params(), (state,), (put(np.ones(4, np.float32)),))
    assert state.is_deleted()
    assert float(total) == 4
    np.testing.assert_array_equal(after, np.ones(4))
    assert loaded.memory["alias"] == 16


def test_two_thousand_leaves(tmp_path):
    bucket = Bucket.of(batch=2)
    bundle = write_bundle(tmp_path / "toy.bundle", {"many": (MANY_LEAVES, (bucket,))}, MANY)
    loaded = exported.load(bundle, "many", bucket, jax.devices()[0])
    _, (y,) = loaded.program(flat_params(MANY), (), (put(np.array([1, 2], np.float32)),))
    np.testing.assert_array_equal(y, np.array([1, 2]) * (285 * 21 + 10))


def test_parameters_that_a_function_does_not_use_stay_arguments(bundle):
    unused = with_call(lambda params, state, inputs: (None, {"y": inputs["x"]}))
    made = exported.export(unused, Bucket.of(batch=2), PARAMS, ("cpu",))
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(made.data)).call(PARAMS, {"x": x})["y"], x)


def test_one_symbolic_artifact_serves_every_size():
    made = exported.export_symbolic(PREDICT, LARGE, PARAMS, ("cpu", "tpu"))
    assert isinstance(made, exported.ExportedProgram)
    assert made.record.file == "programs/predict/symbolic.jaxexport"
    assert made.record.fixed == {}
    assert "tensor<?x?x4xf32>" in exported.stablehlo_text(made.data)
    program = jax.export.deserialize(bytearray(made.data))
    for shape in ((1, 1, 4), (3, 5, 4), (7, 2, 4)):
        x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(program.call(PARAMS, {"x": x})["y"], predict_by_numpy(x), rtol=1e-5, atol=1e-5)


def test_a_bucket_without_artifact_runs_from_the_symbolic_one(tmp_path):
    bundle = write_bundle(tmp_path / "toy.bundle", {"predict": (PREDICT, (LARGE,))}, symbolic=True, per_bucket=False)
    loaded = exported.load(bundle, "predict", SMALL, jax.devices()[0])
    x = np.random.default_rng(3).normal(size=(2, 3, 4)).astype(np.float32)
    _, (_, y) = loaded.program(flat_params(), (), (put(x),))
    np.testing.assert_allclose(y, predict_by_numpy(x), rtol=1e-5, atol=1e-5)


def test_only_the_batch_is_symbolic_where_the_rest_needs_numbers(tmp_path):
    def positions(params, state, inputs):
        table = np.linspace(0, 1, inputs["x"].shape[1], dtype=np.float32)
        return None, {"y": inputs["x"] + table}

    function = with_call(positions, {"x": "float32[batch, length]"}, {"y": "float32[batch, length]"})
    made = exported.export_symbolic(function, LARGE, {}, ("cpu",))
    assert isinstance(made, exported.ExportedProgram)
    assert made.record.fixed == {"length": 8}
    program = jax.export.deserialize(bytearray(made.data))
    x = np.ones((5, 8), np.float32)
    np.testing.assert_allclose(program.call({}, {"x": x})["y"], x + np.linspace(0, 1, 8, dtype=np.float32))
    bundle = write_bundle(
        tmp_path / "toy.bundle", {"predict": (function, (LARGE,))}, {}, symbolic=True, per_bucket=False
    )
    assert exported.load(bundle, "predict", Bucket.of(batch=3, length=8), jax.devices()[0]).target == "export"
    with pytest.raises(ArtifactUnavailable, match="no export of this bucket") as caught:
        exported.load(bundle, "predict", Bucket.of(batch=3, length=4), jax.devices()[0])
    assert caught.value.seen == "symbolic"


def test_a_function_that_needs_numbers_says_why_it_has_no_symbolic_artifact():
    def branch(params, state, inputs):
        return None, {"y": inputs["x"] if inputs["x"].shape[0] > 1 else 2 * inputs["x"]}

    found = exported.export_symbolic(with_call(branch), Bucket.of(batch=2), {}, ("cpu",))
    assert isinstance(found, exported.NotSymbolic)
    assert "with batch symbolic: InconclusiveDimensionOperation" in found.reason
    static = exported.export_symbolic(COUNT, STATIC, PARAMS, ("cpu",))
    assert static == exported.NotSymbolic("the function has no named dimension")


def test_a_function_without_batch_dimension_is_tried_once():
    def table(params, state, inputs):
        return None, {"y": inputs["x"] + np.zeros(inputs["x"].shape[0])}

    function = with_call(table, {"x": "float32[length]"}, {"y": "float32[length]"}, batch=None)
    found = exported.export_symbolic(function, Bucket.of(length=4), {}, ("cpu",))
    assert isinstance(found, exported.NotSymbolic)
    assert found.reason.count("symbolic:") == 1


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x), "pure_callback"),
        (lambda x: (jax.debug.print("{}", x), x)[1], "debug"),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: (jax.debug.print("{}", x), x)[1], lambda: x), "debug"),
    ],
)
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")])
def test_callbacks_are_refused_with_a_remedy(call, name, platforms):
    function = with_call(lambda params, state, inputs: (None, {"y": call(inputs["x"])}))
    with pytest.raises(ModelError, match="Python") as caught:
        exported.export(function, Bucket.of(batch=2), {}, platforms)
    assert caught.value.where == "predict@batch=2"
    assert name in str(caught.value.seen)
    assert caught.value.remedy is not None


def test_an_operation_without_portable_form_is_named():
    def native(params, state, inputs):
        x = inputs["x"]
        return None, {"y": jax.ffi.ffi_call("somebodys_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)}

    with pytest.raises(ModelError, match="cannot be exported") as caught:
        exported.export(with_call(native), Bucket.of(batch=2), {}, ("cpu",))
    assert caught.value.where == "predict@batch=2"
    assert caught.value.expected == "operations that have a portable form on cpu"
    assert caught.value.remedy is not None


def test_a_platform_that_the_artifact_lacks_is_named(bundle):
    other = changed(bundle, platforms=("tpu", "cuda"))
    with pytest.raises(ArtifactUnavailable, match="not made for cpu") as caught:
        exported.load(other, "predict", SMALL, jax.devices()[0])
    assert caught.value.seen == "platforms tpu, cuda"
    assert caught.value.expected == "cpu"
    assert "--platform cpu" in str(caught.value.remedy)


def test_an_artifact_that_is_too_old_says_how_long_it_was_good_for(bundle):
    with pytest.raises(ArtifactUnavailable, match="does not read the export") as caught:
        exported.load(changed(bundle, calling_convention=3), "predict", SMALL, jax.devices()[0])
    (expiry,) = bundle.manifest.expiry
    assert f"good for a jaxlib built until {expiry.until}" in caught.value.what
    assert f"written by jax {jax.__version__}" in caught.value.what
    assert caught.value.seen == "calling convention 3"
    assert "build the bundle again" in str(caught.value.remedy)


def test_bytes_that_this_jax_does_not_read_are_named(tmp_path):
    bundle = write_bundle(tmp_path / "toy.bundle", {"predict": (PREDICT, (SMALL,))})
    file = bundle.manifest.programs[0].file
    data = bundle.read(file)
    for other in (b"from the future", re.sub(rb"dot_general_v\d", b"dot_general_v9", data), data[: len(data) // 2]):
        later = amend(bundle, {file: other}, lambda each: each)
        with pytest.raises(ArtifactUnavailable, match="does not read the export") as caught:
            exported.load(later, "predict", SMALL, jax.devices()[0])
        assert caught.value.where == file


def test_a_damaged_artifact_is_a_damaged_bundle(tmp_path):
    bundle = write_bundle(tmp_path / "toy.bundle", {"predict": (PREDICT, (SMALL,))})
    path = bundle.root / bundle.manifest.programs[0].file
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="damaged") as caught:
        exported.load(bundle, "predict", SMALL, jax.devices()[0])
    assert str(path) in str(caught.value.where)


def test_64_bit_tensors_ask_for_the_64_bit_switch(bundle):
    functions = {
        name: record.model_copy(
            update={"inputs": tuple(each.model_copy(update={"dtype": "float64"}) for each in record.inputs)}
        )
        for name, record in bundle.manifest.functions.items()
    }
    wide = Bundle(bundle.root, bundle.manifest.model_copy(update={"functions": functions}))
    with pytest.raises(PlatformError, match="64-bit") as caught:
        exported.load(wide, "predict", SMALL, jax.devices()[0])
    assert "float64" in str(caught.value.expected)
    assert "JAX_ENABLE_X64=1" in str(caught.value.remedy)
