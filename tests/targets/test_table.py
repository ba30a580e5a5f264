import pytest

from bundle_toys import manifest_of
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets.bundle import BundleWriter
from servax.targets.manifest import TARGETS, SavedModelRecord
from servax.targets.table import target

SIGNATURE = Signature(
    (TensorSpec.parse("x", "float32[batch, length]"),), (TensorSpec.parse("y", "float32[batch, length]"),)
)
DOUBLE = Function("f", SIGNATURE, lambda params, state, inputs: (None, {"y": inputs["x"] * 2}))
BUCKETS = tuple(Bucket.of(batch=batch, length=length) for batch in (1, 4, 8) for length in (16, 32, 64))
CORNERS = {Bucket.of(batch=batch, length=length) for batch in (1, 8) for length in (16, 64)}


@pytest.fixture
def bundle(tmp_path):
    with BundleWriter(tmp_path / "f.bundle") as writer:
        return writer.finish(manifest_of({"f": (DOUBLE, BUCKETS)}, {}, ("cpu",)))


def test_each_wrapper_is_found_by_its_own_name():
    assert [target(name).NAME for name in TARGETS] == ["jit", "aot", "export", "saved_model"]


def test_what_is_made_of_exports_and_what_runs_everywhere():
    assert [name for name in TARGETS if target(name).FROM_EXPORTS] == ["aot", "saved_model"]
    assert [name for name in TARGETS if target(name).PORTABLE] == ["export"]


def test_every_bucket_of_aot_and_the_corners_of_the_others(bundle):
    assert target("aot").buckets(bundle, full=False) == {"f": BUCKETS}
    for name in ("jit", "export", "saved_model"):
        assert set(target(name).buckets(bundle, full=False)["f"]) == CORNERS
        assert target(name).buckets(bundle, full=True) == {"f": BUCKETS}


def test_what_a_saved_model_leaves_out_is_not_proved_of_it(bundle):
    record = SavedModelRecord(tensorflow="2.21.0", stablehlo="1.13.7", signatures={}, left_out={"f": "it is odd"})
    with_it = type(bundle)(bundle.root, bundle.manifest.model_copy(update={"saved_model": record}))
    assert target("saved_model").buckets(with_it, full=True) == {}
