"""A function's definition as users write it, checked as a whole and turned into a Signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from servax.core.errors import ModelError, ServaxError
from servax.core.tensors import Scalar, Signature, TensorSpec
from servax.model.adapter import EVALUATION_FLAGS
from servax.model.processors import Processor, Text

BATCH = "batch"
"""The dimension along which requests are joined, unless the model names another."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a user says about one function; names may be nested or joined by dots.

    Attributes:
      inputs: name -> spec text, or a dictionary of them.
      buckets: sizes by dimension.
      pad: name -> the value that fills an input up to its bucket.
      batch: the dimension along which requests are joined; None: there is none.
      lengths: extra argument -> the dimension whose true size it gets, row by row.
      vmap: whether the function takes one example, without the batch axis.
      stateful: whether it takes and returns the model's state.
      processors: by input.
      static: arguments passed unchanged.
    """

    inputs: Mapping[str, Any]
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    pad: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: str | None = BATCH
    lengths: Mapping[str, str] = field(default_factory=dict[str, str])
    vmap: bool = False
    stateful: bool = False
    processors: Mapping[str, Processor] = field(default_factory=dict[str, Processor])
    static: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Checked:
    """A declaration without faults.

    Attributes:
      signature: inputs, the lengths among them; no outputs yet.
      buckets: sizes by dimension, ascending, each once.
      fixed: arguments that are passed unchanged: `static=`, and the flags of evaluation mode that the function takes.
    """

    signature: Signature
    buckets: Mapping[str, tuple[int, ...]]
    fixed: Mapping[str, Any]


def check(name: str, declaration: Declaration, accepted: inspect.Signature | None) -> Checked:
    """The signature that a declaration stands for; `accepted` are the arguments that the function takes by name.

    Raises:
      ModelError: the declaration contradicts itself or the function; every fault is listed, with its remedy.
    """
    faults: list[str] = []
    pads = dict(flat_items(declaration.pad))
    inputs = _inputs(declaration, pads, faults)
    if declaration.vmap:
        inputs = _with_batch_axis(declaration, inputs, faults)
    dims = list(dict.fromkeys(dim for spec in inputs for dim in spec.dims))
    batch = _batch(declaration, inputs, dims, faults)
    lengths = _lengths(declaration, inputs, dims, batch, faults)
    buckets = _buckets(declaration, dims, faults)
    _processors(declaration, inputs, faults)
    fixed = _arguments(declaration, accepted, faults)
    if declaration.vmap and declaration.stateful:
        faults.append(
            "vmap=True and stateful=True exclude one another, for the state is shared by all rows (write the function "
            "for whole batches)"
        )
    if faults:
        raise ModelError(
            f"the definition of function {name!r} has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
            where=f"function {name!r}",
            seen="".join(f"\n    {number}. {fault}" for number, fault in enumerate(faults, 1)),
            remedy="Change what each fault names in brackets.",
        )
    every = sorted((*inputs, *lengths), key=lambda spec: spec.name)
    signature = Signature(tuple(every), batch=batch, lengths=dict(declaration.lengths))
    return Checked(signature, buckets, fixed)


def flat_items(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested dictionary by their names joined with dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_items(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def mentioned(inputs: Mapping[str, Any]) -> set[str]:
    """Names of the dimensions in the specs, as far as they can be read."""
    specs = (str(text).partition("[")[2].partition("]")[0] for _, text in flat_items(inputs))
    return {dim for dims in specs for part in dims.split(",") if (dim := part.strip()).isidentifier()}


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dictionary of tensors whose names are joined with dots."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *outer, last = name.split(".")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def state_specs(state: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Specs of a model's state, in order of name.

    Raises:
      ModelError: a spec cannot be read, or has a dimension without a fixed size.
    """
    specs = sorted((TensorSpec.parse(name, text) for name, text in flat_items(state)), key=lambda spec: spec.name)
    if open_specs := [f"{spec.name}: {spec.text()}" for spec in specs if spec.dims or spec.default is not None]:
        raise ModelError(
            "the state has dimensions without a fixed size, or defaults",
            where="state=",
            seen="; ".join(open_specs),
            expected="fixed sizes only; the state starts as zeros",
            remedy="Write numbers for the dimensions, e.g. float32[4, 16].",
        )
    return tuple(specs)


def _inputs(declaration: Declaration, pads: Mapping[str, Any], faults: list[str]) -> list[TensorSpec]:
    specs: list[TensorSpec] = []
    declared = dict(flat_items(declaration.inputs))
    for name, text in declared.items():
        if not isinstance(text, str):
            faults.append(f'input {name!r} has the spec {text!r} (write it as text: "int32[batch, length]")')
            continue
        try:
            spec = TensorSpec.parse(name, text)
        except ServaxError as error:
            faults.append(error.sentence())
            continue
        if spec.dtype == "string":
            faults.append(
                f"input {name!r} is a string, which no program takes (declare the input that the function takes, "
                "and processors= for it)"
            )
            continue
        specs.append(_padded(spec, pads, faults))
    for name in pads:
        if name not in declared:
            faults.append(f"pad= names {name!r}, which is no input (inputs are {_list(declared)})")
    return specs


def _padded(spec: TensorSpec, pads: Mapping[str, Any], faults: list[str]) -> TensorSpec:
    pad = pads.get(spec.name, 0)
    kind = spec.numpy_dtype.kind
    wrong = None
    if isinstance(pad, np.generic):
        pad = pad.item()
    if not isinstance(pad, bool | int | float):
        wrong = "is no number"
    elif kind in "iu":
        limits = np.iinfo(spec.numpy_dtype)
        if pad != int(pad) or not limits.min <= pad <= limits.max:
            wrong = f"is no {spec.dtype}"
        else:
            pad = int(pad)
    elif kind == "b":
        pad = bool(pad)
    if wrong is not None:
        faults.append(f"pad= of input {spec.name!r} is {pad!r}, which {wrong} (give one number)")
        return spec
    return TensorSpec(spec.name, spec.dtype, spec.shape, cast("Scalar", pad), spec.default)


def _with_batch_axis(declaration: Declaration, inputs: list[TensorSpec], faults: list[str]) -> list[TensorSpec]:
    """The specs of whole batches: where none mentions the batch, all were written for one example."""
    batch = declaration.batch
    if batch is None:
        faults.append("vmap=True maps over the batch, but batch=None (name the batch dimension)")
        return inputs
    if any(batch in spec.dims for spec in inputs):
        return inputs
    return [TensorSpec(spec.name, spec.dtype, (batch, *spec.shape), spec.pad, spec.default) for spec in inputs]


def _batch(
    declaration: Declaration, inputs: Sequence[TensorSpec], dims: Sequence[str], faults: list[str]
) -> str | None:
    batch = declaration.batch
    if batch is None or (batch not in dims and batch == BATCH):
        return None
    if batch not in dims:
        faults.append(f"batch={batch!r} is not an axis of any input (dimensions are {_list(dims)})")
        return None
    for spec in inputs:
        if spec.shape.count(batch) != 1:
            faults.append(
                f"input {spec.name!r} ({spec.text()}) has the batch dimension {batch!r} {spec.shape.count(batch)} "
                "times; requests are joined along it (give every input this axis once, or say batch=None)"
            )
    return batch


def _lengths(
    declaration: Declaration,
    inputs: Sequence[TensorSpec],
    dims: Sequence[str],
    batch: str | None,
    faults: list[str],
) -> list[TensorSpec]:
    names = {spec.name for spec in inputs}
    for name, dim in declaration.lengths.items():
        if dim not in dims:
            faults.append(f"lengths= of {name!r} names the unknown dimension {dim!r} (dimensions are {_list(dims)})")
        elif dim == batch:
            faults.append(f"lengths= of {name!r} names the batch dimension {dim!r} (name one that rows differ in)")
        if name in names:
            faults.append(f"{name!r} is both an input and in lengths= (drop it from inputs=)")
    shape = () if batch is None else (batch,)
    return [TensorSpec(name, "int32", shape, pad=1) for name in declaration.lengths]


def _buckets(declaration: Declaration, dims: Sequence[str], faults: list[str]) -> dict[str, tuple[int, ...]]:
    buckets: dict[str, tuple[int, ...]] = {}
    for dim, sizes in declaration.buckets.items():
        listed: Sequence[Any] = [sizes] if isinstance(sizes, int) else list(sizes)
        if dim not in dims:
            faults.append(f"buckets= names the unknown dimension {dim!r} (dimensions are {_list(dims)})")
        elif not listed or any(not isinstance(size, int | np.integer) or size < 1 for size in listed):
            faults.append(f"buckets= of {dim!r} are {sizes!r} (give sizes of at least 1)")
        else:
            buckets[dim] = tuple(sorted({int(size) for size in listed}))
    return buckets


def _processors(declaration: Declaration, inputs: Sequence[TensorSpec], faults: list[str]) -> None:
    names = [spec.name for spec in inputs]
    for name, processor in declaration.processors.items():
        if name not in names:
            faults.append(f"processors= names {name!r}, which is no input (inputs are {_list(names)})")
        # What users pass is checked at run time too.
        if not isinstance(processor, Text):  # pyright: ignore[reportUnnecessaryIsInstance]
            faults.append(f"the processor of {name!r} is {processor!r} (use one of servax's, such as servax.Text)")
        elif processor.name in names:
            faults.append(
                f"the processor of {name!r} reads {processor.name!r}, an input's name (give it another name=)"
            )


def _arguments(declaration: Declaration, accepted: inspect.Signature | None, faults: list[str]) -> dict[str, Any]:
    """Compares the names with the function's arguments; gives those that are passed unchanged."""
    given = list(dict.fromkeys(name.split(".")[0] for name, _ in flat_items(declaration.inputs)))
    given += [name for name in declaration.lengths if name not in given]
    for name in declaration.static:
        if name in given:
            faults.append(f"{name!r} is both an input and in static= (drop one)")
    if accepted is None:
        return dict(declaration.static)
    parameters = accepted.parameters.values()
    by_name = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for name in (*given, *declaration.static):
        if name not in by_name and not takes_any:
            faults.append(f"the function takes no argument {name!r} (its arguments are {_list(by_name)})")
    flags = {name: flag for name, flag in EVALUATION_FLAGS.items() if name in by_name and name not in given}
    fixed = {**flags, **declaration.static}
    for each in parameters:
        if each.kind is each.POSITIONAL_ONLY and each.default is each.empty:
            faults.append(f"argument {each.name!r} is positional-only (let it be passed by name)")
        elif each.name in by_name and each.default is each.empty and each.name not in (*given, *fixed):
            faults.append(f"argument {each.name!r} has no spec (add it to inputs=, lengths= or static=)")
    return fixed


def _list(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(str, names)) or "none"
