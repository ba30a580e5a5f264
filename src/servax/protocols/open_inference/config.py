"""A model's configuration in the words of Triton's `ModelConfig`, for clients that ask for it before they send."""

from __future__ import annotations

from typing import Any

from servax.core.tensors import Signature, TensorSpec
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.codec import DATATYPES
from servax.stages.buckets import BucketGrid
from servax.stages.padding import SEED

Message = dict[str, Any]

_TYPES = {dtype: f"TYPE_{datatype}" for dtype, datatype in DATATYPES.items()} | {"string": "TYPE_STRING"}


def model_config(plane: DataPlane, name: str, version: str | None) -> Message:
    """The configuration of a model's default function, as JSON has it.

    `max_batch_size` is the largest bucket's; a request with more rows is split. It is 0, and `dims` are whole shapes,
    where requests are not joined.

    Raises:
      NotFound: no such model or version.
    """
    metadata = plane.metadata(name, version)
    signature = metadata.functions.get(metadata.default, Signature(()))
    grid = getattr(plane.get(name, version), "grid", None)
    largest = _largest(metadata.default, signature, grid)
    skipped = 1 if largest else 0
    texts = metadata.texts.get(metadata.default, {})
    message: Message = {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": "servax",
        "version_policy": {"specific": {"versions": [int(each) for each in metadata.versions if each.isdecimal()]}},
        "max_batch_size": largest,
        "input": [
            *(_tensor(spec, skipped) | {"optional": _optional(spec, signature)} for spec in signature.inputs),
            *({"name": text, "data_type": "TYPE_STRING", "dims": [-1][skipped:], "optional": True} for text in texts),
        ],
        "output": [_tensor(spec, skipped) for spec in signature.outputs],
        "parameters": {"functions": {"string_value": ",".join(metadata.functions)}},
    }
    if largest and isinstance(grid, BucketGrid):
        message["dynamic_batching"] = {"preferred_batch_size": _batches(metadata.default, signature, grid)}
    return message


def _largest(function: str, signature: Signature, grid: BucketGrid | None) -> int:
    """Rows of the largest bucket, where the batch dimension leads every tensor; 0 elsewhere."""
    batched = signature.batch is not None and all(
        spec.shape[:1] == (signature.batch,) for spec in (*signature.inputs, *signature.outputs)
    )
    return max(_batches(function, signature, grid), default=0) if batched and grid is not None else 0


def _batches(function: str, signature: Signature, grid: BucketGrid) -> list[int]:
    return sorted({bucket.mapping().get(str(signature.batch), 0) for bucket in grid[function]})


def _optional(spec: TensorSpec, signature: Signature) -> bool:
    return not spec.required or spec.name in signature.lengths or spec.name == SEED


def _tensor(spec: TensorSpec, skipped: int) -> Message:
    return {
        "name": spec.name,
        "data_type": _TYPES.get(spec.dtype, "TYPE_INVALID"),
        "dims": [dim if isinstance(dim, int) else -1 for dim in spec.shape[skipped:]],
    }
