"""The model's own faults, found before any wrapper is judged: padding, neighbours and chance that reach an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core.errors import ModelError
from servax.core.tensors import Signature, TensorSpec, evaluate_dim
from servax.targets.difference import Difference, difference
from servax.targets.samples import Expected, Rounding
from servax.targets.tolerance import Tolerance, rounding_of

Array = np.ndarray[Any, Any]

EVALUATION = (
    "put the module into evaluation mode (nnx: model.eval(); Linen: train=False, use_running_average=True; Equinox: "
    "eqx.nn.inference_mode)"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """An output that is not the same in two runs that should agree."""

    output: str
    step: int
    found: Difference


def compare(
    expected: Sequence[Mapping[str, Array]],
    seen: Sequence[Mapping[str, Array]],
    rounding: Mapping[str, Mapping[str, Rounding]],
) -> list[Fault]:
    """The outputs, of the steps given, that differ by more than rounding explains."""
    faults: list[Fault] = []
    for step, (ours, theirs) in enumerate(zip(expected, seen, strict=True)):
        for name, array in ours.items():
            tolerance = Tolerance.of(rounding_of(name, array.dtype, "cpu", rounding))
            found = difference(Expected.of(array), theirs[name], tolerance)
            if not found.within:
                faults.append(Fault(name, step, found))
    return faults


def row_of(
    signature: Signature,
    specs: Sequence[TensorSpec],
    arrays: Mapping[str, Array],
    row: int,
    sizes: Mapping[str, int],
    *,
    every: bool = False,
) -> dict[str, Array]:
    """One row of each tensor that has a batch dimension, as a batch of one cut to `sizes`.

    Tensors without a batch dimension are left out, or, with `every`, cut alike.
    """
    rows: dict[str, Array] = {}
    for spec in specs:
        if signature.batch not in spec.shape and not every:
            continue
        region = tuple(
            slice(row, row + 1) if dim == signature.batch else slice(evaluate_dim(dim, sizes)) for dim in spec.shape
        )
        rows[spec.name] = arrays[spec.name][region]
    return rows


def chance(function: str, bucket: str, faults: Sequence[Fault]) -> ModelError:
    """The error of a function that answers the same inputs differently when called again."""
    return _error(
        f"function {function!r} gives other values when it is called again with the same inputs",
        function,
        bucket,
        faults,
        expected="the same values in both calls",
        remedy=f"{EVALUATION}; a function that needs randomness takes an input seed: uint32[batch] and makes its keys "
        "from it",
    )


def neighbours(function: str, bucket: str, faults: Sequence[Fault], signature: Signature) -> ModelError:
    """The error of a function whose rows depend on the other rows of the batch, or that mixes them in an output."""
    changed = {fault.output for fault in faults}
    mixed = [spec.name for spec in signature.outputs if spec.name in changed and signature.batch not in spec.shape]
    remedies: list[str] = []
    if mixed:
        remedies.append(
            f"keep the batch axis in output {', '.join(map(repr, mixed))}, one value a row; a function whose rows "
            "belong together is declared with batch=None"
        )
    if changed - set(mixed):
        remedies.append(
            f"{EVALUATION}, so that BatchNorm uses its running statistics and dropout is off; if rows belong "
            "together by design, declare another batch dimension (batch=...) or none"
        )
    return _error(
        f"a row's answer from function {function!r} depends on the other rows of its batch",
        function,
        bucket,
        faults,
        expected="the values of the same row alone",
        remedy="; ".join(remedies),
    )


def padding(
    function: str,
    bucket: str,
    faults: Sequence[Fault],
    dims: Sequence[str],
    signature: Signature,
    *,
    inputs: str | None = None,
) -> ModelError:
    """The error of a function whose outputs change when its inputs are padded, in `dims`.

    Args:
      function: its name.
      bucket: label of the bucket.
      faults: the outputs that change.
      dims: the dimensions whose padding changes them.
      signature: of the function.
      inputs: what the float inputs were, if other than drawn around zero.
    """
    remedies: list[str] = []
    lengths = [dim for dim in dims if dim != signature.batch]
    for dim in lengths:
        if dim in signature.lengths.values():
            name = next(name for name, each in signature.lengths.items() if each == dim)
            remedies.append(f"mask what lies past {name!r} in {dim!r}")
        else:
            padded = next((spec.name for spec in signature.inputs if dim in spec.shape), dim)
            remedies.append(
                f'declare lengths={{"n": "{dim}"}} and mask with n, or mask a pad value (pad={{"{padded}": ...}})'
            )
    if signature.batch in dims:
        remedies.append(f"keep rows apart: {EVALUATION}; an output over the whole batch cannot be served from a bucket")
    return _error(
        f"outputs of function {function!r} change with padding",
        function,
        bucket,
        faults,
        expected="the values of the unpadded run",
        remedy=f"{'; '.join(remedies)}; or give buckets only for the sizes that are served",
        suffix=f", when padded in {' and '.join(dims)}" + (f", for float inputs that are {inputs}" if inputs else ""),
    )


def _error(
    what: str, function: str, bucket: str, faults: Sequence[Fault], *, expected: str, remedy: str, suffix: str = ""
) -> ModelError:
    worst: dict[str, Fault] = {}
    for fault in faults:
        if fault.output not in worst or fault.found.severity > worst[fault.output].found.severity:
            worst[fault.output] = fault
    lines = [
        f"output {fault.output!r}: max difference {fault.found.error:.3g}, where rounding explains "
        f"{fault.found.tolerance:.1e}: {fault.found.detail}" + (f", at step {fault.step + 1}" if fault.step else "")
        for fault in worst.values()
    ]
    return ModelError(
        what,
        where=f"{function}@{bucket}, output {', '.join(worst)}",
        seen="; ".join(lines) + suffix,
        expected=expected,
        remedy=remedy,
    )
