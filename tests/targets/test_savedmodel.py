"""The `saved_model` wrapper: made here, called in processes where JAX cannot be imported."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from bundle_toys import (
    COUNT,
    INVERSE,
    MANY,
    MANY_LEAVES,
    STATIC,
    make_function,
    manifest_of,
    write_bundle,
)
from servax.core.errors import BuildError, BundleError, ModelError, PlatformError, UsageError
from servax.core.events import Notice, StepAdvanced, listening
from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.targets import child_protocol, exported, parity, savedmodel
from servax.targets.bundle import Bundle, BundleWriter, amend
from servax.targets.child_protocol import Answered, Case, Failed, Finished, Job, Unavailable
from servax.targets.manifest import ProcessorRecord
from servax.targets.samples import Draw, Golden, Sample, Step, to_bytes
from servax.targets.savedmodel_messages import Raised
from servax.targets.savedmodel_names import check_names, refuse_if_empty, signature_name, tensor_name
from servax.targets.savedmodel_signatures import set_calling_convention, unfit
from servax.targets.savedmodel_tensorflow import Consumer, check_tensorflow

WIDTH = 8
VOCABULARY = 50
LONGEST = 128
RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


WEIGHTS = {
    "bert": {
        "tokens": normal(VOCABULARY, WIDTH),
        "positions": normal(LONGEST, WIDTH),
        **{name: normal(WIDTH, WIDTH) / 3 for name in ("query", "key", "value", "out")},
        "scale": normal(WIDTH),
    },
    "half": {"w": normal(4, 3).astype(ml_dtypes.bfloat16)},
    "big": np.zeros((1024, 1024), np.float32),
    "step": np.asarray(3, np.int32),
    "odd": {"a b": np.asarray(2, np.float32), "é": {"_0": np.array([-8, 7, 3, -1], ml_dtypes.int4)}},
}


def encode(params, state, inputs):
    """One attention layer, masked by lengths, then the mean over each row's own tokens."""
    p, tokens, n = params["bert"], inputs["tokens"], inputs["n"]
    length = tokens.shape[1]
    mask = jnp.arange(length)[None] < n[:, None]
    x = p["tokens"][tokens] + p["positions"][jnp.arange(length)]  # a slice would have to know the length
    scores = jnp.einsum("bqd,bkd->bqk", x @ p["query"], x @ p["key"]) / np.sqrt(WIDTH)
    attention = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), axis=-1)
    y = x + attention @ (x @ p["value"]) @ p["out"]
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-6) * p["scale"]
    pooled = jnp.where(mask[..., None], y, 0).sum(1) / n[:, None]
    return None, {"embedding": pooled, "token.next": tokens + params["step"]}


def encode_by_numpy(tokens, n):
    p = {name: leaf.astype(np.float64) for name, leaf in WEIGHTS["bert"].items()}
    rows = []
    for row, count in zip(tokens, n, strict=True):
        x = p["tokens"][row[:count]] + p["positions"][:count]
        scores = (x @ p["query"]) @ (x @ p["key"]).T / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = x + weights @ (x @ p["value"]) @ p["out"]
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6) * p["scale"]
        rows.append(y.mean(0))
    return np.stack(rows)


PREDICT = make_function(
    "predict",
    {"tokens": "int32[batch, length]", "n": "int32[batch]"},
    {"embedding": f"float32[batch, {WIDTH}]", "token.next": "int32[batch, length]"},
    encode,
)
PREDICT = replace(PREDICT, signature=replace(PREDICT.signature, lengths={"n": "length"}))
HALF = make_function(
    "half",
    {"image.left": "uint8[batch, 4]", "flag": "bool[batch]"},
    {"y": "bfloat16[batch, 3]"},
    lambda params, state, inputs: (
        None,
        {"y": inputs["image.left"].astype(jnp.bfloat16) @ params["half"]["w"] * inputs["flag"][:, None]},
    ),
)


def top(params, state, inputs):
    """The two largest of each row, by way of LAPACK where the batch is symbolic."""
    x = inputs["x"]
    if not isinstance(x.shape[0], int):
        x = jax.ffi.ffi_call("lapack_spotrf_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    return None, {"y": jax.lax.top_k(x, 2)[0]}


TOP = make_function(
    "top",
    {"x": "float32[batch, 8]"},
    {"y": "float32[batch, 2]"},
    top,
)
# A length that has to be known: the batch alone is symbolic.
PAIRS = make_function(
    "pairs",
    {"x": "float32[batch, length]"},
    {"y": "float32[batch]"},
    lambda params, state, inputs: (
        None,
        {"y": (inputs["x"][:, ::2] if inputs["x"].shape[1] > 4 else inputs["x"]).sum(1)},
    ),
)
WIDE = make_function(
    "wide",
    {"x": "int64[batch]", "z": "float64[]"},
    {"y": "float64[batch]"},
    lambda params, state, inputs: (None, {"y": inputs["x"] * inputs["z"]}),
)
# Names and dtypes that TensorFlow would not take as they are.
ODD = make_function(
    "odd-one",
    {"_x": "float32[batch]", "Self": "uint4[3]"},
    {"_y": "float32[batch]", "z.z": "uint4[3]"},
    lambda params, state, inputs: (
        None,
        {
            "_y": inputs["_x"] * params["odd"]["a b"] + params["odd"]["é"]["_0"].astype(jnp.float32).sum(),
            "z.z": inputs["Self"] * 2,
        },
    ),
)
of = Bucket.of
LARGEST = of(batch=8, length=LONGEST)
FUNCTIONS = {
    "predict": (PREDICT, (of(batch=1, length=16), LARGEST)),
    "half": (HALF, (of(batch=2),)),
    "top": (TOP, (of(batch=1), of(batch=4))),
    "pairs": (PAIRS, (of(batch=2, length=4), of(batch=2, length=8))),
    "wide": (WIDE, (of(batch=2),)),
    "odd-one": (ODD, (of(batch=2),)),
    "count": (COUNT, (STATIC,)),
    "inverse": (INVERSE, (STATIC,)),
}


def count_call(params, state, inputs):
    return {"seen": state["seen"] + inputs["x"]}, {"total": inputs["x"].sum()}


def write_zoo(path):
    """A bundle of all these functions, each with a symbolic export where there can be one."""
    functions = {**FUNCTIONS, "count": (replace(COUNT, call=count_call), (STATIC,))}
    with BundleWriter(path) as writer:
        programs = []
        for name, (function, buckets) in functions.items():
            with jax.enable_x64(name == "wide"):
                made = [exported.export(function, bucket, WEIGHTS, ("cpu", "cuda")) for bucket in buckets]
                symbolic = exported.export_symbolic(function, buckets[-1], WEIGHTS, ("cpu", "cuda"))
            made += [symbolic] if isinstance(symbolic, exported.ExportedProgram) else []
            for program in made:
                writer.write(program.record.file, program.data)
                programs.append(program.record)
        ocp.save(writer.root / "params", WEIGHTS)
        manifest = manifest_of(functions, WEIGHTS, ("cpu", "cuda"))
        return writer.finish(manifest.model_copy(update={"programs": tuple(programs)}))


def add_saved_model(bundle, **options):
    """The bundle with its SavedModel in it, as `build --from` does it, and what was told meanwhile."""
    events = []
    with listening(events.append):
        record = savedmodel.write(bundle, bundle.root / savedmodel.DIRECTORY, **options)
    files = {
        path.relative_to(bundle.root).as_posix(): path.read_bytes()
        for path in Path(bundle.root / savedmodel.DIRECTORY).rglob("*")
        if path.is_file()
    }
    return amend(bundle, files, lambda manifest: manifest.model_copy(update={"saved_model": record})), events


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return add_saved_model(write_zoo(tmp_path_factory.mktemp("savedmodel") / "zoo.bundle"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """2,000 scalar parameters, a static bucket only, made for a TensorFlow older than the installed one."""
    path = tmp_path_factory.mktemp("savedmodel") / "many.bundle"
    bundle = write_bundle(path, {"many": (MANY_LEAVES, (of(batch=2), of(batch=3)))}, MANY)
    return add_saved_model(bundle, tensorflow="2.20")


def samples_of(function, *calls):
    """A golden file's samples with these inputs; what they should give is checked by the tests themselves."""
    signature = function.signature
    samples = []
    for number, inputs in enumerate(calls):
        sizes = {
            dim: size
            for spec in signature.inputs
            for dim, size in zip(spec.shape, inputs[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }
        # The recipes are not used: the file holds the arrays themselves.
        recipes = {name: Draw(0, "normal", array.dtype.name, array.shape) for name, array in inputs.items()}
        samples.append(Sample(f"call{number}", sizes, (Step(recipes, {}, {}, inputs),)))
    return tuple(samples)


def answers(bundle, folder, requests, platform="cpu"):
    """The report and the answers of the child for `requests`: `(function, bucket) -> inputs of each call`."""
    cases = []
    for (name, bucket), (function, calls) in requests.items():
        golden = folder / f"{name}@{bucket.label}.golden"
        golden.write_bytes(to_bytes(Golden(name, bucket.label, samples_of(function, *calls))))
        cases.append(Case(name, bucket.label, str(golden)))
    results = folder / "results"
    results.mkdir()
    run = parity.run_child(Job("saved_model", platform, str(bundle.root), str(results), tuple(cases)), 300)
    assert run.ending is None, run.tail
    found = {
        (line.function, Bucket.parse(line.bucket)): child_protocol.read_answers(results / line.outputs)
        for line in run.lines
        if isinstance(line, Answered)
    }
    return run.lines, found


PREDICT_CALLS = [
    {
        "tokens": RNG.integers(0, VOCABULARY, (batch, length)).astype(np.int32),
        "n": RNG.integers(1, length + 1, batch).astype(np.int32),
    }
    for batch in (1, 3, 8)
    for length in (5, LONGEST)
]
HALF_CALLS = [
    {
        "image.left": RNG.integers(0, 20, (batch, 4)).astype(np.uint8),
        "flag": RNG.integers(0, 2, batch).astype(bool),
    }
    for batch in (1, 5)
]
TOP_CALLS = [{"x": normal(batch, 8)} for batch in (3, 4)]
PAIRS_SHORT = [{"x": normal(2, 4)}, {"x": normal(1, 3)}]
PAIRS_LONG = [{"x": normal(2, 8)}, {"x": normal(7, 6)}]
ODD_CALLS = [{"_x": np.array([1, 5, 7], np.float32), "Self": np.array([3, 0, 7], ml_dtypes.uint4)}]
WIDE_CALLS = [{"x": np.array([2**40 + 1, 3]), "z": np.asarray(1.5)}]


@pytest.fixture(scope="module")
def replies(zoo, tmp_path_factory):
    """What the child answers for the zoo; one child for all tests."""
    bundle, _ = zoo
    requests = {
        ("predict", LARGEST): (PREDICT, PREDICT_CALLS),
        ("half", of(batch=2)): (HALF, HALF_CALLS),
        ("top", of(batch=4)): (TOP, TOP_CALLS),
        ("pairs", of(batch=2, length=4)): (PAIRS, PAIRS_SHORT),
        ("pairs", of(batch=2, length=8)): (PAIRS, PAIRS_LONG),
        ("wide", of(batch=2)): (WIDE, WIDE_CALLS),
        ("odd-one", of(batch=2)): (ODD, ODD_CALLS),
        ("inverse", STATIC): (INVERSE, [{"x": np.eye(3, dtype=np.float32)}]),
    }
    return answers(bundle, tmp_path_factory.mktemp("replies"), requests)


def test_signatures_are_named_after_functions_and_buckets(zoo):
    bundle, _ = zoo
    assert bundle.manifest.saved_model.signatures == {
        "predict": "predict",
        "half": "half",
        "top_batch_1": "top@batch=1",
        "top_batch_4": "top@batch=4",
        "pairs": "pairs",
        "pairs_batch_2_length_4": "pairs@batch=2,length=4",
        "wide": "wide",
        "odd-one": "odd-one",
        "serving_default": "predict",
    }
    assert savedmodel.buckets(bundle, full=False).keys() == {
        "predict",
        "half",
        "top",
        "pairs",
        "wide",
        "odd-one",
    }


@pytest.mark.parametrize("number", range(len(PREDICT_CALLS)))
def test_batches_and_lengths_that_no_bucket_has(replies, number):
    found = replies[1]["predict", LARGEST]
    call = PREDICT_CALLS[number]
    expected = encode_by_numpy(call["tokens"], call["n"])
    np.testing.assert_allclose(found[f"call{number}/0/outputs/embedding"], expected, atol=2e-5)
    np.testing.assert_array_equal(found[f"call{number}/0/outputs/token.next"], call["tokens"] + 3)


def test_bfloat16_parameters_with_integer_and_boolean_inputs(replies):
    found = replies[1]["half", of(batch=2)]
    for number, call in enumerate(HALF_CALLS):
        output = found[f"call{number}/0/outputs/y"]
        assert output.dtype == ml_dtypes.bfloat16
        exact = call["image.left"].astype(np.float64) @ WEIGHTS["half"]["w"].astype(np.float64)
        # bfloat16 keeps 8 bits of the mantissa.
        np.testing.assert_allclose(output.astype(np.float64), exact * call["flag"][:, None], rtol=2**-7, atol=0.3)


def test_a_symbolic_program_that_tensorflow_cannot_take_gives_a_signature_per_bucket(zoo, replies):
    found = replies[1]["top", of(batch=4)]
    for number, call in enumerate(TOP_CALLS):
        expected = np.sort(call["x"], axis=1)[:, ::-1][:, :2]
        np.testing.assert_array_equal(found[f"call{number}/0/outputs/y"], expected)
    (notice,) = [each for each in zoo[1] if isinstance(each, Notice) and "per bucket of top" in each.message]
    assert "lapack_spotrf_ffi" in notice.message


def test_a_length_that_must_be_known_is_padded_and_the_batch_is_free(replies):
    short = replies[1]["pairs", of(batch=2, length=4)]
    for number, call in enumerate(PAIRS_SHORT):
        np.testing.assert_allclose(short[f"call{number}/0/outputs/y"], call["x"].sum(1), rtol=1e-6)
    long = replies[1]["pairs", of(batch=2, length=8)]
    for number, call in enumerate(PAIRS_LONG):
        np.testing.assert_allclose(long[f"call{number}/0/outputs/y"], call["x"][:, ::2].sum(1), rtol=1e-5)


def test_64_bit_tensors_keep_their_bits(replies):
    (output,) = replies[1]["wide", of(batch=2)].values()
    np.testing.assert_array_equal(output, [(2**40 + 1) * 1.5, 4.5])


def test_names_and_dtypes_that_tensorflow_does_not_take_are_changed(replies):
    found = replies[1]["odd-one", of(batch=2)]
    np.testing.assert_array_equal(found["call0/0/outputs/_y"], [3, 11, 15])
    assert found["call0/0/outputs/z.z"].dtype == ml_dtypes.uint4
    np.testing.assert_array_equal(found["call0/0/outputs/z.z"].astype(int), [6, 0, 14])
    assert tensor_name("_x") == "arg__x"
    assert tensor_name("image.left") == "image_left"


def test_the_child_names_tensorflow_and_its_device(replies):
    (finished,) = [line for line in replies[0] if isinstance(line, Finished)]
    assert "CPU:0" in finished.device
    assert finished.versions["tensorflow"]


def test_functions_that_are_no_signatures_are_left_out_with_the_reason(zoo, replies):
    notices = {each.message: each.level for each in zoo[1] if isinstance(each, Notice)}
    (stateful,) = [message for message in notices if message.startswith("saved_model leaves out count")]
    assert "state from call to call" in stateful
    (kernels,) = [message for message in notices if message.startswith("saved_model leaves out inverse")]
    assert "lapack_sgetrf_ffi" in kernels
    assert "TensorFlow does not have" in kernels
    assert "aot or export" in kernels
    assert notices[stateful] == notices[kernels] == "warning"
    (line,) = [line for line in replies[0] if isinstance(line, Unavailable)]
    assert line.function == "inverse"
    assert "no signature of this bucket" in line.reason


def test_inputs_that_servax_would_fill_in_are_named(zoo):
    (message,) = [each.message for each in zoo[1] if isinstance(each, Notice) and "every request" in each.message]
    assert "every request to predict carries n," in message


def test_progress_is_told_by_function(zoo):
    done = [each.detail for each in zoo[1] if isinstance(each, StepAdvanced) and each.step == "saved_model"]
    assert done == ["predict", "half", "top", "pairs", "wide", "odd-one", "inverse"]


def test_parameters_are_variables_and_the_graph_is_small(zoo):
    folder = zoo[0].root / "saved_model"
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(WEIGHTS))
    assert weights > 4 * 2**20
    assert len((folder / "saved_model.pb").read_bytes()) < 256 * 1024
    assert len((folder / "variables" / "variables.data-00000-of-00001").read_bytes()) >= weights


def test_modules_are_serialized_for_the_tensorflow_that_reads_them(zoo, many):
    for bundle, _ in (zoo, many):
        record = bundle.manifest.saved_model
        graph = (bundle.root / "saved_model" / "saved_model.pb").read_bytes()
        assert {each.decode() for each in re.findall(rb"StableHLO_v([\d.]+)", graph)} == {record.stablehlo}
    assert many[0].manifest.saved_model.tensorflow == "2.20"
    assert many[0].manifest.saved_model.stablehlo == "1.12.1"
    assert zoo[0].manifest.saved_model.tensorflow.startswith("2.")


def test_two_thousand_leaves_in_static_buckets(many, tmp_path):
    bundle, events = many
    assert set(bundle.manifest.saved_model.signatures) == {"many_batch_2", "many_batch_3"}
    (notice,) = [each for each in events if isinstance(each, Notice)]
    assert "no serving_default" in notice.message
    x = np.array([1.0, -2.0, 0.5], np.float32)
    calls = {
        ("many", of(batch=2)): (MANY_LEAVES, [{"x": x[:1]}, {"x": x[:2]}]),
        ("many", of(batch=3)): (MANY_LEAVES, [{"x": x}]),
    }
    _, found = answers(bundle, tmp_path, calls)
    total = sum(number % 7 for number in range(2000))
    for (name, bucket), (_, inputs) in calls.items():
        for number, call in enumerate(inputs):
            np.testing.assert_allclose(found[name, bucket][f"call{number}/0/outputs/y"], call["x"] * total, rtol=1e-5)


REPLAY = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None
import tensorflow as tf
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from tensorflow.core.framework.tensor_pb2 import TensorProto

def fields(data):
    return [(each.field_number, each.data) for each in UnknownFieldSet(Empty.FromString(data))]

loaded = tf.saved_model.load(sys.argv[1])
said = []
for record in tf.data.TFRecordDataset(sys.argv[1] + "/assets.extra/tf_serving_warmup_requests"):
    ((log, predict_log),) = fields(record.numpy())
    ((request_number, request),) = fields(predict_log)
    assert (log, request_number) == (6, 1)
    parts = fields(request)
    (spec,) = [dict(fields(data)) for number, data in parts if number == 1]
    inputs = [dict(fields(data)) for number, data in parts if number == 2]
    arrays = {each[1].decode(): tf.make_ndarray(TensorProto.FromString(each[2])) for each in inputs}
    outputs = loaded.signatures[spec[3].decode()](**{name: tf.constant(array) for name, array in arrays.items()})
    said.append({
        "model": spec[1].decode(), "signature": spec[3].decode(), "bytes": len(record.numpy()),
        "inputs": {name: [each.dtype.name, each.shape, each.flatten()[:1].tolist()] for name, each in arrays.items()},
        "outputs": {name: tensor.shape.as_list() for name, tensor in outputs.items()},
    })
print(json.dumps(said))
"""


def test_the_warm_up_file_holds_a_request_per_bucket_that_runs(zoo):
    bundle, _ = zoo
    run = subprocess.run(
        [sys.executable, "-c", REPLAY, str(bundle.root / "saved_model")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    requests = json.loads(run.stdout.splitlines()[-1])
    assert {each["model"] for each in requests} == {"toy"}
    assert [(each["signature"], each["inputs"][min(each["inputs"])][1][0]) for each in requests] == [
        ("predict", 1),
        ("predict", 8),
        ("half", 2),
        ("top_batch_1", 1),
        ("top_batch_4", 4),
        ("pairs", 2),
        ("pairs_batch_2_length_4", 2),
        ("wide", 2),
        ("odd-one", 3),
    ]
    largest = requests[1]
    assert largest["inputs"] == {"n": ["int32", [8], [LONGEST]], "tokens": ["int32", [8, LONGEST], [0]]}
    assert largest["outputs"] == {"embedding": [8, WIDTH], "token_next": [8, LONGEST]}
    assert requests[2]["inputs"] == {"flag": ["bool", [2], [False]], "image_left": ["uint8", [2, 4], [0]]}
    assert max(each["bytes"] for each in requests) < 200


def test_the_copy_command_copies_into_model_and_version(zoo, tmp_path):
    bundle, _ = zoo
    line = savedmodel.copy_command(str(bundle.root), "my net", version=3)
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert (tmp_path / "models" / "my net" / "3" / "saved_model.pb").exists()
    assert (tmp_path / "models" / "my net" / "3" / "assets.extra" / "tf_serving_warmup_requests").exists()


def test_a_damaged_saved_model_is_not_loaded(zoo, tmp_path):
    copied = shutil.copytree(zoo[0].root, tmp_path / "copy.bundle")
    (copied / "saved_model" / "saved_model.pb").write_bytes(b"")
    lines, _ = answers(Bundle.open(copied), tmp_path, {("predict", LARGEST): (PREDICT, PREDICT_CALLS[:1])})
    (line,) = [line for line in lines if isinstance(line, Failed)]
    assert "saved_model.pb" in line.reason


def test_importing_the_module_imports_neither_jax_nor_tensorflow():
    code = (
        "import sys, servax.targets.savedmodel; "
        "print([name for name in ('jax', 'jaxlib', 'flax', 'orbax', 'tensorflow') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_damaged_parameter_is_named_and_nothing_is_left_behind(tmp_path):
    bundle = write_bundle(tmp_path / "net.bundle", {"top": (TOP, (of(batch=1),))})
    damaged = next(rel for rel in bundle.manifest.files if rel.startswith("params/") and "/d/" in rel)
    bundle.path(damaged).write_bytes(b"other bytes")
    with pytest.raises(BundleError) as caught:
        savedmodel.write(bundle, tmp_path / "out")
    assert damaged in caught.value.where
    assert not (tmp_path / "out").exists()


def test_a_child_that_dies_is_an_error_with_what_it_wrote(tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path / "net.bundle", {"top": (TOP, (of(batch=1),))})
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'Illegal instruction' >&2\nkill -ILL $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with pytest.raises(BuildError) as caught:
        savedmodel.write(bundle, tmp_path / "out")
    assert "ended without one" in caught.value.what
    assert "status -4" in caught.value.seen
    assert "Illegal instruction" in caught.value.seen


def test_a_bundle_without_exports_is_refused(tmp_path):
    bundle = write_bundle(tmp_path / "net.bundle", per_bucket=False)
    with pytest.raises(BuildError) as caught:
        savedmodel.write(bundle, tmp_path / "out")
    assert "has none" in caught.value.what
    assert "-t export" in caught.value.remedy


def test_a_model_of_stateful_functions_alone_is_refused(tmp_path):
    bundle = write_bundle(tmp_path / "net.bundle", {"count": (COUNT, (STATIC,))})
    with pytest.raises(ModelError) as caught:
        savedmodel.write(bundle, tmp_path / "out")
    assert "no function" in caught.value.what
    assert "count: it keeps state" in caught.value.seen
    assert "aot or export" in caught.value.remedy


def test_every_reason_is_listed_where_nothing_is_left():
    manifest = manifest_of({"count": (COUNT, (STATIC,)), "inverse": (INVERSE, (STATIC,))}, {}, ("cpu",))
    with pytest.raises(ModelError) as caught:
        refuse_if_empty(manifest, {"count": "state", "inverse": "kernels"})
    assert caught.value.seen == "count: state; inverse: kernels"
    refuse_if_empty(manifest, {"count": "state"})


def test_names_that_become_equal_are_all_listed():
    def specs(*names):
        return tuple(TensorSpec.parse(name, "float32[batch]") for name in names)

    signature = Signature(specs("a.b", "a_b", "c"), specs("y.z", "y_z"))
    with pytest.raises(ModelError) as caught:
        check_names("predict", signature)
    assert caught.value.where == "function predict"
    assert "inputs a.b, a_b are all a_b" in caught.value.seen
    assert "outputs y.z, y_z are all y_z" in caught.value.seen
    assert "rename" in caught.value.remedy
    check_names("predict", Signature(specs("a.b", "c"), specs("a.b")))


def test_text_is_not_part_of_a_saved_model(tmp_path, monkeypatch):
    bundle = write_bundle(tmp_path / "net.bundle", {"top": (TOP, (of(batch=1),))})
    text = ProcessorRecord(kind="text", input="x", name="text", file="processors/tokenizer.json", max_length=8)
    record = bundle.manifest.functions["top"].model_copy(update={"processors": (text,)})
    bundle = Bundle(bundle.root, bundle.manifest.model_copy(update={"functions": {"top": record}}))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    events = []
    with listening(events.append), pytest.raises(BuildError):
        savedmodel.write(bundle, tmp_path / "out")
    (notice,) = [each for each in events if isinstance(each, Notice)]
    assert "tensors only" in notice.message
    assert "text" in notice.message


def test_an_unknown_tensorflow_is_refused_before_any_work(tmp_path):
    bundle = write_bundle(tmp_path / "net.bundle", {"top": (TOP, (of(batch=1),))})
    with pytest.raises(UsageError) as caught:
        savedmodel.write(bundle, tmp_path / "out", tensorflow="1.15")
    assert "TensorFlow 1.15" in caught.value.what
    assert "'1.15'" in caught.value.seen
    assert "2.19, 2.20, 2.21" in caught.value.expected
    assert "--from BUNDLE" in caught.value.remedy
    check_tensorflow("2.20.3")


def test_a_missing_tensorflow_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_tensorflow()
    assert "needs TensorFlow" in caught.value.what
    assert "servax[tensorflow]" in caught.value.remedy


def test_a_tensorflow_too_old_for_this_jax_is_refused():
    with pytest.raises(BuildError) as caught:
        set_calling_convention(Consumer("2.13", "0.14.0", 6))
    assert "TensorFlow 2.13" in caught.value.what
    assert jax.__version__ in caught.value.seen
    assert caught.value.expected == "6 or earlier"


def test_a_program_over_several_devices_is_no_signature():
    program = jax.export.export(jax.jit(lambda x: x))(1.0)
    assert unfit(program, ()) is None
    assert "4 devices" in unfit(replace(program, nr_devices=4), ())


def test_signature_names():
    assert signature_name("predict", None) == "predict"
    assert signature_name("predict", STATIC) == "predict"
    assert signature_name("predict", of(batch=8, length=32)) == "predict_batch_8_length_32"


def test_errors_cross_the_process_boundary_with_their_parts():
    error = PlatformError("no device", where="here", seen="cpu", expected="cuda", remedy="plug one in")
    again = Raised.of(error).error()
    assert type(again) is PlatformError
    assert str(again) == str(error)
