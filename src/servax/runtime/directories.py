"""A store's directories: `STORE/<name>/<integer version>/`; what is there, and whether a version is complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from etils import epath

from servax.core.errors import BundleError
from servax.targets.bundle import EXECUTABLES, is_bundle
from servax.targets.manifestfile import MANIFEST, read_manifest


def models_of(root: epath.Path) -> tuple[str, ...]:
    """Names of the directories that hold a version, in order."""
    return tuple(sorted(each.name for each in _directories(root) if versions_of(each)))


def versions_of(folder: epath.Path) -> Mapping[int, epath.Path]:
    """The directories of `folder` whose names are whole numbers, the smallest first; others are nobody's business."""
    found = {int(each.name): each for each in _directories(folder) if is_version(each.name)}
    return dict(sorted(found.items()))


def is_version(name: str) -> bool:
    """Whether a directory's name is a version: a whole number without leading zeros."""
    return name.isdecimal() and str(int(name)) == name


def latest_bundle(folder: str | os.PathLike[str]) -> epath.Path | None:
    """The newest version in `STORE/NAME` that has a manifest; None where there is none."""
    root = epath.Path(folder).expanduser()
    return next((path for _, path in sorted(versions_of(root).items(), reverse=True) if is_bundle(path)), None)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory of models, `NAME/VERSION/bundle.json`, or an empty one that may become so."""
    if str(path).startswith(("http://", "https://")) or is_bundle(path):
        return False
    root = epath.Path(path).expanduser()
    if not root.is_dir():
        return False
    folders = _directories(root)
    return not any(root.iterdir()) or any(latest_bundle(folder) is not None for folder in folders)


def unfinished(path: epath.Path) -> str | None:
    """What a version that is still being copied lacks; None where all that its manifest lists is there.

    Raises:
      BundleError: the manifest cannot be read.
    """
    if not (path / MANIFEST).exists():
        return f"{MANIFEST} is not there yet"
    files = read_manifest(path).files
    missing = [rel for rel, record in files.items() if _size(path / rel) != record.bytes]
    if not missing:
        return None
    return f"{len(missing)} of {len(files)} files are not there or not whole, {missing[0]} among them"


def lacks_only_executables(path: epath.Path) -> bool:
    """Whether a version can be served although files are missing: executables can be done without."""
    try:
        files = read_manifest(path).files
    except BundleError:
        return False
    missing = [rel for rel, record in files.items() if _size(path / rel) != record.bytes]
    return all(rel.startswith(f"{EXECUTABLES}/") and _size(path / rel) is None for rel in missing)


def stamp(path: epath.Path) -> str:
    """A digest over names, sizes and times of a version's files: it differs once something was changed there."""
    digest = hashlib.sha256()
    for directory, folders, names in path.walk():
        folders.sort()
        for name in sorted(names):
            try:
                digest.update(os.fsencode(f"{directory / name} {_told(directory / name)}\n"))
            except FileNotFoundError:
                continue
    return digest.hexdigest()


def _told(path: epath.Path) -> str:
    if "://" in str(path):
        told = path.stat()
        return f"{told.length} {told.mtime}"
    local = os.stat(path)  # to the nanosecond
    return f"{local.st_size} {local.st_mtime_ns} {local.st_ino}"


def _size(path: epath.Path) -> int | None:
    try:
        return path.stat().length
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_named(name: str) -> bool:
    """Whether a directory is anybody's business: not hidden, and of a name that can be asked for."""
    return not name.startswith(".") and name.isprintable()  # what is not UTF-8 are surrogates, which are not


def _directories(path: epath.Path) -> list[epath.Path]:
    try:
        return [each for each in path.iterdir() if _is_named(each.name) and each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
