"""Contract 9: a bundle whose executables do not fit serves through its exports, says so once, or exits 3."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import servax
from servax.core.errors import ArtifactUnavailable, BundleError
from servax.core.events import Event, Notice, listening
from servax.targets.bundle import Bundle

Copy = Callable[[Bundle], Path]


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "bundle.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def other_fingerprint(field: str, value: str) -> Callable[[dict[str, Any]], None]:
    """Makes every executable one of a machine that differs in a field."""

    def edit(manifest: dict[str, Any]) -> None:
        from servax.stages.fingerprint import Fingerprint

        (record,) = manifest["fingerprints"]
        record["fields"][field] = value
        record["id"] = Fingerprint(record["fields"]).id
        for executable in manifest["executables"]:
            executable["fingerprint"] = record["id"]

    return edit


def flip_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def serve(bundle: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servax", "serve", str(bundle), "--http", "0", "--grpc", "-1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def notices_of(bundle: Path, golden: Sequence[dict[str, Any]]) -> list[str]:
    """Loads and calls the bundle, checks its numbers, and returns the warnings on the way."""
    said: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Notice) and event.level == "warning":
            said.append(event.message)

    with listening(listener), servax.load(bundle) as servable:
        answer = servable.predict(text=[golden[0]["text"]])["embedding"][0]
    np.testing.assert_allclose(answer, golden[0]["embedding"], rtol=0, atol=1e-4)
    return said


@pytest.mark.parametrize(
    ("field", "value"), [("cpu model", "an older CPU"), ("jaxlib", "0.4.30")], ids=["fingerprint", "jax version"]
)
def test_executables_of_another_machine(
    minilm_bundle: Bundle, minilm_golden: Sequence[dict[str, Any]], copy_of: Copy, field: str, value: str
) -> None:
    path = copy_of(minilm_bundle)
    edit_manifest(path, other_fingerprint(field, value))
    (said,) = notices_of(path, minilm_golden)
    assert "exports" in said
    assert field in said
    assert value in said
    with pytest.raises(ArtifactUnavailable, match=field):
        servax.load(path, require="aot")
    refused = serve(path, "--require", "aot")
    assert refused.returncode == 3
    assert field in refused.stderr
    assert "servax compile" in refused.stderr


def test_an_executable_with_one_flipped_byte(
    minilm_bundle: Bundle, minilm_golden: Sequence[dict[str, Any]], copy_of: Copy
) -> None:
    path = copy_of(minilm_bundle)
    damaged = path / minilm_bundle.manifest.executables[0].file
    flip_one_byte(damaged)
    (said,) = notices_of(path, minilm_golden)
    assert str(damaged) in said
    refused = serve(path, "--require", "aot")
    assert refused.returncode == 3
    assert str(damaged) in refused.stderr


def test_executables_that_are_gone_are_done_without_and_made_again(
    minilm_bundle: Bundle, minilm_golden: Sequence[dict[str, Any]], copy_of: Copy
) -> None:
    from servax.workflow.compile import compile_bundle

    path = copy_of(minilm_bundle)
    gone = path / minilm_bundle.manifest.executables[0].file
    gone.unlink()
    (said,) = notices_of(path, minilm_golden)
    assert str(gone) in said
    assert compile_bundle(path).added == 1
    assert notices_of(path, minilm_golden) == []


def test_a_parameter_file_with_one_flipped_byte_refuses_to_load(minilm_bundle: Bundle, copy_of: Copy) -> None:
    path = copy_of(minilm_bundle)
    largest = max(
        (each for each in (path / "params").rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
    )
    flip_one_byte(largest)
    with pytest.raises(BundleError, match=largest.name):
        servax.load(path)


def test_without_exports_there_is_no_fallback(minilm_bundle: Bundle, copy_of: Copy) -> None:
    path = copy_of(minilm_bundle)
    edit_manifest(path, other_fingerprint("cpu model", "an older CPU"))
    edit_manifest(path, lambda manifest: manifest.update(programs=[]))
    with pytest.raises(ArtifactUnavailable, match="an older CPU"):
        servax.load(path)


def test_compile_adds_this_machines_executables(minilm_bundle: Bundle, copy_of: Copy) -> None:
    from servax.workflow.compile import compile_bundle

    path = copy_of(minilm_bundle)
    edit_manifest(path, other_fingerprint("cpu model", "an older CPU"))
    report = compile_bundle(path)
    assert (report.added, report.present) == (12, 0)
    assert len(report.bundle.manifest.fingerprints) == 2
    again = compile_bundle(path)
    assert (again.added, again.present) == (0, 12)
    with servax.load(path, require="aot") as servable:
        assert servable.predict(text=["hello"])["embedding"].shape == (1, 384)


def test_no_cuda_is_an_error_and_not_a_cpu(minilm_bundle: Bundle) -> None:
    refused = serve(Path(minilm_bundle.root), "--platform", "cuda")
    assert refused.returncode == 3
    assert "cuda" in refused.stderr
