"""Which outputs a request asks for, and in which form, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servax.core.errors import InvalidInput
from servax.core.tensors import Signature
from servax.protocols.http import JSON
from servax.protocols.npy import CONTENT_TYPE as NPY
from servax.protocols.open_inference.binary import CONTENT_TYPE as BINARY
from servax.protocols.open_inference.codec import DATATYPES, datatype_of, require_known, travels
from servax.protocols.open_inference.messages import InferBody
from servax.protocols.wording import short


@dataclass(frozen=True, slots=True)
class Output:
    """An output to send; `binary`: behind the JSON and not in it."""

    name: str
    binary: bool


def chosen(message: InferBody, signature: Signature, form: bytes) -> list[Output]:
    """The outputs that a request asks for; all of them where it names none.

    Args:
      message: the request.
      signature: of its function.
      form: of the answer, a content type.

    Raises:
      InvalidInput: there is no such output, it has no form in JSON, or the form is of one array and there are several.
    """
    names = [spec.name for spec in signature.outputs]
    every = _flag(message.parameters, "binary_data_output", "parameters", form == BINARY)
    if message.outputs is None:
        outputs = [Output(name, every) for name in names]
    else:
        if unknown := [output.name for output in message.outputs if output.name not in names]:
            raise InvalidInput(
                "there are no such outputs",
                where="outputs",
                seen=", ".join(map(short, unknown)),
                expected=", ".join(names),
            )
        # One answer each, however often it is asked for: a short request could make any number of them.
        choices = {each.name: _binary(each.name, each.parameters, every) for each in message.outputs}
        outputs = [Output(name, binary) for name, binary in choices.items()]
    dtypes = {spec.name: spec.dtype for spec in signature.outputs}
    if form == NPY:
        _require_one(outputs)
    elif form in (JSON, BINARY):
        _require_form(outputs, dtypes)
    else:
        for output in outputs:
            require_known(output.name, datatype_of(dtypes[output.name]))
    return outputs


def _binary(name: str, parameters: Mapping[str, Any] | None, default: bool) -> bool:
    if parameters is None:
        return default
    if parameters.get("classification"):
        raise InvalidInput(
            f"tensor {name!r} is asked for as a classification",
            where=name,
            seen="parameter `classification`",
            expected="the tensor itself",
            remedy="take the top of it in the client, or add a function that does (`jax.lax.top_k`)",
        )
    if "shared_memory_region" in parameters:
        raise InvalidInput(
            f"tensor {name!r} is asked for in shared memory",
            where=name,
            seen="shared_memory_region",
            expected="an answer over the network",
        )
    return _flag(parameters, "binary_data", name, default)


def _flag(parameters: Mapping[str, Any] | None, key: str, where: str, default: bool) -> bool:
    value = default if parameters is None else parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidInput(
            f"the parameter {key!r} is neither true nor false",
            where=where,
            seen=f"a {type(value).__name__}",
            expected="true or false",
        )
    return value


def _require_one(outputs: Sequence[Output]) -> None:
    if len(outputs) != 1:
        names = ", ".join(output.name for output in outputs)
        raise InvalidInput(
            "an .npy answer is one array",
            where="outputs",
            seen=names or "no output",
            expected="one output",
            remedy=f"choose one in the URL (?outputs={outputs[0].name}), or ask for another form: "
            "Accept: application/json"
            if outputs
            else "ask for another form: Accept: application/json",
        )


def _require_form(outputs: Sequence[Output], dtypes: Mapping[str, str]) -> None:
    """Refuses outputs that cannot be written: of dtypes without a name, and of half precision in JSON."""
    stuck = [
        output.name
        for output in outputs
        if not (dtypes[output.name] in DATATYPES if output.binary else travels(datatype_of(dtypes[output.name])))
    ]
    if not stuck:
        return
    if all(dtypes[name] in DATATYPES for name in stuck):
        remedy = 'ask for them in binary: "parameters": {"binary_data_output": true}'
    else:
        remedy = "cast them inside the function (`x.astype(jnp.float32)`; of complex numbers `x.real` and `x.imag`)"
    others = [name for name, dtype in dtypes.items() if travels(datatype_of(dtype))]
    if others:
        choice = ", ".join(f'{{"name": "{name}"}}' for name in others)
        remedy += (
            f'; or ask for the others: "outputs": [{choice}]; with servax.load(URL): infer(request, outputs={others})'
        )
    raise InvalidInput(
        "outputs have a datatype that the Open Inference Protocol does not carry in JSON",
        where=", ".join(stuck),
        seen=", ".join(datatype_of(dtypes[name]) for name in stuck),
        expected=f"outputs among {', '.join(others)}" if others else "outputs that are cast inside the function",
        remedy=remedy,
    )
