"""A digest over a model's sources, by which the `jit` wrapper finds out that they changed since the build."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from servax.model.model import Model


def source_digest(model: Model) -> str | None:
    """SHA-256, in hex, over the sources of the model's package, or over its file and those beside it that it imports.

    Only contents and paths relative to the package or folder count, so that a copy elsewhere has the same digest.

    Returns:
      None for a model whose source is no file, as in a notebook.
    """
    file = model.source_file
    if file is None or not file.is_file():
        return None
    root = _package_root(model, file)
    if root is not None:
        files = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
    else:
        root, files = file.parent, sorted(_imported(file))
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _package_root(model: Model, file: Path) -> Path | None:
    """Folder of the package that the model's module belongs to; of servax itself, that of the part it is in."""
    module = sys.modules.get(model.module)
    package = getattr(module, "__package__", None) or ""
    if not package:
        return None
    parts = package.split(".")
    depth = 2 if parts[0] == "servax" and len(parts) > 1 else 1
    levels = len(parts) - depth
    folder = file.parent
    for _ in range(levels):
        folder = folder.parent
    return folder


def _imported(file: Path) -> set[Path]:
    """The file and the files beside it that it imports, directly or through one another."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in _imports(path):
            waiting.extend(_files_of(file.parent, name))
    return found


def _imports(path: Path) -> Iterator[str]:
    """Dotted names that a source file imports, from anywhere within it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files_of(folder: Path, name: str) -> list[Path]:
    """Files that importing `name` from `folder` would run, a package with all that is in it."""
    first = name.split(".", maxsplit=1)[0]
    if (package := folder / first).is_dir():
        return sorted(package.rglob("*.py"))
    module = folder / f"{first}.py"
    return [module] if module.is_file() else []
