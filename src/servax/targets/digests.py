"""SHA-256 of files, read in blocks and several at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from servax.targets.manifest import FileRecord

_BLOCK = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)


def sha256(data: bytes) -> str:
    """The SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: epath.Path) -> FileRecord:
    """Digest and size of one file, read in blocks of 1 MiB.

    Raises:
      FileNotFoundError: there is no such file.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def digest_files(paths: Mapping[str, epath.Path]) -> dict[str, FileRecord | None]:
    """Digests of files by name, None for a file that is not there; hashing releases the GIL, so threads run beside."""

    def digest(path: epath.Path) -> FileRecord | None:
        try:
            return digest_file(path)
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(digest, paths.values()), strict=True))
