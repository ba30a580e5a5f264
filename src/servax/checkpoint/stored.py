"""What a checkpoint holds, whatever its format: leaves by key path, and a way to read some of them onto a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath

from servax.core.trees import KeyPath

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Location:
    """Where the leaves of one checkpoint lie, once layout, step and item are known.

    Attributes:
      path: the path as it was given, absolute.
      layout: `orbax v0`, `orbax v1`, `safetensors` or `gguf`.
      directory: what Orbax opens; for the other formats the file, or the folder the files are in.
      items: names of the trees to read under `directory`; `(None,)` where the directory itself is the tree.
      files: the files to read, for safetensors and GGUF.
      step: the training step, where the path has one.
    """

    path: epath.Path
    layout: str
    directory: epath.Path
    items: tuple[str | None, ...] = (None,)
    files: tuple[epath.Path, ...] = ()
    step: int | None = None


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """One array of a checkpoint, known from metadata alone.

    Attributes:
      shape: as stored.
      dtype: as stored; of a quantised GGUF tensor the dtype that it is dequantised to.
      random: whether it is a typed PRNG key, which is never a parameter.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    random: bool = False

    def text(self) -> str:
        """`float32[3, 4]`."""
        return array_text(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How one leaf is wanted: cast to `dtype`, placed by `sharding`."""

    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding


class Source(Protocol):
    """An open checkpoint.

    Attributes:
      leaves: every array it holds, by key path. Integer keys, sequence positions and attribute names are strings,
        and keys with "/" in them are split there. Where several items are read, the first key is the item.
    """

    @property
    def leaves(self) -> Mapping[KeyPath, StoredLeaf]: ...

    def read(self, targets: Mapping[KeyPath, Wanted]) -> dict[KeyPath, jax.Array]:
        """Reads these leaves and no others, cast on the way, each committed to its sharding.

        Raises:
          CheckpointError: the data is damaged or incomplete; names the file where it is known.
        """
        ...


def array_text(dtype: Any, shape: tuple[int, ...]) -> str:
    """Dtype and shape as people read them: `float32[3, 4]`."""
    return f"{np.dtype(dtype).name}[{', '.join(map(str, shape))}]"
