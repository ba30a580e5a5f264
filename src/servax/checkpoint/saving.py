"""Parameters saved as a plain Orbax checkpoint."""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp

from servax.checkpoint.layout import absolute
from servax.checkpoint.stored import PathLike
from servax.core.trees import Tree

_CHUNK_BYTES = 16 << 20
"""Most bytes in one chunk: reading decodes a chunk at a time, so small chunks keep a restore's memory low."""


def save(path: PathLike, params: Tree) -> None:
    """Writes a nested dictionary of arrays as an Orbax checkpoint, which any Orbax reads; `path` must not exist.

    Nothing is compressed: weights shrink by a few percent, and reading them back at start takes a third longer.
    """
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(absolute(path), dict(params))
