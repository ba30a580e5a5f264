"""What lies at a path: an Orbax checkpoint or a run of them, safetensors, GGUF, or something else, which is said."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from etils import epath

from servax.checkpoint.steps import Step, best_step, step_number, steps_text
from servax.checkpoint.stored import Location, PathLike
from servax.core.errors import CheckpointError

_TREE = "_METADATA"
_CHECKPOINT = "_CHECKPOINT_METADATA"
_V1 = "orbax.checkpoint"
_TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"
_INDEX = ".safetensors.index.json"
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_SHOWN = 12

_FOREIGN = (
    ("bundle.json", "a servax bundle", "give params/ inside it, or serve the bundle itself"),
    ("saved_model.pb", "a TensorFlow SavedModel", "give the checkpoint that it was made from"),
    ("pytorch_model.bin", "a PyTorch checkpoint", "save it as safetensors"),
    ("checkpoint", "a Flax msgpack checkpoint", "save it again with Orbax"),
)
_FOREIGN_SUFFIX = {
    ".npz": "a NumPy archive",
    ".npy": "a NumPy array",
    ".pkl": "a pickle, which is not read: unpickling runs code",
    ".pt": "a PyTorch pickle, which is not read: unpickling runs code",
    ".pth": "a PyTorch pickle, which is not read: unpickling runs code",
    ".bin": "a PyTorch pickle, which is not read: unpickling runs code",
    ".msgpack": "a Flax msgpack file",
    ".h5": "a Keras or HDF5 file",
    ".ckpt": "a TensorFlow or PyTorch checkpoint file",
}


def locate(path: PathLike, *, step: Step | None = None, item: str | None = None) -> Location:
    """The checkpoint at `path`: a run's directory, one step of it, one item of a step, or a file.

    Args:
      path: local or a URL that `etils.epath` knows (`gs://`, `s3://`).
      step: which step of a run; None is the latest.
      item: which item of a step, or which file of a folder; None is the only one, or all trees of the step.

    Raises:
      CheckpointError: nothing is there, nothing that is a checkpoint, nothing committed, or not this step or item.
    """
    root = absolute(path)
    if not root.exists():
        raise CheckpointError(
            "the checkpoint does not exist",
            where=str(root),
            seen=f"{root.parent} holds {_listing(root.parent)}" if root.parent.exists() else f"no {root.parent} either",
            remedy="correct the path",
        )
    location = _file(root, item) if not root.is_dir() else _directory(root, step, item)
    if isinstance(step, int) and location.step != step:
        raise CheckpointError(
            f"there is no step {step}: the path is one checkpoint, not a run of them",
            where=str(root),
            seen=f"step {location.step}" if location.step is not None else "no step number in the path",
            remedy="leave the step out, or give the directory above",
        )
    return location


def _directory(root: epath.Path, step: Step | None, item: str | None) -> Location:
    _refuse_uncommitted(root)
    names = _names(root)
    if _TREE in names:
        return _tree(root, item)
    if items := _items(root, names):
        return _composite(root, names, items, item)
    if found := _files(root, names, item):
        return found
    if steps := {number: root / name for name in names if (number := step_number(name)) is not None}:
        chosen = _choose_step(root, steps, step)
        location = _directory(steps[chosen], None, item)
        return Location(root, location.layout, location.directory, location.items, location.files, chosen)
    raise _not_a_checkpoint(root, names)


def _tree(root: epath.Path, item: str | None) -> Location:
    step = root.parent
    if (step / _CHECKPOINT).exists() and not (step / _TREE).exists():
        if item not in (None, root.name):
            raise _no_item(step, item, _items(step, _names(step)))
        return Location(root, _orbax(step), step, (root.name,), step=step_number(step.name))
    if item is not None:
        raise _no_item(root, item, [])
    return Location(root, _orbax(root), root, step=step_number(root.name))


def _composite(root: epath.Path, names: list[str], items: list[str], item: str | None) -> Location:
    if item is not None and item not in items:
        raise _no_item(root, item, items)
    chosen = tuple(items) if item is None else (item,)
    if _CHECKPOINT not in names and len(chosen) == 1:
        return Location(root, "orbax v0", root / chosen[0], step=step_number(root.name))
    return Location(root, _orbax(root), root, chosen, step=step_number(root.name))


def _files(root: epath.Path, names: list[str], item: str | None) -> Location | None:
    if item is not None and item in names and not (root / item).is_dir():
        return _file(root / item, None)
    tensors = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(_INDEX)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    chosen = indexes or tensors or ggufs
    if not chosen:
        return None
    parts = {_GGUF_PART.sub("", name) for name in ggufs}
    if item is not None or len(indexes) > 1 or (not tensors and not indexes and len(parts) > 1):
        raise _no_item(root, item, chosen)
    layout = "safetensors" if indexes or tensors else "gguf"
    files = tuple(root / name for name in chosen)
    return Location(root, layout, root, files=files, step=step_number(root.name))


def _file(file: epath.Path, item: str | None) -> Location:
    if item is not None:
        raise _no_item(file, item, [])
    if file.name.endswith((".safetensors", _INDEX)):
        return Location(file, "safetensors", file, files=(file,))
    if _GGUF_PART.search(file.name):
        stem = _GGUF_PART.sub("", file.name)
        parts = [name for name in _names(file.parent) if _GGUF_PART.sub("", name) == stem and name.endswith(".gguf")]
        return Location(file, "gguf", file, files=tuple(file.parent / name for name in parts))
    with file.open("rb") as stream:
        if stream.read(4) == b"GGUF":
            return Location(file, "gguf", file, files=(file,))
    if file.parent.joinpath(_TREE).exists() or file.name in (_TREE, _CHECKPOINT):
        looks, remedy = "a file inside an Orbax checkpoint", f"give the directory {file.parent}"
    else:
        looks, remedy = _FOREIGN_SUFFIX.get(file.suffix, "an unknown file"), "save it with Orbax, or as safetensors"
    raise CheckpointError(
        "the path is not a checkpoint",
        where=str(file),
        seen=f"it looks like {looks}",
        expected="an Orbax directory, a .safetensors or a .gguf file",
        remedy=remedy,
    )


def _choose_step(root: epath.Path, steps: dict[int, epath.Path], step: Step | None) -> int:
    usable: Callable[[int], bool] = lambda number: _is_checkpoint(steps[number])  # noqa: E731 (typed, used twice)
    if isinstance(step, int):
        if step not in steps:
            raise CheckpointError(
                f"there is no step {step}",
                where=str(root),
                seen=f"steps: {steps_text(list(steps))}",
                remedy="choose one of these, or latest",
            )
        return step
    if step == "best":
        return best_step(root, {number: path for number, path in steps.items() if usable(number)})
    for number in sorted(steps, reverse=True):
        if usable(number):
            return number
    raise _not_a_checkpoint(steps[max(steps)], _names(steps[max(steps)]))


def _is_checkpoint(path: epath.Path) -> bool:
    if not path.is_dir():
        return False
    names = _names(path)
    written_in_place = os.fspath(path).startswith("gs://")
    if written_in_place and (_TREE in names or _CHECKPOINT in names) and _COMMITTED not in names:
        return False
    return bool(_TREE in names or _items(path, names) or any(n.endswith((".safetensors", ".gguf")) for n in names))


def _items(root: epath.Path, names: list[str]) -> list[str]:
    """Names of the trees inside a step; a step is marked as such, or holds nothing but items."""
    trees = [n for n in names if not n.startswith((".", "_")) and _TEMPORARY not in n and (root / n / _TREE).exists()]
    marked = _CHECKPOINT in names or _V1 in names
    if not marked and any(step_number(name) is not None for name in trees):
        return []
    if marked and not trees:
        raise CheckpointError(
            "the checkpoint has no tree of arrays",
            where=str(root),
            seen=_listing(root),
            expected=f"an item with a {_TREE} file in it",
            remedy="copy the checkpoint again, or choose another step",
        )
    return trees


def _refuse_uncommitted(root: epath.Path) -> None:
    if _TEMPORARY not in root.name:
        return
    raise CheckpointError(
        "the checkpoint was never committed: its save did not finish, or is still under way",
        where=str(root),
        seen=f"a name with {_TEMPORARY}",
        remedy="choose another step, or wait until the save is done",
    )


def _not_a_checkpoint(root: epath.Path, names: list[str]) -> CheckpointError:
    if not names:
        return CheckpointError(
            "the directory is empty", where=str(root), expected="a checkpoint", remedy="correct the path"
        )
    if unfinished := [name for name in names if _TEMPORARY in name]:
        return CheckpointError(
            "no checkpoint here was committed",
            where=str(root),
            seen=f"unfinished saves: {', '.join(unfinished)}",
            remedy="wait until a save is done",
        )
    for name, looks, remedy in _FOREIGN:
        if name in names:
            return CheckpointError(
                "the path is not a checkpoint", where=str(root), seen=f"it looks like {looks}", remedy=remedy
            )
    return CheckpointError(
        "the path is not a checkpoint",
        where=str(root),
        seen=f"a directory with {_listing(root)}",
        expected="an Orbax checkpoint, a run's directory with its steps, .safetensors or .gguf files",
        remedy="give the run's directory, one step, or one item of a step",
    )


def _no_item(root: epath.Path, item: str | None, items: list[str]) -> CheckpointError:
    what = "the folder holds several checkpoints" if item is None else f"there is no item {item!r}"
    return CheckpointError(
        what,
        where=str(root),
        seen=f"items: {', '.join(items)}" if items else "a checkpoint without items",
        remedy="name one of these as the item" if items else "leave the item out",
    )


def _orbax(directory: epath.Path) -> str:
    """The API that wrote a checkpoint: v1 leaves a marker, but not inside a `training.Checkpointer`'s steps."""
    metadata = directory / _CHECKPOINT
    v1 = (directory / _V1).exists() or (metadata.exists() and "experimental.v1" in metadata.read_text())
    return "orbax v1" if v1 else "orbax v0"


def _names(directory: epath.Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def _listing(directory: epath.Path) -> str:
    names = _names(directory)
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown or "nothing"


def _remote(path: epath.Path) -> bool:
    return "://" in os.fspath(path)


def absolute(path: PathLike) -> epath.Path:
    """A local path made absolute, as Orbax needs it; a URL as it is."""
    given = epath.Path(path)
    return given if _remote(given) else given.expanduser().absolute()
