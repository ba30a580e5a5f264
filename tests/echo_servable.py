"""A servable without a device that answers with its inputs: what goes over the wire in every dtype comes back.

Requests are checked against the signature as those of a real one are.
"""

from __future__ import annotations

import numpy as np

from servax.core.errors import NotFound
from servax.core.tensors import Signature, TensorSpec
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import Progress, State
from servax.stages.padding import check

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "bfloat16",
    "float32",
    "float64",
)


def signature(dtype: str) -> Signature:
    """A function that gives back its one input."""
    shape = ("batch", "length")
    return Signature((TensorSpec("x", dtype, shape),), (TensorSpec("y", dtype, shape),))


def text_signature() -> Signature:
    """A function from texts to texts."""
    return Signature((TensorSpec("x", "string", ("batch",)),), (TensorSpec("y", "string", ("batch",)),))


class EchoServable:
    """Functions `echo_DTYPE`, `echo_string` and `several`; `predict` is `echo_float32`."""

    platform = "jax_jit"
    version = "1"
    state = State.READY
    reason = None
    progress = Progress()

    def __init__(self, name: str = "echo") -> None:
        self.name = name
        self.texts: dict[str, dict[str, str]] = {}
        pair = (TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "int64", ("batch",)))
        self.signatures = {
            "predict": signature("float32"),
            **{f"echo_{dtype}": signature(dtype) for dtype in DTYPES},
            "echo_string": text_signature(),
            "half": Signature(
                (TensorSpec("x", "float32", ("batch",)),),
                (TensorSpec("half", "bfloat16", ("batch",)), TensorSpec("whole", "float32", ("batch",))),
            ),
            "odd": Signature((TensorSpec("x", "float32", ("batch",)),), (TensorSpec("z", "complex64", ("batch",)),)),
            "several": Signature(pair, pair),
        }
        self.requests: list[InferRequest] = []

    async def infer_async(self, request: InferRequest) -> InferResult:
        self.requests.append(request)
        if request.function not in self.signatures:
            raise NotFound(f"no function {request.function}")
        signature = self.signatures[request.function]
        tensors = check(signature, request.tensors, owned=request.owned).tensors
        if request.function in ("half", "odd"):
            x = tensors["x"]
            outputs = {spec.name: np.asarray(x).astype(spec.numpy_dtype) for spec in signature.outputs}
        elif request.function == "several":
            outputs = dict(tensors)
        else:
            outputs = {"y": tensors["x"]}
        return InferResult(outputs, "batch=4", {"queue": 0.001, "execute": 0.002}, "1")
