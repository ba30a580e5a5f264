import json
import subprocess
import sys
from pathlib import Path

import pytest

from servax.core.errors import BundleError
from servax.core.tensors import Signature, TensorSpec
from servax.stages.buckets import Bucket
from servax.targets.bundle import Bundle
from servax.targets.manifest import FORMAT, FunctionRecord, Manifest, ProgramRecord, ProvenanceRecord

SCHEMA = Path(__file__).parents[2] / "docs" / "schema" / f"bundle-{FORMAT}.schema.json"

SIGNATURE = Signature(
    inputs=(TensorSpec("scale", "float32", (), default=1.0), TensorSpec("tokens", "int32", ("batch", "length"), pad=7)),
    outputs=(TensorSpec("output", "float32", ("batch", "2*length+1")),),
    batch="batch",
    lengths={"n": "length"},
)


def manifest() -> Manifest:
    function = FunctionRecord.of(
        SIGNATURE, stateful=False, buckets=("batch=1,length=8", "batch=4,length=8"), processors=()
    )
    program = ProgramRecord(
        function="predict",
        bucket="batch=1,length=8",
        file="programs/predict/batch=1,length=8.jaxexport",
        platforms=("cpu",),
        calling_convention=10,
        stablehlo_digest="0" * 64,
    )
    return Manifest(
        name="toy",
        created="2026-11-30T12:00:00Z",
        versions={"jax": "0.12.0.1"},
        platforms=("cpu",),
        targets=("export",),
        provenance=ProvenanceRecord(),
        parameters=(),
        functions={"predict": function},
        programs=(program,),
    )


def test_published_schema_is_current():
    printed = subprocess.run(
        [sys.executable, "-m", "servax.targets.manifest"], capture_output=True, text=True, check=True, timeout=120
    )
    assert printed.stderr == ""
    assert printed.stdout == SCHEMA.read_text()


def test_schema_names_every_field_of_the_manifest():
    assert set(json.loads(SCHEMA.read_text())["properties"]) == set(Manifest.model_fields)


def test_manifest_survives_json():
    assert Manifest.model_validate_json(manifest().model_dump_json()) == manifest()


def test_signature_survives_the_manifest():
    assert manifest().functions["predict"].signature() == SIGNATURE


def test_grid_and_lookup():
    assert manifest().grid()["predict"] == (Bucket.of(batch=1, length=8), Bucket.of(batch=4, length=8))
    found = manifest().program("predict", "batch=1,length=8")
    assert found is not None
    assert found.platforms == ("cpu",)
    assert manifest().program("predict", "batch=4,length=8") is None
    assert manifest().executable("abc", "predict", "batch=1,length=8") is None


def test_every_fault_of_a_damaged_manifest_is_listed(tmp_path):
    content = json.loads(manifest().model_dump_json())
    del content["name"]
    content["platforms"] = 3
    content["surprise"] = 1
    (tmp_path / "bundle.json").write_text(json.dumps(content))
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path)
    seen = caught.value.seen
    assert seen is not None
    assert all(part in seen for part in ("name:", "platforms:", "surprise:"))
