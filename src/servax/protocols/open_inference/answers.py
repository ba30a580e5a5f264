"""What a client reads of a server's answers: the messages by type, so that whatever else answers is told apart."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from servax.core.errors import UsageError
from servax.core.tensors import Scalar, Signature, TensorSpec
from servax.protocols.open_inference.codec import DTYPES, NON_FINITE
from servax.protocols.open_inference.messages import InputTensor, Parameters
from servax.protocols.wording import short
from servax.runtime.servable import State

T = TypeVar("T")


class Tensor(msgspec.Struct):
    """`metadata_tensor`; sizes that are not known ahead are -1."""

    name: str
    datatype: str
    shape: list[int]


class Spec(msgspec.Struct):
    """A tensor of `functions`, as `messages.write_signature` writes it."""

    name: str
    dtype: str
    shape: list[int | str]
    pad: bool | int | float | str = 0
    default: bool | int | float | str | None = None


class Function(msgspec.Struct):
    """A signature and the text tensors beside it, as `messages.write_signature` writes it."""

    inputs: list[Spec]
    outputs: list[Spec]
    batch: str | None = None
    lengths: dict[str, str] = {}
    texts: dict[str, str] = {}


class Model(msgspec.Struct):
    """`metadata_model_response`, with the signatures that a server of ours adds."""

    name: str
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    versions: list[str] | None = None
    platform: str = ""
    functions: dict[str, Function] | None = None


class Programs(msgspec.Struct):
    """Programs that are warm, and those that are not."""

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Status(msgspec.Struct):
    """`model_ready`, with what a server of ours adds."""

    ready: bool = False
    state: State | None = None
    reason: str | None = None
    programs: Programs = msgspec.field(default_factory=Programs)


class Listed(msgspec.Struct):
    """A model of the repository's index."""

    name: str


class Server(msgspec.Struct):
    """`metadata_server_response`."""

    extensions: list[str] = []


class Inference(msgspec.Struct):
    """`inference_response`."""

    outputs: list[InputTensor]
    model_version: str | None = None
    parameters: Parameters | None = None


def read(kind: type[T], content: bytes, url: str) -> T:
    """The message of this kind that a server at `url` answered with.

    Raises:
      UsageError: the answer is something else; names the URL and repeats the first of its text.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(
            "this is not a server of the Open Inference Protocol",
            where=url,
            seen=f"{short(content[:100].decode(errors='replace'), 60)!r} ({error})" if content else "an empty answer",
            expected="the protocol's JSON",
            remedy="give the address of a server such as `servax serve BUNDLE` prints it",
        ) from None


def read_signature(function: Function) -> tuple[Signature, dict[str, str]]:
    """The signature and the text tensors that `messages.write_signature` wrote."""
    signature = Signature(
        tuple(map(_spec, function.inputs)), tuple(map(_spec, function.outputs)), function.batch, function.lengths
    )
    return signature, function.texts


def signature_of(model: Model) -> Signature:
    """A signature from the metadata of a server that is not ours: the first unknown size is taken for the batch."""
    batch = "batch" if any(-1 in tensor.shape[:1] for tensor in model.inputs) else None

    def spec(tensor: Tensor) -> TensorSpec:
        shape = (
            size if size >= 0 else (batch if axis == 0 and batch else f"{tensor.name}{axis}")
            for axis, size in enumerate(tensor.shape)
        )
        return TensorSpec(tensor.name, DTYPES.get(tensor.datatype, tensor.datatype), tuple(shape))

    return Signature(tuple(map(spec, model.inputs)), tuple(map(spec, model.outputs)), batch)


def _spec(spec: Spec) -> TensorSpec:
    default = None if spec.default is None else _scalar(spec.default)
    return TensorSpec(spec.name, spec.dtype, tuple(spec.shape), _scalar(spec.pad), default)


def _scalar(value: Scalar | str) -> Scalar:
    return NON_FINITE.get(value, 0) if isinstance(value, str) else value
