import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from bundle_toys import manifest_of
from servax.core import events
from servax.core.errors import BundleError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets import parity
from servax.targets.bundle import Bundle, BundleWriter
from servax.targets.child_protocol import Job, Started
from servax.targets.samples import Draw, Expected, Golden, Sample, Step, to_bytes

SIGNATURE = Signature((TensorSpec.parse("x", "float32[batch]"),), (TensorSpec.parse("y", "float32[batch]"),))
DOUBLE = Function("double", SIGNATURE, lambda params, state, inputs: (None, {"y": inputs["x"] * 2}))
BUCKETS = tuple(Bucket.of(batch=size) for size in (1, 2, 4))
LABELS = [f"double@{bucket.label}" for bucket in BUCKETS]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of `double` with golden samples by NumPy and nothing else."""
    with BundleWriter(tmp_path_factory.mktemp("parity") / "double.bundle") as writer:
        golden = {}
        for bucket in BUCKETS:
            draw = Draw(bucket["batch"], "normal", "float32", (bucket["batch"],))
            step = Step({"x": draw}, {"y": Expected.of(2 * draw.array())}, {}, {"x": draw.array()})
            made = Golden("double", bucket.label, (Sample("full", bucket.mapping(), (step,)),), precision=0.01)
            file = f"golden/double/{bucket.label}.safetensors"
            writer.write(file, to_bytes(made))
            golden[f"double@{bucket.label}"] = file
        manifest = manifest_of({"double": (DOUBLE, BUCKETS)}, {}, ("cpu",))
        return writer.finish(manifest.model_copy(update={"golden": golden}))


@pytest.fixture
def prove(bundle, monkeypatch):
    """Proves `bundle` by `scripted_child.py`, which does what the script says, by bucket."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(parity, "CHILD", "scripted_child")

    def run(script, platform="cpu", **options):
        monkeypatch.setenv("CHILD_SCRIPT", json.dumps(script))
        return parity.prove(bundle, "export", platform, {"double": BUCKETS}, **options)

    return run


def verdicts(proof):
    return [each.verdict for each in proof.verdicts]


def test_a_right_wrapper_is_proved_in_every_bucket(prove):
    seen = []
    with events.listening(seen.append):
        proof = prove({})
    assert verdicts(proof) == ["proved"] * 3
    assert [f"{each.function}@{each.bucket}" for each in proof.verdicts] == LABELS
    assert proof.device == "abacus"
    assert proof.versions == {"numpy": np.__version__}
    assert sorted(proof.seconds) == sorted(LABELS)
    assert all(each.precision == 0.01 for each in proof.verdicts)
    assert [each.detail for each in seen if isinstance(each, events.StepAdvanced)] == [
        f"{label} proved" for label in LABELS
    ]
    assert seen[0] == events.StepStarted("prove export on cpu", 3)


def test_altered_outputs_are_caught(prove):
    proof = prove({"batch=2": "wrong"})
    assert verdicts(proof) == ["proved", "failed", "proved"]
    failed = proof.verdicts[1]
    assert failed.error == pytest.approx(1, rel=1e-5)
    assert failed.tolerance is not None
    assert failed.tolerance < 1e-3
    assert "y of sample full: off by 1, tolerance" in str(failed.reason)
    assert "[0] is" in str(failed.reason)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("nan", "[0] is nan, expected"),
        ("integers", "dtype int32, expected float32"),
        ("other name", "the wrapper gave no such array"),
        ("raise", "the model is odd; seen 3 legs."),
    ],
)
def test_other_wrong_answers_are_failures_that_say_what_is_wrong(prove, action, reason):
    proof = prove({"batch=1": action})
    assert verdicts(proof) == ["failed", "proved", "proved"]
    assert reason in str(proof.verdicts[0].reason)
    assert proof.verdicts[0].error is None


def test_a_child_that_dies_by_a_signal_is_a_verdict_and_the_others_are_tried(prove):
    proof = prove({"batch=2": "segfault"})
    assert verdicts(proof) == ["proved", "failed", "proved"]
    reason = str(proof.verdicts[1].reason)
    assert reason.startswith("child died with SIGSEGV in double@batch=2; its output ends: ")
    assert "about to read address 0" in reason
    assert len(reason) < parity.STDERR_TAIL + 200


def test_every_bucket_may_die_on_its_own(prove):
    proof = prove({"batch=1": "segfault", "batch=2": "exit", "batch=4": "segfault"})
    assert [str(each.reason).partition(";")[0] for each in proof.verdicts] == [
        "child died with SIGSEGV in double@batch=1",
        "child ended with status 7 in double@batch=2",
        "child died with SIGSEGV in double@batch=4",
    ]


def test_a_child_that_hangs_is_killed_and_named(prove):
    proof = prove({"batch=1": "hang"}, timeout=2)
    assert verdicts(proof) == ["failed", "proved", "proved"]
    assert proof.verdicts[0].reason == "child did not end within 6 s in double@batch=1"


def test_a_child_that_dies_before_its_first_bucket_fails_them_all_once(prove, monkeypatch):
    monkeypatch.setattr(parity, "CHILD", "no_such_module")
    proof = prove({})
    assert verdicts(proof) == ["failed"] * 3
    assert str(proof.verdicts[2].reason).startswith("child ended with status 1 before double@batch=4; its output ends:")
    assert "No module named no_such_module" in str(proof.verdicts[0].reason)


def test_a_crash_after_the_last_answer_is_said_and_keeps_the_numbers(prove):
    seen = []
    with events.listening(seen.append):
        proof = prove({"device": "segfault"})
    assert verdicts(proof) == ["proved"] * 3
    assert proof.device is None
    assert any(
        "died with SIGSEGV after its last bucket" in each.message for each in seen if isinstance(each, events.Notice)
    )


def test_what_this_machine_cannot_run_is_unproven(prove):
    proof = prove({"open": "platform"}, "cuda")
    assert verdicts(proof) == ["unproven"] * 3
    assert {each.platform for each in proof.verdicts} == {"cuda"}
    assert proof.verdicts[0].reason == "run servax verify there: JAX has no cuda device on this machine."


def test_a_missing_artifact_fails_at_build_and_is_unproven_elsewhere(prove):
    script = {"batch=4": "unavailable"}
    assert verdicts(prove(script)) == ["proved", "proved", "failed"]
    elsewhere = prove(script, unavailable="unproven")
    assert verdicts(elsewhere) == ["proved", "proved", "unproven"]
    assert elsewhere.verdicts[2].reason == "the bundle has no executable of this bucket."


def test_precision_gates_when_asked(prove):
    assert verdicts(prove({}, max_precision_error=0.02)) == ["proved"] * 3
    assert verdicts(prove({}, max_precision_error=0.001)) == ["failed"] * 3


def test_golden_samples_that_are_missing_are_an_error(bundle):
    with pytest.raises(BundleError, match=r"golden/double/batch=8\.safetensors"):
        parity.prove(bundle, "export", "cpu", {"double": (Bucket.of(batch=8),)})


def test_parity_json_holds_every_number(prove):
    proof = prove({"batch=1": "nan", "batch=2": "wrong"})
    content = json.loads(parity.report([proof]))
    assert content["format"] == 1
    (found,) = content["proofs"]
    assert (found["target"], found["platform"], found["device"]) == ("export", "cpu", "abacus")
    assert [each["verdict"] for each in found["verdicts"]] == ["failed", "failed", "proved"]
    lost, wrong, right = found["measurements"]
    assert lost["error"] is None
    assert wrong["error"] == pytest.approx(1, rel=1e-5)
    assert wrong["elements_over"] == 1
    assert (right["sample"], right["step"], right["array"], right["error"]) == ("full", 0, "y", 0)
    assert right["tolerance"] == pytest.approx(right["relative_tolerance"] * right["scale"])
    assert found["seconds"].keys() == {LABELS[0], LABELS[1], LABELS[2]}


def test_a_childs_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    values = parity.environment(Job("aot", "cuda", "b", str(tmp_path), ()))
    assert values["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert values["JAX_PLATFORMS"] == "cuda,cpu"
    assert values["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert "PYTHONPATH" not in values
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) in parity.environment(Job("jit", "cpu", "b", str(tmp_path), ()))["PYTHONPATH"]


def test_settings_of_this_process_go_to_the_child():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        settings = parity.settings()
    assert settings["jax_enable_x64"] is True
    assert settings["jax_default_matmul_precision"] == "highest"
    assert "jax_default_matmul_precision" not in parity.settings()


def test_a_results_folder_of_a_dead_child_says_where_it_was(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CHILD_SCRIPT", json.dumps({"batch=1": "segfault"}))
    case = parity.Case("double", "batch=1", str(Bundle.open(bundle.root).path("golden/double/batch=1.safetensors")))
    job = Job("export", "cpu", str(bundle.root), str(tmp_path), (case,))
    run = parity.run_child(job, 60, module="scripted_child")
    assert run.lines == (Started("double", "batch=1"),)
    assert run.ending == "child died with SIGSEGV"
    assert "about to read address 0" in run.tail
