"""Stores of toy servables: each version a directory whose manifest's name says what becomes of it.

A version's programs are those of `serving_toys`; its parameters are `w` and `b` of `y = w * x + b`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

import serving_toys as toys
from servax.core.errors import BundleError
from servax.runtime.local import LocalServable
from servax.targets.manifest import FileRecord, Manifest, ProvenanceRecord
from servax.targets.target import ProgramTable


def put_version(root: Path, name: str, version: int, *, w: float = 2.0, b: float = 1.0, broken: str = "") -> Path:
    """Writes `root/name/version`, whole at once: a manifest that lists one file, the parameters."""
    path = root / name / str(version)
    temporary = root / name / f".{version}.tmp-abcd"
    temporary.mkdir(parents=True)
    content = json.dumps({"w": w, "b": b, "broken": broken}).encode()
    (temporary / "params").write_bytes(content)
    (temporary / "bundle.json").write_text(manifest_of(len(content)).model_dump_json())
    temporary.rename(path)
    return path


def manifest_of(size: int, *, executable: bool = False) -> Manifest:
    files = {"params": FileRecord(sha256="0" * 64, bytes=size)}
    if executable:
        files["executables/here/predict"] = FileRecord(sha256="0" * 64, bytes=3)
    return Manifest(
        name="toy",
        created="2026-11-30T12:00:00Z",
        versions={},
        platforms=("cpu",),
        targets=("export",),
        provenance=ProvenanceRecord(),
        parameters=(),
        functions={},
        files=files,
    )


@dataclass
class ToyLoader:
    """Makes candidates of what `put_version` wrote, and keeps a record of what was loaded how."""

    parameter_bytes: int = 8
    program_bytes: int = 0
    device: object = None
    loads: list[tuple[str, str, bool]] = field(default_factory=list)
    """Name, version, and whether the programs were reused."""
    on_load: Callable[[], object] = lambda: None

    def __call__(self, path, name, version) -> ToyCandidate:
        return ToyCandidate(self, path, name, version)


@dataclass
class ToyCandidate:
    loader: ToyLoader
    path: Path
    name: str
    version: str
    programs: str = "toy"

    @property
    def device(self):
        return self.loader.device or jax.devices()[0]

    @property
    def parameter_bytes(self) -> int:
        return self.loader.parameter_bytes

    @property
    def program_bytes(self) -> int:
        return self.loader.program_bytes

    def load(self, table: ProgramTable | None) -> LocalServable:
        self.loader.on_load()
        told = json.loads((Path(self.path) / "params").read_text())
        self.loader.loads.append((self.name, self.version, table is not None))
        if told["broken"] == "load":
            raise BundleError("a file of the bundle is damaged", where=str(self.path))
        changes = {}
        if told["broken"] == "warm":
            changes["table"] = toys.with_program(next(iter(toys.GRID)), _fails)
        elif table is not None:
            changes["table"] = table
        return toys.toy(self.name, version=self.version, params=toys.params(told["w"], told["b"]), **changes)


def _fails(params, state, inputs):
    raise RuntimeError("not this one")


def answer(servable_or_store, name: str = "net", version: str | None = None, label: str | None = None) -> float:
    """What a store's model answers to x = 1: `w + b`."""
    x = np.ones((1, 1), np.float32)
    return float(servable_or_store.catalog.resolve(name, version, label).predict(x=x)["y"][0, 0])
