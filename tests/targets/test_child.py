import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bundle_toys import COUNT, PARAMS, PREDICT, SMALL, STATIC, TOY, write_bundle
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import path_text
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets import child_protocol as protocol
from servax.targets import golden, parity
from servax.targets.bundle import Bundle, amend
from servax.targets.child_protocol import Answered, Case, Job
from servax.targets.samples import to_bytes

MODEL = '''
import os, signal
import jax, jax.numpy as jnp, numpy as np
import servax

def double(params, x):
    """Kills its process where it is traced for four rows; gives other values than it should for two."""
    if x.shape[0] == 4 and isinstance(x, jax.core.Tracer) and os.environ.get("SERVAX_TEST_KILL"):
        os.kill(os.getpid(), signal.SIGABRT)
    return {"y": x * params["w"] + (x.shape[0] == 2) * float(os.environ.get("SERVAX_TEST_ADD", "0"))}

model = servax.Model(double, name="double", inputs={"x": "float32[batch, 3]"}, params={"w": np.ones(3, np.float32)})
'''


def add_golden(bundle, functions, params):
    buckets = {name: chosen for name, (_, chosen) in functions.items()}
    made = golden.make_all(
        {name: function for name, (function, _) in functions.items()},
        buckets,
        jax.tree.map(jnp.asarray, params),
        lambda golden: golden,
        thorough=buckets,
    )
    files = {golden.golden_file(each.function, Bucket.parse(each.bucket)): (each, to_bytes(each)) for each in made}
    names = {f"{each.function}@{each.bucket}": file for file, (each, _) in files.items()}
    return amend(
        bundle,
        {file: data for file, (_, data) in files.items()},
        lambda manifest: manifest.model_copy(update={"golden": names}),
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("child") / "toy.bundle"
    return add_golden(write_bundle(path, executables=True), TOY, PARAMS)


def buckets(functions):
    return {name: chosen for name, (_, chosen) in functions.items()}


@pytest.mark.parametrize("target", ["aot", "export"])
def test_a_wrapper_is_proved_with_what_the_bundle_holds(bundle, target):
    proof = parity.prove(bundle, target, "cpu", buckets(TOY))
    assert [(each.function, each.bucket, each.verdict) for each in proof.verdicts] == [
        ("predict", "batch=2,length=3", "proved"),
        ("predict", "batch=4,length=8", "proved"),
        ("count", "static", "proved"),
    ]
    assert proof.device is not None
    assert proof.device.startswith("cpu:0")
    assert proof.versions["jax"] == jax.__version__
    # two steps of the stateful function: its output and its state in each
    assert [(each.step, each.array) for each in proof.measurements if each.function == "count"] == [
        (0, "total"),
        (0, "state/seen"),
        (1, "total"),
        (1, "state/seen"),
    ]


def run_job(bundle, tmp_path, cases, *, code="", platform="cpu"):
    """Runs the child's module after `code`, in a process that prints the modules it has imported."""
    job = Job("aot", platform, str(bundle.root), str(tmp_path), tuple(cases))
    protocol.write_job(job, tmp_path / "job.json")
    script = (
        f"import json, runpy, sys\n{code}\nsys.argv = ['child', {str(tmp_path / 'job.json')!r}]\n"
        "try: runpy.run_module('servax.targets.child', run_name='__main__')\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted({n.partition('.')[0] for n in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), protocol.read_report(tmp_path)


def test_aot_needs_neither_flax_nor_a_source_and_answers_as_numpy_does(bundle, tmp_path):
    case = Case("predict", SMALL.label, str(bundle.path(f"golden/predict/{SMALL.label}.safetensors")))
    (status, modules), lines = run_job(bundle, tmp_path, [case], code="sys.modules['flax'] = None")
    assert status == 0
    assert not {"tensorflow", "equinox"} & set(modules)
    answered = lines[1]
    assert isinstance(answered, Answered)
    answers = protocol.read_answers(tmp_path / answered.outputs)
    sizes = {"full": (2, 3), "alone": (1, 3), "padded": (1, 1)}
    assert {key: array.shape[:2] for key, array in answers.items() if key.endswith("/y")} == {
        f"{name}/0/outputs/{output}": shape
        for name, shape in sizes.items()
        for output in ("y", "double.y")
        if output == "y"
    }
    from servax.targets.samples import from_bytes

    made = from_bytes(bundle.read(f"golden/predict/{SMALL.label}.safetensors"))
    for sample in made.samples:
        expected = sample.steps[0].inputs["x"] @ PARAMS["dense"]["w"] + PARAMS["dense"]["b"]
        np.testing.assert_allclose(answers[f"{sample.name}/0/outputs/y"], expected, rtol=1e-6)


def test_a_bundle_with_other_weights_fails(tmp_path):
    changed = {"dense": {"b": PARAMS["dense"]["b"], "w": PARAMS["dense"]["w"] * np.float32(1.001)}}
    functions = {"predict": (PREDICT, (SMALL,))}
    bundle = add_golden(write_bundle(tmp_path / "toy.bundle", functions, changed), functions, PARAMS)
    (verdict,) = parity.prove(bundle, "export", "cpu", buckets(functions)).verdicts
    assert verdict.verdict == "failed"
    assert "tolerance" in str(verdict.reason)


def test_another_program_than_the_source_fails(tmp_path):
    """Exports of a function that forgets its state, beside golden samples of one that keeps it."""

    def forgets(params, state, inputs):
        seen = inputs["x"] + 0 * state["seen"] + 0 * params["dense"]["b"]
        return {"seen": seen}, {"total": seen.sum()}

    wrong = Function("count", COUNT.signature, forgets, state=COUNT.state)
    bundle = write_bundle(tmp_path / "toy.bundle", {"count": (wrong, (STATIC,))})
    bundle = add_golden(bundle, {"count": (COUNT, (STATIC,))}, PARAMS)
    (verdict,) = parity.prove(bundle, "export", "cpu", {"count": (STATIC,)}).verdicts
    assert verdict.verdict == "failed"
    # the first step starts from zeros, and hides it
    assert "step 2" in str(verdict.reason)
    assert "state/seen" in str(verdict.reason)


def test_damaged_parameters_are_named(bundle, tmp_path):
    import shutil

    copy = tmp_path / "toy.bundle"
    shutil.copytree(bundle.root, copy)
    victim = max((copy / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    proof = parity.prove(Bundle.open(copy), "export", "cpu", {"predict": (SMALL,)})
    assert proof.verdicts[0].verdict == "failed"
    assert victim.name in str(proof.verdicts[0].reason)


def test_a_platform_that_is_not_here_is_unproven(bundle):
    proof = parity.prove(bundle, "export", "tpu", {"predict": (SMALL,)})
    assert proof.verdicts[0].verdict == "unproven"
    assert str(proof.verdicts[0].reason).startswith(
        "run servax verify there: JAX has no tpu device on this machine; seen "
    )


def test_bfloat16_parameters_and_outputs(tmp_path):
    w = np.random.RandomState(0).randn(8, 8).astype(ml_dtypes.bfloat16)
    low = Function(
        "predict",
        Signature(
            (TensorSpec.parse("x", "bfloat16[batch, 8]"),),
            (TensorSpec.parse("y", "bfloat16[batch, 8]"),),
        ),
        lambda params, state, inputs: (None, {"y": jnp.tanh(inputs["x"] @ params["w"])}),
    )
    functions = {"predict": (low, (Bucket.of(batch=4),))}
    bundle = add_golden(write_bundle(tmp_path / "toy.bundle", functions, {"w": w}), functions, {"w": w})
    assert [path_text((each.path,)) for each in bundle.manifest.parameters] == ["w"]
    (verdict,) = parity.prove(bundle, "export", "cpu", buckets(functions)).verdicts
    assert verdict.verdict == "proved"
    assert verdict.tolerance is not None
    assert 4 * 2.0**-9 < verdict.tolerance < 16 * 2.0**-8


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    """A model in a file, and a bundle with golden samples of what it should give."""
    folder = tmp_path_factory.mktemp("jit")
    (folder / "net.py").write_text(MODEL)
    function = Function(
        "predict",
        Signature((TensorSpec.parse("x", "float32[batch, 3]"),), (TensorSpec.parse("y", "float32[batch, 3]"),)),
        lambda params, state, inputs: (None, {"y": inputs["x"] * params["w"]}),
    )
    functions = {"predict": (function, tuple(Bucket.of(batch=size) for size in (2, 4, 8)))}
    params = {"w": np.array([1, 2, 3], np.float32)}
    bundle = add_golden(write_bundle(folder / "double.bundle", functions, params), functions, params)
    return bundle, f"{folder / 'net.py'}:model", buckets(functions)


def test_jit_is_proved_from_the_models_source(double):
    bundle, reference, chosen = double
    proof = parity.prove(bundle, "jit", "cpu", chosen, model=reference)
    assert [each.verdict for each in proof.verdicts] == ["proved"] * 3, proof.verdicts


def test_a_model_that_kills_its_process_and_one_that_is_wrong(double, monkeypatch):
    bundle, reference, chosen = double
    monkeypatch.setenv("SERVAX_TEST_KILL", "1")
    monkeypatch.setenv("SERVAX_TEST_ADD", "0.01")
    proof = parity.prove(bundle, "jit", "cpu", chosen, model=reference)
    assert [each.verdict for each in proof.verdicts] == ["failed", "failed", "proved"], proof.verdicts
    assert "off by 0.01" in str(proof.verdicts[0].reason)
    assert str(proof.verdicts[1].reason).startswith("child died with SIGABRT in predict@batch=4; its output ends: ")
    assert "net.py" in str(proof.verdicts[1].reason)


def test_jit_without_a_reference_says_why(double):
    bundle, _, chosen = double
    proof = parity.prove(bundle, "jit", "cpu", chosen)
    assert {each.verdict for each in proof.verdicts} == {"failed"}
    assert "move the model out of the notebook or script" in str(proof.verdicts[0].reason)
