"""Names and dtypes in a SavedModel: of its signatures and their tensors; and what it has none for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from servax.core.errors import ModelError
from servax.core.tensors import Signature
from servax.stages.buckets import STATIC, Bucket
from servax.targets.manifest import Manifest


def tensor_name(name: str) -> str:
    """The name of an input or output in a SavedModel: `image.left` is `image_left`, `_x` is `arg__x`.

    TensorFlow renames arguments of its functions by this rule (`sanitize_arg_name`); outputs follow it here too.
    """
    plain = "".join(character if character.isalnum() else "_" for character in name)
    return plain if plain[0].isalpha() else f"arg_{plain}"


def tensor_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which TensorFlow holds a tensor: a byte for 4-bit integers, other dtypes as they are.

    TensorFlow 2.21 keeps one 4-bit integer a byte and gives XLA, which expects two, the bytes as they are.
    """
    return np.dtype({"int4": "int8", "uint4": "uint8"}.get(dtype.name, dtype))


def signature_name(function: str, bucket: Bucket | None) -> str:
    """`predict` where no bucket is meant, or a function has no named dimensions; else `predict_batch_8_length_32`."""
    if bucket is None or bucket.label == STATIC:
        return function
    return f"{function}_{re.sub('[=,]', '_', bucket.label)}"


def check_names(function: str, signature: Signature) -> None:
    """Refuses tensors that a SavedModel could not tell apart.

    Raises:
      ModelError: lists all names that `tensor_name` makes equal.
    """
    clashes: list[str] = []
    for kind, specs in (("inputs", signature.inputs), ("outputs", signature.outputs)):
        renamed: dict[str, list[str]] = {}
        for spec in specs:
            renamed.setdefault(tensor_name(spec.name), []).append(spec.name)
        clashes += [f"{kind} {', '.join(names)} are all {new}" for new, names in renamed.items() if len(names) > 1]
    if clashes:
        raise ModelError(
            "two tensors would have one name in a SavedModel, where dots are underscores",
            where=f"function {function}",
            seen="; ".join(clashes),
            remedy="rename one of each",
        )


def refuse_if_empty(manifest: Manifest, left_out: Mapping[str, str]) -> None:
    """Refuses a SavedModel without a signature.

    Raises:
      ModelError: every function is left out; says why for each.
    """
    if all(name in left_out for name in manifest.functions):
        raise ModelError(
            "no function of the model can be a signature of a SavedModel",
            where=manifest.name,
            seen="; ".join(f"{name}: {reason}" for name, reason in left_out.items()),
            expected="at least one function without state, of operations that TensorFlow has",
            remedy="serve it through aot or export",
        )
