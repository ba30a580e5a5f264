"""A store whose versions are bundles: what they need, and which of them share their programs."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Hashable
from dataclasses import dataclass, replace

from etils import epath

from servax.core.device import Device
from servax.core.errors import UsageError
from servax.core.tensors import dtype_of
from servax.runtime.directories import is_store
from servax.runtime.local import LocalServable
from servax.runtime.store import Store, StoreOptions
from servax.targets.bundle import Bundle
from servax.targets.manifest import Manifest
from servax.targets.target import ProgramTable
from servax.workflow.device import pick_device
from servax.workflow.load import LoadOptions, load_bundle


def open_store(path: str | os.PathLike[str], options: StoreOptions, load: LoadOptions) -> Store:
    """The store in the directory `path`; nothing is loaded before `Store.start`.

    Args:
      path: `STORE`, with a bundle in each `STORE/<name>/<integer version>/`.
      options: which versions are served, and how they change.
      load: how each is loaded; its `name` and `version` are the store's to give.

    Raises:
      UsageError: the directory is something else.
    """
    if not is_store(path):
        raise UsageError(
            "this is not a store",
            where=os.fspath(path),
            expected="a directory of NAME/VERSION/bundle.json, VERSION being a whole number, or an empty one",
            remedy="name the directory above the models' names",
        )
    return Store(path, BundleLoader(load), options)


@dataclass(frozen=True, slots=True)
class BundleLoader:
    """Makes servables of a store's versions; `runtime.store.Loader`."""

    options: LoadOptions

    def __call__(self, path: epath.Path, name: str, version: str) -> BundleCandidate:
        """The version in `path`, its manifest read.

        Raises:
          BundleError: there is no bundle, its manifest is damaged, or a file that it lists is missing.
          PlatformError: the platform asked for is not here.
        """
        options = replace(self.options, name=name, version=version)
        return BundleCandidate(Bundle.open(path), options, pick_device(options.platform))


@dataclass(frozen=True, slots=True)
class BundleCandidate:
    """A bundle that may be loaded; `runtime.store.Candidate`."""

    bundle: Bundle
    options: LoadOptions
    device: Device

    @property
    def programs(self) -> Hashable:
        """Equal where the compiled programs of one bundle serve the other; None where source is traced."""
        return None if self.options.require == "jit" else programs_digest(self.bundle.manifest)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters; `Candidate.parameter_bytes`."""
        records = self.bundle.manifest.parameters
        return sum(math.prod(record.shape) * dtype_of(record.dtype).itemsize for record in records)

    @property
    def program_bytes(self) -> int:
        """By XLA's memory analysis at the build: code of all programs, outputs and temporaries of the largest."""
        memories = [record.memory for record in self.bundle.manifest.programs]
        code = sum(memory.get("code", 0) for memory in memories)
        return code + max((memory.get("temp", 0) + memory.get("output", 0) for memory in memories), default=0)

    def load(self, table: ProgramTable | None) -> LocalServable:
        """The servable, LOADING; errors as of `load_bundle`."""
        return load_bundle(self.bundle.root, self.options, table=table)


def programs_digest(manifest: Manifest) -> str:
    """Equal for bundles whose compiled programs are interchangeable.

    These are the digests of the programs, of the exports where there are any, else of the executables' files, and all
    that a program is called with: signatures, buckets, parameters' paths, dtypes and shapes, and state.
    """
    programs = {
        f"{record.function}@{record.bucket}": record.stablehlo_digest
        for record in manifest.programs
        if record.bucket in manifest.functions[record.function].buckets
    }
    executables = {
        f"{record.fingerprint} {record.function}@{record.bucket}": manifest.files[record.file].sha256
        for record in manifest.executables
        if record.file in manifest.files
    }
    told = {
        "programs": programs or executables,
        "functions": {
            name: record.model_dump(mode="json", exclude={"processors"}) for name, record in manifest.functions.items()
        },
        "parameters": [(record.path, record.dtype, record.shape) for record in manifest.parameters],
        "state": [record.model_dump(mode="json") for record in manifest.state],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
