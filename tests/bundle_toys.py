"""Toy functions with answers by NumPy, and bundles of them, made without `servax.build`.

`predict`: `y = x @ w + b`, and `double.y` twice that, over `x: float32[batch, length, 4]`. `count`: stateful, adds
`x: float32[4]` to what it has seen. `inverse`: the inverse of `x: float32[3, 3]`, by LAPACK on CPU. `many`: the sum of
2,000 scalar parameters, times `x: float32[batch]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from servax.checkpoint.saving import save
from servax.core.tensors import Signature, TensorSpec
from servax.core.trees import flatten, path_text
from servax.model.function import Function
from servax.stages.buckets import Bucket
from servax.targets import aot, exported, readme
from servax.targets.bundle import Bundle, BundleWriter
from servax.targets.expiry import export_expiry
from servax.targets.manifest import FunctionRecord, Manifest, ParameterRecord, ProvenanceRecord, TensorRecord

PARAMS = {
    "dense": {
        "b": np.arange(4, dtype=np.float32),
        "w": np.arange(16, dtype=np.float32).reshape(4, 4) / 8,
    }
}
MANY = {f"leaf{number:04}": np.asarray(number % 7, np.float32) for number in range(2000)}


def make_function(name, inputs, outputs, call, *, state=None, batch="batch") -> Function:
    def specs(texts):
        return tuple(TensorSpec.parse(key, texts[key]) for key in sorted(texts))

    return Function(
        name,
        Signature(specs(inputs), specs(outputs), batch=batch),
        call,
        state=None if state is None else specs(state),
    )


def _predict(params, state, inputs):
    y = inputs["x"] @ params["dense"]["w"] + params["dense"]["b"]
    return None, {"y": y, "double.y": 2 * y}


def _count(params, state, inputs):
    seen = state["seen"] + inputs["x"] + 0 * params["dense"]["b"]
    return {"seen": seen}, {"total": seen.sum()}


PREDICT = make_function(
    "predict",
    {"x": "float32[batch, length, 4]"},
    {"y": "float32[batch, length, 4]", "double.y": "float32[batch, length, 4]"},
    _predict,
)
COUNT = make_function(
    "count", {"x": "float32[4]"}, {"total": "float32[]"}, _count, state={"seen": "float32[4]"}, batch=None
)
INVERSE = make_function(
    "inverse",
    {"x": "float32[3, 3]"},
    {"y": "float32[3, 3]"},
    lambda params, state, inputs: (None, {"y": jnp.linalg.inv(inputs["x"])}),
    batch=None,
)
MANY_LEAVES = make_function(
    "many",
    {"x": "float32[batch]"},
    {"y": "float32[batch]"},
    lambda params, state, inputs: (None, {"y": inputs["x"] * sum(jax.tree.leaves(params))}),
)
SMALL = Bucket.of(batch=2, length=3)
LARGE = Bucket.of(batch=4, length=8)
STATIC = Bucket(())
TOY = {"predict": (PREDICT, (SMALL, LARGE)), "count": (COUNT, (STATIC,))}


def predict_by_numpy(x: np.ndarray) -> np.ndarray:
    return x @ PARAMS["dense"]["w"] + PARAMS["dense"]["b"]


def manifest_of(
    functions: Mapping[str, tuple[Function, Sequence[Bucket]]], params: Mapping[str, Any], platforms: Sequence[str]
) -> Manifest:
    state = next((function.state for function, _ in functions.values() if function.state is not None), ())
    return Manifest(
        name="toy",
        created="2026-11-30T12:00:00Z",
        versions={"jax": jax.__version__},
        platforms=tuple(platforms),
        targets=("export",),
        provenance=ProvenanceRecord(),
        parameters=tuple(
            ParameterRecord(path=path_text(path), dtype=leaf.dtype.name, shape=leaf.shape)
            for path, leaf in flatten(params).items()
        ),
        state=tuple(map(TensorRecord.of, state)),
        functions={
            name: FunctionRecord.of(
                function.signature,
                stateful=function.state is not None,
                buckets=tuple(bucket.label for bucket in buckets),
                processors=(),
            )
            for name, (function, buckets) in functions.items()
        },
        expiry=(export_expiry(),),
    )


def write_bundle(
    path, functions=None, params=None, *, platforms=("cpu",), symbolic=False, executables=False, per_bucket=True
) -> Bundle:
    """A bundle of these functions with their exports, parameters and README, and executables of device 0 if wanted."""
    functions = TOY if functions is None else functions
    params = PARAMS if params is None else params
    with BundleWriter(path) as writer:
        programs = []
        for function, buckets in functions.values():
            made = [exported.export(function, bucket, params, platforms) for bucket in buckets] if per_bucket else []
            if symbolic:
                extra = exported.export_symbolic(function, buckets[-1], params, platforms)
                made += [extra] if isinstance(extra, exported.ExportedProgram) else []
            for program in made:
                writer.write(program.record.file, program.data)
                programs.append(program.record)
        manifest = manifest_of(functions, params, platforms).model_copy(update={"programs": tuple(programs)})
        if executables:
            draft = writer.draft(manifest)
            compiled = [
                aot.compile_executable(draft, name, bucket, jax.devices()[0])
                for name, (_, buckets) in functions.items()
                for bucket in buckets
            ]
            manifest = aot.add(draft, compiled).manifest
        if flatten(params):
            save(writer.root / "params", params)
        writer.write("README.md", readme.readme_text(manifest))
        return writer.finish(manifest)


def put(value, device=None):
    return jax.device_put(value, jax.sharding.SingleDeviceSharding(device or jax.devices()[0]))


def flat_params(params=None, device=None):
    return tuple(put(leaf, device) for leaf in flatten(PARAMS if params is None else params).values())
