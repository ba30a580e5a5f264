import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from bundle_toys import (
    INVERSE,
    LARGE,
    MANY,
    MANY_LEAVES,
    PARAMS,
    SMALL,
    STATIC,
    flat_params,
    predict_by_numpy,
    put,
    write_bundle,
)
from servax.core.errors import ArtifactUnavailable, UsageError
from servax.core.trees import flatten
from servax.stages import fingerprint
from servax.stages.buckets import Bucket
from servax.targets import aot
from servax.targets.bundle import Bundle, amend
from servax.targets.lowering import LoweredExport, compile_export
from servax.targets.target import Materials

CHILD = """
import json, sys
import jax, jax.monitoring
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
jax.monitoring.register_event_listener(lambda name, **__: events.append(name))
import numpy as np
from servax.stages.buckets import Bucket
from servax.targets import aot
from servax.targets.bundle import Bundle

path, function, label, arrays, out = sys.argv[1:]
device = jax.devices()[0]
put = lambda each: jax.device_put(each, jax.sharding.SingleDeviceSharding(device))
loaded = aot.load(Bundle.open(path), function, Bucket.parse(label), device)
with np.load(arrays) as given:
    groups = {name: [put(given[key]) for key in sorted(given) if key.startswith(name)] for name in ("p", "s", "i")}
with jax.no_tracing(True), jax.transfer_guard("disallow"):
    state, outputs = loaded.program(tuple(groups["p"]), tuple(groups["s"]), tuple(groups["i"]))
np.savez(out, **{f"o{n:05}": np.asarray(each) for n, each in enumerate(outputs)})
print(json.dumps({
    "compiles": [name for name in events if name.startswith("/jax/core/compile")],
    "modules": [name for name in ("flax", "orbax", "tensorflow", "equinox") if name in sys.modules],
    "scipy": "scipy.linalg" in sys.modules,
    "deleted": [each.is_deleted() for each in groups["s"]],
    "target": loaded.target,
    "seconds": sorted(loaded.seconds),
}))
"""


def in_child(tmp_path, bundle, function, label, *, params=(), state=(), inputs=(), environment=None):
    """Loads and runs an executable in a fresh process: its outputs, and what the process saw."""
    arrays = {
        f"{kind}{number:05}": each
        for kind, group in (("p", params), ("s", state), ("i", inputs))
        for number, each in enumerate(group)
    }
    np.savez(tmp_path / "in.npz", **arrays)
    files = [str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(bundle.root), function, label, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **(environment or {})},
    )
    assert child.returncode == 0, f"{child.returncode}: {child.stderr}"
    with np.load(tmp_path / "out.npz") as given:
        outputs = [given[key] for key in sorted(given)]
    return outputs, json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("aot") / "toy.bundle", executables=True)


def altered(bundle, tmp_path, change):
    """A copy of the bundle whose manifest's JSON was edited."""
    import shutil

    copy = tmp_path / "copy.bundle"
    shutil.copytree(bundle.root, copy)
    content = json.loads((copy / "bundle.json").read_text())
    change(content)
    (copy / "bundle.json").write_text(json.dumps(content))
    return Bundle.open(copy)


def test_a_fresh_process_loads_and_runs_without_any_compile_event(bundle, tmp_path):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    leaves = tuple(flatten(PARAMS).values())
    (double, y), seen = in_child(tmp_path, bundle, "predict", SMALL.label, params=leaves, inputs=[x])
    np.testing.assert_allclose(y, predict_by_numpy(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(double, 2 * predict_by_numpy(x), rtol=1e-5, atol=1e-5)
    assert seen == {
        "compiles": [],
        "modules": [],
        "scipy": False,
        "deleted": [],
        "target": "aot",
        "seconds": ["load"],
    }


def test_lapack_works_in_a_fresh_process(tmp_path):
    bundle = write_bundle(tmp_path / "toy.bundle", {"inverse": (INVERSE, (STATIC,))}, {}, executables=True)
    (record,) = bundle.manifest.executables
    assert any(name.startswith("lapack_") for name in record.custom_calls)
    x = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32) + 3 * np.eye(3, dtype=np.float32)
    (y,), seen = in_child(tmp_path, bundle, "inverse", "static", inputs=[x])
    np.testing.assert_allclose(y, np.linalg.inv(x), rtol=1e-5, atol=1e-6)
    assert seen["compiles"] == []


def test_donation_survives_in_a_fresh_process(bundle, tmp_path):
    x = np.arange(4, dtype=np.float32)
    leaves = tuple(flatten(PARAMS).values())
    (total,), seen = in_child(
        tmp_path, bundle, "count", "static", params=leaves, state=[np.ones(4, np.float32)], inputs=[x]
    )
    assert total == 4 + 6
    assert seen["deleted"] == [True]
    record = bundle.manifest.executable(bundle.manifest.fingerprints[0].id, "count", "static")
    assert record is not None
    assert record.donated_state


def test_two_thousand_leaves(tmp_path):
    functions = {"many": (MANY_LEAVES, (Bucket.of(batch=2),))}
    bundle = write_bundle(tmp_path / "toy.bundle", functions, MANY, executables=True)
    leaves = [np.asarray(leaf) for leaf in flatten(MANY).values()]
    assert len(leaves) == 2000
    (y,), seen = in_child(tmp_path, bundle, "many", "batch=2", params=leaves, inputs=[np.array([1, 2], np.float32)])
    # 285 rounds of 0 + 1 + ... + 6, then 0 to 4.
    np.testing.assert_array_equal(y, np.array([1, 2]) * (285 * 21 + 10))
    assert seen["compiles"] == []


def test_the_record_says_what_the_executable_is(bundle):
    manifest = bundle.manifest
    assert len(manifest.executables) == 3
    mark = fingerprint.current([jax.devices()[0]])
    assert {each.id: each.fields for each in manifest.fingerprints} == {mark.id: dict(mark.fields)}
    assert "aot" in manifest.targets
    assert [each.bound_to for each in manifest.expiry if each.target == "aot"] == [mark.id]
    record = manifest.executable(mark.id, "predict", SMALL.label)
    program = manifest.program("predict", SMALL.label)
    assert record is not None
    assert program is not None
    assert record.file == f"executables/{mark.id}/predict/{SMALL.label}"
    assert record.stablehlo_digest == program.stablehlo_digest
    assert record.custom_calls == ()
    # Two additions and 2 * 4 * 4 operations for each of the 2 * 3 rows, and the doubling: at least the products.
    assert program.cost["flops"] >= 2 * 4 * 4 * 6
    assert program.memory["argument"] == 4 * (4 + 16 + 24)


def test_the_stablehlo_behind_an_executable_can_be_read(bundle):
    loaded = aot.load(bundle, "predict", SMALL, jax.devices()[0])
    assert loaded.stablehlo is not None
    assert "stablehlo.dot_general" in loaded.stablehlo()


def test_every_differing_field_of_the_fingerprint_is_named(bundle, tmp_path):
    def change(content):
        fields = content["fingerprints"][0]["fields"]
        fields["jaxlib"] = "0.1.2"
        fields["device kind"] = "abacus"

    other = altered(bundle, tmp_path, change)
    with pytest.raises(ArtifactUnavailable) as caught:
        aot.load(other, "predict", SMALL, jax.devices()[0])
    error = caught.value
    mine = fingerprint.current([jax.devices()[0]])
    assert "device kind, jaxlib" in str(error.where)
    assert error.seen == "device kind=abacus; jaxlib=0.1.2"
    assert error.expected == f"device kind={mine.fields['device kind']}; jaxlib={mine.fields['jaxlib']}"
    assert mine.id in error.what
    assert error.remedy == f"run `servax compile {other.root}` on this machine"
    assert error.exit_code == 3


def test_the_nearest_of_several_fingerprints_is_compared(bundle, tmp_path):
    def change(content):
        far = json.loads(json.dumps(content["fingerprints"][0]))
        far["id"] = "far"
        far["fields"] |= {"jax": "0.0.1", "jaxlib": "0.0.1", "platform": "tpu"}
        content["fingerprints"][0]["fields"]["cpu cores"] = "1024"
        content["fingerprints"].insert(0, far)
        content["executables"] += [{**each, "fingerprint": "far"} for each in content["executables"]]

    with pytest.raises(ArtifactUnavailable) as caught:
        aot.load(altered(bundle, tmp_path, change), "predict", SMALL, jax.devices()[0])
    assert str(caught.value.seen) == "cpu cores=1024"


def test_the_64_bit_switch_is_named(bundle, tmp_path):
    code = (
        "import sys, jax; from servax.core.errors import ArtifactUnavailable; from servax.stages.buckets import Bucket;"
        "from servax.targets import aot; from servax.targets.bundle import Bundle\n"
        "try: aot.load(Bundle.open(sys.argv[1]), 'predict', Bucket.parse(sys.argv[2]), jax.devices()[0])\n"
        "except ArtifactUnavailable as error: print(error.where, '|', error.seen, '|', error.expected)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(bundle.root), SMALL.label],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
    )
    assert child.stdout.strip() == (
        f"predict@{SMALL.label}: jax_enable_x64 | jax_enable_x64=False | jax_enable_x64=True"
    )


def test_the_fingerprint_is_checked_before_the_file_is_read(bundle, tmp_path):
    other = altered(bundle, tmp_path, lambda content: content["fingerprints"][0]["fields"].update(jaxlib="0.1.2"))
    for each in other.manifest.executables:
        (other.root / each.file).unlink()
    with pytest.raises(ArtifactUnavailable, match="compiled for fingerprint"):
        aot.load(other, "predict", SMALL, jax.devices()[0])


def test_one_changed_byte_is_found_before_anything_is_loaded(bundle, tmp_path):
    other = altered(bundle, tmp_path, lambda content: None)
    record = next(each for each in other.manifest.executables if each.bucket == SMALL.label)
    data = bytearray((other.root / record.file).read_bytes())
    data[len(data) // 2] ^= 1
    (other.root / record.file).write_bytes(bytes(data))
    with pytest.raises(ArtifactUnavailable, match="cannot be used") as caught:
        aot.load(other, "predict", SMALL, jax.devices()[0])
    assert record.file in str(caught.value.where)
    assert other.manifest.files[record.file].sha256 in str(caught.value.where)
    assert "servax compile" in str(caught.value.remedy)
    mark = fingerprint.current([jax.devices()[0]])
    assert not aot.is_usable(other, "predict", SMALL, mark)
    assert aot.is_usable(other, "predict", LARGE, mark)
    assert aot.load(other, "predict", LARGE, jax.devices()[0]).target == "aot"


def test_a_right_digest_over_wrong_bytes_is_an_error_and_no_crash(bundle, tmp_path):
    other = altered(bundle, tmp_path, lambda content: None)
    file = next(each.file for each in other.manifest.executables if each.bucket == SMALL.label)
    other = amend(other, {file: b"not an executable"}, lambda each: each)
    with pytest.raises(ArtifactUnavailable, match="does not load") as caught:
        aot.load(other, "predict", SMALL, jax.devices()[0])
    assert file in str(caught.value.where)


def test_an_executable_of_another_program_is_refused(bundle, tmp_path):
    def change(content):
        for each in content["programs"]:
            each["stablehlo_digest"] = "0" * 64

    with pytest.raises(ArtifactUnavailable, match="another program") as caught:
        aot.load(altered(bundle, tmp_path, change), "predict", SMALL, jax.devices()[0])
    assert caught.value.expected == "StableHLO " + "0" * 64


def test_a_bucket_without_executable_is_named(bundle, tmp_path):
    def change(content):
        content["executables"] = [each for each in content["executables"] if each["bucket"] != LARGE.label]

    other = altered(bundle, tmp_path, change)
    with pytest.raises(ArtifactUnavailable, match="no executable") as caught:
        aot.load(other, "predict", LARGE, jax.devices()[0])
    assert f"predict@{LARGE.label}" in str(caught.value.where)


def test_adding_again_replaces_and_keeps_other_machines(bundle, tmp_path):
    def change(content):
        content["fingerprints"][0]["id"] = "elsewhere"
        content["fingerprints"][0]["fields"]["device kind"] = "abacus"
        for each in content["executables"]:
            each["fingerprint"] = "elsewhere"

    other = altered(bundle, tmp_path, change)
    device = jax.devices()[0]
    made = aot.compile_executable(other, "predict", SMALL, device)
    twice = aot.add(aot.add(other, [made]), [made])
    assert len(twice.manifest.executables) == 4
    assert {each.id for each in twice.manifest.fingerprints} == {"elsewhere", made.record.fingerprint}
    assert aot.load(Bundle.open(other.root), "predict", SMALL, device).target == "aot"


def test_what_xla_does_not_compile_names_the_export_and_the_cause(bundle):
    def bad(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    lowered = jax.jit(bad).lower(jax.ShapeDtypeStruct((2,), "float32"))
    record = bundle.manifest.program("predict", SMALL.label)
    with pytest.raises(ArtifactUnavailable, match="XLA does not compile") as caught:
        compile_export(LoweredExport(record, lowered, {}))
    assert caught.value.where == record.file
    assert "no_such_target" in caught.value.seen


def test_a_library_that_does_not_import_is_a_reason_to_fall_back(bundle, monkeypatch):
    def broken(_calls):
        raise ImportError("no scipy here")

    monkeypatch.setattr(aot, "_prepare_libraries", broken)
    with pytest.raises(ArtifactUnavailable, match="does not load") as caught:
        aot.load(bundle, "predict", SMALL, jax.devices()[0])
    assert caught.value.seen == "ImportError: no scipy here"
    assert "servax compile" in caught.value.remedy


def test_only_what_is_missing_is_compiled(bundle, tmp_path):
    def change(content):
        content["executables"] = content["executables"][1:]

    other = altered(bundle, tmp_path, change)
    device = jax.devices()[0]
    mark = fingerprint.current([device])
    assert aot.obstacles(other, device) == ()
    complete, added = aot.compile_missing(other, device, mark)
    assert (added, len(complete.manifest.executables)) == (1, 3)
    assert aot.compile_missing(complete, device, mark)[1] == 0


def test_what_stands_in_the_way_of_executables(bundle, tmp_path):
    def change(content):
        content["fingerprints"][0]["fields"]["cpu cores"] = "1024"

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    device = jax.devices()[0]
    (other,) = aot.obstacles(altered(bundle, tmp_path / "one", change), device)
    assert "cpu cores: 1024 in the bundle" in other
    (none,) = aot.obstacles(altered(bundle, tmp_path / "two", lambda content: content.update(executables=[])), device)
    assert none.startswith("the bundle has no executables; run `servax compile ")


def test_executables_are_refused_for_a_platform_that_the_exports_lack():
    with pytest.raises(UsageError, match="aot compiles for this machine's cpu") as caught:
        aot.check(Materials(lambda: jax.devices()[0], ("cuda", "tpu")))
    assert caught.value.seen == "cuda, tpu"
    assert "--platform cpu" in caught.value.remedy
    aot.check(Materials(lambda: jax.devices()[0], ("cpu",)))


def test_executables_are_whole_although_a_persistent_cache_has_the_program(bundle, tmp_path):
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    try:
        device = jax.devices()[0]
        # Through the cache, as `jit` and `export` do; then the same program for an executable.
        from servax.targets import exported

        exported.load(bundle, "predict", LARGE, device)
        assert list((tmp_path / "cache").iterdir())
        made = aot.compile_executable(bundle, "predict", LARGE, device)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    copy = altered(bundle, tmp_path, lambda content: None)
    aot.add(copy, [made])
    x = np.random.default_rng(2).normal(size=(4, 8, 4)).astype(np.float32)
    (_, y), _ = in_child(tmp_path, copy, "predict", LARGE.label, params=tuple(flatten(PARAMS).values()), inputs=[x])
    np.testing.assert_allclose(y, predict_by_numpy(x), rtol=1e-5, atol=1e-5)


def test_each_device_has_executables_of_its_own(tmp_path):
    code = """
import sys
sys.path.insert(0, sys.argv[2])
import jax, numpy as np
from bundle_toys import COUNT, STATIC, flat_params, put, write_bundle
from servax.core.errors import ArtifactUnavailable
from servax.targets import aot

bundle = write_bundle(sys.argv[1], {"count": (COUNT, (STATIC,))}, executables=True)
second = jax.devices()[2]
try:
    aot.load(bundle, "count", STATIC, second)
except ArtifactUnavailable as error:
    print(error.seen, "|", error.expected)
bundle = aot.add(bundle, [aot.compile_executable(bundle, "count", STATIC, second)])
program = aot.load(bundle, "count", STATIC, second).program
state, outputs = program(
    flat_params(device=second), (put(np.zeros(4, np.float32), second),), (put(np.ones(4, np.float32), second),)
)
print(float(outputs[0]), state[0].devices() == {second})
"""
    from pathlib import Path

    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "toy.bundle"), str(Path(__file__).parents[1])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    )
    assert child.stdout.splitlines() == ["device ids=0 | device ids=2", "4.0 True"]


def test_the_program_runs_here_too(bundle):
    loaded = aot.load(bundle, "count", STATIC, jax.devices()[0])
    state = put(np.zeros(4, np.float32))
    (state2,), (total,) = loaded.program(flat_params(), (state,), (put(np.full(4, 2, np.float32)),))
    assert state.is_deleted()
    assert float(total) == 8
    np.testing.assert_array_equal(state2, np.full(4, 2))
