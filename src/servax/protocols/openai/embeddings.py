"""`POST /v1/embeddings`, by any model that takes text and gives a vector for each."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from servax.core.errors import InvalidInput, TooLarge
from servax.core.tensors import Signature
from servax.protocols.dataplane import DataPlane
from servax.protocols.openai.errors import ContextLengthExceeded
from servax.protocols.openai.prompts import texts_or_ids
from servax.protocols.openai.requests import EmbeddingBody
from servax.protocols.wording import short
from servax.runtime.request import InferRequest
from servax.runtime.servable import Servable, default_function

_NAMES = ("embedding", "embeddings", "sentence_embedding")
"""What the output is called, where a function has several that it could be."""

MOST_INPUTS = 2048
"""Most inputs of a request, as the OpenAI API has it."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a model makes embeddings.

    Attributes:
      function: that does.
      text: the tensor that takes texts.
      ids: the one that takes token ids in place of it.
      output: the one with the vectors, `[batch, size]`.
      size: of a vector.
    """

    function: str
    text: str
    ids: str
    output: str
    size: int


def embedder_of(servable: Servable) -> Embedder | None:
    """How a model makes embeddings; None for one that does not."""
    signatures = servable.signatures
    first = default_function(None, signatures)
    for name in sorted(signatures, key=lambda name: name != first):
        texts = servable.texts.get(name, {})
        output = _vector(signatures[name])
        if len(texts) == 1 and output is not None:
            ((text, ids),) = texts.items()
            return Embedder(name, text, ids, *output)
    return None


async def embed(
    plane: DataPlane, body: EmbeddingBody, servable: Servable, *, priority: int, deadline: float | None
) -> dict[str, Any]:
    """The answer to a request.

    Raises:
      InvalidInput: the model makes no embeddings, or the request asks for what there is not.
      ContextLengthExceeded: an input has more tokens than the model takes.
    """
    embedder = embedder_of(servable)
    if embedder is None:
        raise InvalidInput(
            f"model {servable.name!r} makes no embeddings",
            where="model",
            expected="a model that takes text and gives a vector for each",
        )
    coded = _is_coded(body.encoding_format)
    if body.dimensions not in (None, embedder.size):
        raise InvalidInput(
            "embeddings have the size that the model gives them",
            where="dimensions",
            seen=str(body.dimensions),
            expected=str(embedder.size),
        )
    inputs = texts_or_ids(body.input, "input")
    if len(inputs) > MOST_INPUTS:
        raise InvalidInput("too many inputs", where="input", seen=str(len(inputs)), expected=f"at most {MOST_INPUTS}")
    rows = await _ids(servable, embedder, inputs)
    request = InferRequest(embedder.function, {embedder.ids: rows}, None, deadline, priority, owned=True)
    try:
        result = await plane.infer(body.model, None, request)
    except TooLarge as error:
        raise ContextLengthExceeded(
            "an input has more tokens than the model takes", where="input", seen=error.seen, expected=error.expected
        ) from None
    vectors = np.ascontiguousarray(result.tensors[embedder.output], "<f4")
    count = sum(map(len, rows))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, coded=coded)}
            for index, vector in enumerate(vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


async def _ids(servable: Any, embedder: Embedder, inputs: Sequence[str | list[int]]) -> Sequence[Sequence[int]]:
    if not isinstance(inputs[0], str):
        if not all(inputs):
            raise InvalidInput("an input has no tokens", where="input", expected="at least one token id each")
        return cast("Sequence[list[int]]", inputs)
    made = await servable.process_async(embedder.function, {embedder.text: inputs})
    return made[embedder.ids]


def _vector(signature: Signature) -> tuple[str, int] | None:
    """Name and size of the output that holds a vector for each row."""
    found = {
        spec.name: size
        for spec in signature.outputs
        if spec.numpy_dtype.kind in "fV"  # bfloat16 is no float to NumPy
        and len(spec.shape) == 2
        and spec.shape[0] == signature.batch
        and isinstance(size := spec.shape[1], int)
    }
    name = next((name for name in _NAMES if name in found), next(iter(found)) if len(found) == 1 else None)
    return None if name is None else (name, found[name])


def _is_coded(form: str | None) -> bool:
    if form not in (None, "float", "base64"):
        raise InvalidInput(
            "there is no such encoding", where="encoding_format", seen=short(form), expected="float or base64"
        )
    return form == "base64"


def _written(vector: np.ndarray[Any, Any], *, coded: bool) -> str | list[float]:
    """Numbers, or the bytes of little-endian float32 in base64."""
    return base64.b64encode(vector.tobytes()).decode() if coded else vector.tolist()
