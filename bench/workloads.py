"""What the benchmarks share: a bundle to measure, the machine's description, and where results go."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".servax" / "bench"


def minilm_checkpoint() -> Path:
    """all-MiniLM-L6-v2 as an Orbax checkpoint, converted once."""
    from servax.zoo import minilm

    path = WORK / "minilm.checkpoint"
    if not path.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        minilm.convert(minilm.package_file("model.safetensors"), path)
    return path


def minilm_bundle(targets: Sequence[str]) -> Path:
    """A bundle of MiniLM for the jax that runs here, with its 12 buckets."""
    from servax.workflow.build import build

    path = WORK / f"minilm-{'-'.join(targets)}.bundle"
    checkpoint = minilm_checkpoint()
    build("servax.zoo.minilm:model", checkpoint=str(checkpoint), targets=targets, output=str(path), overwrite=True)
    return path


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "date": time.strftime("%Y-%m-%d"),
    }


def write_results(script: Path, results: dict[str, Any], suffix: str = "") -> None:
    """Writes raw results beside the script, as results/NAME.json."""
    path = script.resolve().parent / "results" / f"{script.stem}{suffix}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"raw results: {path.relative_to(ROOT)}")
