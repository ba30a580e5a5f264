"""The bundle on disk: opened, checked and read; written beside its place and renamed; added to.

Paths are `etils.epath` paths. On a local file system a bundle appears, and is replaced, by a rename: a reader sees
all of it or nothing. An object store has no rename of directories: there the copy is not atomic, and a reader that
comes too early is told which file is missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType

from etils import epath

from servax.core.errors import BundleError, UsageError
from servax.targets.digests import digest_file, digest_files, sha256
from servax.targets.manifest import FileRecord, Manifest
from servax.targets.manifestfile import MANIFEST, REBUILD, read_manifest, write_manifest
from servax.targets.verdicts import ParityReport

PARAMETERS = "params"
EXECUTABLES = "executables"
README = "README.md"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A directory that `servax build` wrote, opened: its manifest read, its other files not yet.

    Attributes:
      root: the directory.
      manifest: what `bundle.json` says.
    """

    root: epath.Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """The bundle in the directory `path`.

        Raises:
          BundleError: there is no bundle, its manifest is damaged, of a format that this version does not read, or
            lists files that are not there.
        """
        root = epath.Path(path).expanduser()
        bundle = cls(root, read_manifest(root))
        missing = [
            rel
            for rel in bundle.manifest.files
            # An executable that is gone can be made again, or done without.
            if not rel.startswith(f"{EXECUTABLES}/") and not bundle.path(rel).exists()
        ]
        if missing:
            raise BundleError(
                f"{len(missing)} of the files that the bundle lists are not there",
                where=", ".join(str(root / rel) for rel in missing),
                seen="no such file",
                expected=f"the {len(bundle.manifest.files)} files listed in {MANIFEST}",
                remedy=REBUILD,
            )
        return bundle

    @property
    def parity(self) -> ParityReport:
        """What was proved of it: verdicts per target and platform, with numbers."""
        return ParityReport(self.manifest.verdicts)

    def path(self, rel: str) -> epath.Path:
        """The path of a file of this bundle.

        Raises:
          BundleError: the path leads out of the bundle.
        """
        _inside(rel)
        return self.root / rel

    def read(self, rel: str) -> bytes:
        """The bytes of one file, checked against its digest.

        Raises:
          BundleError: the manifest does not list the file, the file is missing, or its bytes changed.
        """
        record = self.manifest.files.get(rel)
        if record is None:
            raise BundleError(
                f"the bundle has no file {rel}",
                where=str(self.root / MANIFEST),
                expected=f"{rel} among its {len(self.manifest.files)} files",
                remedy=REBUILD,
            )
        path = self.path(rel)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise _damage([f"{path}: no such file, expected {_expected(record)}"]) from None
        if (seen := sha256(data)) != record.sha256:
            raise _damage([f"{path}: SHA-256 {seen} ({len(data)} bytes), expected {_expected(record)}"])
        return data

    def check(self, prefix: str) -> None:
        """Verifies every file under `prefix` against its digest: `params`, `saved_model`, or one file's path.

        Files are read in blocks, several at a time, so memory stays small whatever their size.

        Raises:
          BundleError: names every file that is missing or changed, with the digest seen and the digest expected.
        """
        records = {
            rel: record
            for rel, record in self.manifest.files.items()
            if rel == prefix or rel.startswith(prefix.rstrip("/") + "/")
        }
        if not records:
            raise BundleError(f"the bundle has no files under {prefix}", where=str(self.root), remedy=REBUILD)
        seen = digest_files({rel: self.path(rel) for rel in records})
        faults: list[str] = []
        for rel, record in records.items():
            found = seen[rel]
            if found is None:
                faults.append(f"{self.path(rel)}: no such file, expected {_expected(record)}")
            elif found != record:
                faults.append(
                    f"{self.path(rel)}: SHA-256 {found.sha256} ({found.bytes} bytes), expected {_expected(record)}"
                )
        if faults:
            raise _damage(faults)


def is_bundle(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory with a manifest; a server's URL is none."""
    if str(path).startswith(("http://", "https://")):
        return False
    return (epath.Path(path).expanduser() / MANIFEST).exists()


class BundleWriter:
    """A bundle in the making: a temporary sibling of its place, renamed by `finish`, removed if that never comes.

    ```
    with BundleWriter("net.bundle") as writer:
        writer.write("programs/predict/batch=8.jaxexport", data)
        save(writer.root / "params", params)
        bundle = writer.finish(manifest)
    ```

    Attributes:
      path: where the bundle will be.
      root: where its files are written until then.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = epath.Path(path).expanduser().absolute()
        self.root = self.path.parent / f".{self.path.name}.tmp-{secrets.token_hex(4)}"
        self._overwrite = overwrite
        self._finished = False

    def __enter__(self) -> BundleWriter:
        """Makes the temporary directory.

        Raises:
          UsageError: the path exists, and is not a bundle that may be overwritten.
        """
        self._refuse_existing()
        self.root.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.root.rmtree(missing_ok=True)

    def write(self, rel: str, data: bytes | str) -> epath.Path:
        """Writes one file, and the directories above it; returns its path."""
        _inside(rel)
        path = self.root / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def draft(self, manifest: Manifest) -> Bundle:
        """The bundle so far, in its temporary place: for `amend`, and for the children that prove it."""
        complete = manifest.model_copy(update={"files": _digests(self.root)})
        write_manifest(self.root, complete)
        return Bundle(self.root, complete)

    def finish(self, manifest: Manifest) -> Bundle:
        """Adds every file's digest to `manifest`, writes it, and puts the bundle in its place.

        A bundle that is overwritten is moved aside first and removed last; should the rename fail, it is put back.

        Raises:
          UsageError: meanwhile something else took the path.
        """
        complete = self.draft(manifest).manifest
        self._refuse_existing()
        if self._overwrite and self.path.exists():
            aside = self.path.parent / f".{self.path.name}.old-{secrets.token_hex(4)}"
            self.path.rename(aside)
            try:
                self.root.rename(self.path)
            except BaseException:
                aside.rename(self.path)
                raise
            self._finished = True
            aside.rmtree()
        else:
            self.root.rename(self.path)  # fails where another writer has put a bundle there just now
            self._finished = True
        return Bundle(self.path, complete)

    def _refuse_existing(self) -> None:
        if not self.path.exists():
            return
        if not (self.path / MANIFEST).exists():
            raise UsageError(
                "the output exists and is not a bundle, so it is not touched",
                where=str(self.path),
                expected="a path that does not exist yet" + (", or a bundle" if self._overwrite else ""),
                remedy="name another output",
            )
        if not self._overwrite:
            raise UsageError(
                "the output exists",
                where=str(self.path),
                seen="a bundle",
                expected="a path that does not exist yet",
                remedy="name another output, or allow overwriting (--overwrite)",
            )


def amend(
    bundle: Bundle, files: Mapping[str, bytes | os.PathLike[str]], change: Callable[[Manifest], Manifest]
) -> Bundle:
    """The bundle with these files added or replaced and its manifest changed.

    Every file is first written under a temporary name, then all are renamed, then the manifest: a reader that holds
    the old manifest keeps finding the old files, and a failure while writing leaves the bundle as it was. `change`
    is given the manifest as it is on disk at that moment, and local bundles are locked meanwhile, so two machines
    that add their executables to a shared bundle do not lose each other's.

    Args:
      bundle: what to add to.
      files: by path in the bundle, the bytes, or the path of a file to copy.
      change: from the manifest on disk, the new one; digests of `files` are filled in afterwards.
    """
    root = bundle.root
    with _locked(root):
        manifest = read_manifest(root)
        suffix = f".tmp-{secrets.token_hex(4)}"
        written: dict[str, epath.Path] = {}
        try:
            for rel, source in files.items():
                _inside(rel)
                path = root / rel
                path.parent.mkdir(parents=True, exist_ok=True)
                written[rel] = path.parent / f".{path.name}{suffix}"
                if isinstance(source, bytes):
                    written[rel].write_bytes(source)
                else:
                    epath.Path(source).copy(written[rel])
            records = {rel: digest_file(path) for rel, path in written.items()}
            changed = change(manifest)
            complete = changed.model_copy(update={"files": {**changed.files, **records}})
            for rel, path in written.items():
                path.replace(root / rel)
            write_manifest(root, complete)
        finally:
            for path in written.values():
                path.unlink(missing_ok=True)
    return Bundle(root, complete)


def _damage(faults: list[str]) -> BundleError:
    return BundleError(
        "a file of the bundle is damaged" if len(faults) == 1 else f"{len(faults)} files of the bundle are damaged",
        where="; ".join(faults),
        remedy=REBUILD,
    )


def _expected(record: FileRecord) -> str:
    return f"{record.sha256} ({record.bytes} bytes)"


def _inside(rel: str) -> None:
    parts = PurePosixPath(rel).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise BundleError(
            "a file's path leads out of the bundle",
            where=repr(rel),
            expected="a path relative to the bundle's directory",
        )


def _digests(root: epath.Path) -> dict[str, FileRecord]:
    paths: dict[str, epath.Path] = {}
    for directory, _, names in root.walk():
        for name in names:
            rel = (directory / name).relative_to(root).as_posix()
            if rel != MANIFEST:
                paths[rel] = root / rel
    records = digest_files(paths)
    return {rel: record for rel in sorted(records) if (record := records[rel]) is not None}


@contextlib.contextmanager
def _locked(root: epath.Path) -> Generator[None]:
    if os.name != "posix" or "://" in str(root):
        yield
        return
    import fcntl

    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
