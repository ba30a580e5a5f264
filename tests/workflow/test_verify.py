from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bundle_toys import manifest_of
from servax.checkpoint.saving import save
from servax.core import events
from servax.core.errors import UsageError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets.bundle import Bundle, BundleWriter
from servax.targets.manifest import ProvenanceRecord, VerdictRecord
from servax.targets.samples import Draw, Expected, Golden, Sample, Step, to_bytes
from servax.workflow.build import _tell_if_nothing_is_proved, build
from servax.workflow.extend import extend
from servax.workflow.verify import verify

SIGNATURE = Signature((TensorSpec.parse("x", "float32[batch]"),), (TensorSpec.parse("y", "float32[batch]"),))
DOUBLE = Function("predict", SIGNATURE, lambda params, state, inputs: (None, {"y": inputs["x"] * 2}))
BUCKET = Bucket.of(batch=2)
PARAMETERS = {"two": np.float32([2])}

SOURCE = """
from pathlib import Path
import servax

Path(__file__).with_suffix(".imported").touch()
model = servax.Model(lambda params, x: x * params["two"], inputs={"x": "float32[batch]"}, name="double")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model's file that leaves a mark when it is imported."""
    path = tmp_path / "double.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def bundle(tmp_path: Path, source: Path) -> Bundle:
    """A bundle that says it can be served by `jit` from `source`."""
    with BundleWriter(tmp_path / "double.bundle") as writer:
        draw = Draw(1, "normal", "float32", (2,))
        step = Step({"x": draw}, {"y": Expected.of(2 * draw.array())}, {}, {"x": draw.array()})
        made = Golden("predict", BUCKET.label, (Sample("full", BUCKET.mapping(), (step,)),))
        file = "golden/predict/batch=2.safetensors"
        writer.write(file, to_bytes(made))
        save(writer.root / "params", PARAMETERS)
        manifest = manifest_of({"predict": (DOUBLE, (BUCKET,))}, PARAMETERS, ("cpu",))
        return writer.finish(
            manifest.model_copy(
                update={
                    "golden": {"predict@batch=2": file},
                    "targets": ("jit",),
                    "provenance": ProvenanceRecord(source=f"{source}:model"),
                }
            )
        )


def test_a_source_that_only_the_bundle_names_is_not_imported(bundle: Bundle, source: Path) -> None:
    checked = verify(bundle.root)
    assert not source.with_suffix(".imported").exists()
    (verdict,) = checked.parity.verdicts
    assert (verdict.target, verdict.verdict) == ("jit", "unproven")
    assert "pass --model or -t jit" in str(verdict.reason)


@pytest.mark.parametrize("by", ["target", "model"])
def test_a_source_that_the_operator_names_is(bundle: Bundle, source: Path, by: str) -> None:
    checked = verify(bundle.root, targets=["jit"]) if by == "target" else verify(bundle.root, model=f"{source}:model")
    assert source.with_suffix(".imported").exists()
    (verdict,) = checked.parity.verdicts
    assert verdict.verdict == "proved", verdict.reason


@pytest.mark.parametrize("verb", ["verify", "extend"])
def test_a_parity_that_is_neither_corners_nor_full_is_refused(bundle: Bundle, verb: str) -> None:
    with pytest.raises(UsageError, match="no such parity") as caught:
        verify(bundle.root, parity="bogus") if verb == "verify" else extend(
            bundle.root, targets=["aot"], parity="bogus"
        )
    assert caught.value.seen == "bogus"
    assert caught.value.expected == "corners or full"


def test_a_tensorflow_that_is_not_known_is_refused_before_any_work(tmp_path: Path, source: Path) -> None:
    pytest.importorskip("tensorflow")
    with pytest.raises(UsageError, match=r"TensorFlow 1\.15"):
        build(
            f"{source}:model",
            output=tmp_path / "x.bundle",
            checkpoint=tmp_path / "not there",
            targets=["saved_model"],
            tensorflow="1.15",
        )


def test_only_what_is_made_of_exports_can_be_added(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="only aot and saved_model can be made from a bundle") as caught:
        extend(bundle.root, targets=["aot", "jit"])
    assert caught.value.seen == "aot, jit"


@pytest.mark.parametrize(("verdict", "told"), [("unproven", True), ("proved", False)])
def test_a_build_that_proved_nothing_says_so(bundle: Bundle, verdict: str, told: bool) -> None:
    record = VerdictRecord.model_validate(
        {"target": "aot", "platform": "tpu", "function": "f", "bucket": "b", "verdict": verdict, "reason": "it is held"}
    )
    seen: list[events.Event] = []
    with events.listening(seen.append):
        _tell_if_nothing_is_proved(bundle.manifest.model_copy(update={"verdicts": (record,)}), "tpu", "x.bundle")
    notices = [each for each in seen if isinstance(each, events.Notice)]
    assert [each.level for each in notices] == ["warning"] * told
    if told:
        assert notices[0].message.startswith("NOTHING IN THIS BUNDLE IS PROVED on tpu")
        assert "servax verify x.bundle. it is held" in notices[0].message
