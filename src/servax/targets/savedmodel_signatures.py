"""From an export to a signature of a SavedModel: JAX's module inside a TensorFlow function, parameters as variables.

`jax2tf.convert` wraps the call of an export in an XlaCallModule operation. JAX serializes the module in it for the
StableHLO of four weeks ago, which a released TensorFlow is too old for. So it is serialized once more, for the version
that the TensorFlow which will read it knows, while the function is still being traced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from servax.core import trees
from servax.core.errors import BuildError
from servax.core.tensors import Signature
from servax.core.trees import KeyPath, Tree
from servax.stages.buckets import Bucket
from servax.targets.savedmodel_names import tensor_dtype, tensor_name
from servax.targets.savedmodel_tensorflow import Consumer, load_tensorflow

_JAXLIB_KERNELS = ("lapack_", "tridiagonal_", "cpu_csr_")
"""How the names begin of the CPU kernels that jaxlib brings (`jaxlib.lapack`, `jaxlib.cpu_sparse`)."""

_NO_DLPACK = ("int4", "uint4", "float8")
"""How the names begin of dtypes that JAX and TensorFlow do not exchange through DLPack."""


@dataclass(frozen=True, slots=True)
class ConvertedFunction:
    """An export as a TensorFlow function.

    Attributes:
      function: the `tf.function`, compiled by XLA.
      concrete: its one trace, which is what a SavedModel keeps.
    """

    function: Any
    concrete: Any


def unfit(exported: Any, custom_calls: Sequence[str]) -> str | None:
    """Why TensorFlow cannot run an export, or None."""
    if exported.nr_devices != 1:
        return f"its program spans {exported.nr_devices} devices, and a signature runs on one"
    if kernels := [name for name in custom_calls if name.startswith(_JAXLIB_KERNELS)]:
        return (
            f"it calls {', '.join(kernels)}, linear algebra that is part of jaxlib and that TensorFlow does not have; "
            "serve it through aot or export, or compute it without jnp.linalg and jax.scipy.linalg"
        )
    return None


def variables(params: Tree) -> dict[KeyPath, Any]:
    """A `tf.Variable` for each leaf; over the leaf's own memory where that is a jax.Array's on the host."""
    tf = load_tensorflow()
    # What TensorFlow's scopes cannot be named is an underscore; the checkpoint beside the graph has the exact paths.
    names = {path: re.sub("[^A-Za-z0-9_./-]", "_", f"params/{trees.path_text(path)}") for path in trees.flatten(params)}
    return {
        path: tf.Variable(_tensor(leaf), trainable=False, name=names[path])
        for path, leaf in trees.flatten(params).items()
    }


def set_calling_convention(target: Consumer) -> None:
    """Makes JAX, in this process, export by a calling convention that the target runs.

    Raises:
      BuildError: this JAX writes none that old.
    """
    import jax
    import jax.export

    oldest = jax.export.minimum_supported_calling_convention_version
    if target.call_module < oldest:
        raise BuildError(
            f"this JAX makes no module that TensorFlow {target.tensorflow} runs",
            seen=f"jax {jax.__version__} writes calling convention {oldest} and later",
            expected=f"{target.call_module} or earlier",
            remedy="use a newer TensorFlow, or an older JAX",
        )
    newest: int = jax.config.jax_export_calling_convention_version
    jax.config.update("jax_export_calling_convention_version", min(newest, target.call_module))


def convert(exported: Any, name: str, parameters: Mapping[KeyPath, Any], target: Consumer) -> ConvertedFunction:
    """An export as a function over named tensors, at the export's own shapes, symbolic ones free.

    Args:
      exported: a `jax.export.Exported` of `f(params, inputs)`.
      name: of the function, for TensorFlow's graph.
      parameters: the variables that stand for `params`.
      target: decides the version of StableHLO.

    Raises:
      BuildError: the module cannot be expressed in that version.
    """
    import jax
    from jax.experimental import jax2tf

    tf = load_tensorflow()
    (leaves, avals), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    shapes, _ = jax.tree.unflatten(exported.in_tree, [str(aval.shape) for aval in exported.in_avals])
    dtypes = {path: aval.dtype for path, aval in trees.flatten(leaves).items()}
    converted = jax2tf.convert(
        jax.jit(exported.call),
        polymorphic_shapes=shapes,
        with_gradient=False,
        native_serialization_platforms=exported.platforms,
    )

    def call(**tensors: Any) -> dict[str, Any]:
        params = {path: _in_dtype(dtypes[path], variable) for path, variable in parameters.items()}
        inputs = {each: _in_dtype(aval.dtype, tensors[tensor_name(each)]) for each, aval in avals.items()}
        outputs = converted(trees.unflatten(params), inputs)
        _serialize_for(target.stablehlo, tf.compat.v1.get_default_graph())
        return {
            tensor_name(each): _in_dtype(tensor_dtype(np.dtype(tensor.dtype.as_numpy_dtype)), tensor)
            for each, tensor in outputs.items()
        }

    call.__name__ = name
    function = tf.function(call, autograph=False, jit_compile=True)
    specs = {
        tensor_name(each): tf.TensorSpec(
            [size if isinstance(size, int) else None for size in aval.shape],
            tensor_dtype(aval.dtype),
            tensor_name(each),
        )
        for each, aval in avals.items()
    }
    return ConvertedFunction(function, function.get_concrete_function(**specs))


def lowers(converted: ConvertedFunction, signature: Signature, bucket: Bucket) -> str | None:
    """None where the installed TensorFlow brings the function down to XLA's form at a bucket's sizes, else its reason.

    Runs nothing and compiles no machine code; TensorFlow works out the shapes of a polymorphic module only here.
    """
    tf = load_tensorflow()
    sizes = bucket.mapping()
    tensors = {
        tensor_name(spec.name): tf.zeros(spec.concrete(sizes), tensor_dtype(spec.numpy_dtype))
        for spec in signature.inputs
    }
    try:
        converted.function.experimental_get_compiler_ir(**tensors)(stage="hlo_serialized")
    except (tf.errors.OpError, ValueError) as error:
        return str(error).strip().partition("\n")[0]
    return None


def _serialize_for(version: str, graph: Any) -> None:
    from tensorflow.core.framework import attr_value_pb2

    from servax.stages.stablehlo import for_version

    protobuf: Any = attr_value_pb2  # generated when it is imported, so its names are not seen before
    for operation in graph.get_operations():
        if operation.type == "XlaCallModule":
            module = for_version(operation.get_attr("module"), version)
            # TensorFlow has no public way to change an operation's attribute.
            operation._set_attr("module", protobuf.AttrValue(s=module))


def _in_dtype(dtype: Any, tensor: Any) -> Any:
    tf = load_tensorflow()
    return tensor if tf.as_dtype(dtype) == tensor.dtype else tf.cast(tensor, dtype)


def _tensor(leaf: Any) -> Any:
    import jax

    tf = load_tensorflow()
    if (
        isinstance(leaf, jax.Array)
        and len(devices := leaf.devices()) == 1
        and next(iter(devices)).platform == "cpu"
        and not leaf.dtype.name.startswith(_NO_DLPACK)
    ):
        return tf.experimental.dlpack.from_dlpack(leaf.__dlpack__())
    array = np.asarray(leaf)
    return tf.convert_to_tensor(array.astype(tensor_dtype(array.dtype), copy=False))
