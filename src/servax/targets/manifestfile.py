"""`bundle.json` on storage: read with errors that say what is wrong, written by a rename."""

from __future__ import annotations

import json
import secrets
from typing import Any, cast

from etils import epath
from pydantic import ValidationError

from servax.core.errors import BundleError
from servax.targets.manifest import FORMAT, Manifest

MANIFEST = "bundle.json"
REBUILD = "copy the bundle again, or build it again with `servax build`"


def read_manifest(root: epath.Path) -> Manifest:
    """The manifest of the bundle in `root`.

    Raises:
      BundleError: there is none, it is damaged, or its format is higher than this version reads.
    """
    path = root / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise _not_a_bundle(root) from None
    except (UnicodeDecodeError, IsADirectoryError, PermissionError) as error:
        raise _damaged_manifest(path, str(error)) from None
    try:
        content: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _damaged_manifest(path, f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _damaged_manifest(path, f"a JSON {type(content).__name__}, not an object")
    number: object = cast("dict[str, object]", content).get("format")
    if isinstance(number, int) and number > FORMAT:
        raise BundleError(
            "the bundle was written by a newer servax",
            where=str(path),
            seen=f"format {number}",
            expected=f"format {FORMAT} or lower",
            remedy="upgrade servax here, or build the bundle again with this version",
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise _damaged_manifest(path, "; ".join(faults)) from None


def write_manifest(root: epath.Path, manifest: Manifest) -> None:
    """Writes the manifest under a temporary name and renames it, so that readers see the old one or the new one."""
    path = root / MANIFEST
    temporary = root / f".{MANIFEST}.tmp-{secrets.token_hex(4)}"
    try:
        temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _not_a_bundle(root: epath.Path) -> BundleError:
    if not root.exists():
        seen, remedy = "no such path", "check the path, or build the bundle with `servax build`"
    elif not root.is_dir():
        seen, remedy = "a file", "name the directory that `servax build` wrote"
    elif (root / "_CHECKPOINT_METADATA").exists() or (root / "_METADATA").exists():
        seen = "an Orbax checkpoint"
        remedy = f"build a bundle from it: `servax build MODEL.py:NAME --checkpoint {root} -o OUTPUT`"
    elif versions := sorted(int(each.name) for each in root.iterdir() if _is_version(each)):
        seen = f"a model of a store, with versions {', '.join(map(str, versions))}"
        remedy = f"name one of them: {root / str(versions[-1])}"
    else:
        names = sorted(each.name for each in root.iterdir())
        seen = f"a directory with {', '.join(names[:8]) or 'nothing'}{', ...' if len(names) > 8 else ''}"
        remedy = "name the directory that `servax build` wrote"
    return BundleError(
        "this is not a bundle", where=str(root), seen=seen, expected=f"a directory with {MANIFEST}", remedy=remedy
    )


def _is_version(path: epath.Path) -> bool:
    return path.name.isdecimal() and (path / MANIFEST).exists()


def _damaged_manifest(path: epath.Path, seen: str) -> BundleError:
    return BundleError(
        "the bundle's manifest is damaged",
        where=str(path),
        seen=seen,
        expected=f"a manifest of format {FORMAT} (docs/schema/bundle-{FORMAT}.schema.json)",
        remedy=REBUILD,
    )
