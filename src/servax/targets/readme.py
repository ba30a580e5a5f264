"""The bundle's README.md: three ways to use it, in snippets that run as they stand."""

from __future__ import annotations

from servax.stages.buckets import Bucket
from servax.targets.manifest import FunctionRecord, Manifest, ProgramRecord


def readme_text(manifest: Manifest) -> str:
    """The text of README.md for a bundle with this manifest."""
    lines = [
        f"# {manifest.name}",
        "",
        f"A servax bundle, built {manifest.created}: one checkpoint, "
        f"{len(manifest.functions)} function{'s' if len(manifest.functions) != 1 else ''}, targets "
        f"{', '.join(manifest.targets)}, platforms {', '.join(manifest.platforms)}.",
        "`servax inspect` on this directory shows everything that is in it; run the snippets from within it.",
        "",
    ]
    for name, record in manifest.functions.items():
        lines += [f"- `{name}`: {_signature(record)}; buckets {'; '.join(record.buckets)}"]
    lines += ["", "## Serve it", "", "```sh", _serve(manifest), "```", ""]
    if (program := _smallest(manifest)) is not None:
        lines += [
            "## Call it with JAX alone",
            "",
            "Needs `jax`, `flatbuffers` and `orbax-checkpoint`; neither servax nor the model's source.",
            "",
            "```python",
            _call(manifest, program),
            "```",
            "",
        ]
    if manifest.saved_model is not None:
        lines += [
            "## Serve it with TensorFlow Serving",
            "",
            f"The SavedModel was made for TensorFlow {manifest.saved_model.tensorflow}. TensorFlow Serving looks for "
            "numbered versions under a model's name:",
            "",
            "```sh",
            f"mkdir -p models/{manifest.name}/1 && cp -r saved_model/. models/{manifest.name}/1/",
            f"tensorflow_model_server --rest_api_port=8501 --model_name={manifest.name} "
            f'--model_base_path="$PWD/models/{manifest.name}"',
            "```",
            "",
        ]
    return "\n".join(lines)


def _serve(manifest: Manifest) -> str:
    return f"servax serve . --http 8000\ncurl localhost:8000/v2/models/{manifest.name}"


def _signature(record: FunctionRecord) -> str:
    signature = record.signature()

    def side(specs: tuple[tuple[str, str], ...]) -> str:
        return ", ".join(f"`{name}: {text}`" for name, text in specs)

    inputs = tuple((spec.name, spec.text()) for spec in signature.inputs)
    outputs = tuple((spec.name, spec.text()) for spec in signature.outputs)
    return f"{side(inputs)} gives {side(outputs)}"


def _smallest(manifest: Manifest) -> ProgramRecord | None:
    """The smallest export of the model's own call, or of its first function."""
    names = sorted(manifest.functions, key=lambda name: (name != "predict", name))
    for name in names:
        for bucket in sorted(map(Bucket.parse, manifest.functions[name].buckets), key=Bucket.volume):
            if (program := manifest.program(name, bucket.label)) is not None:
                return program
    return None


def _call(manifest: Manifest, program: ProgramRecord) -> str:
    record = manifest.functions[program.function]
    sizes = Bucket.parse(program.bucket).mapping()
    tensors = [f'    "{spec.name}": {_zeros(spec.concrete(sizes), spec.dtype)},' for spec in record.signature().inputs]
    lines = [
        "from pathlib import Path",
        "",
        "import jax",
        "import jax.numpy as jnp",
        "from orbax.checkpoint import v1 as ocp",
        "",
    ]
    if manifest.parameters:
        lines += [
            'path = Path("params").absolute()',
            "here = jax.sharding.SingleDeviceSharding(jax.devices()[0])",
            "target = jax.tree.map(",
            "    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), ocp.metadata(path).metadata",
            ")",
            "params = ocp.load(path, target)  # a nested dictionary of arrays",
        ]
    else:
        lines += ["params = {}"]
    lines += [f'program = jax.export.deserialize(Path("{program.file}").read_bytes())', "inputs = {", *tensors, "}"]
    if record.stateful:
        lines += [
            "state = {",
            *(f'    "{each.name}": {_zeros(each.spec().concrete({}), each.dtype)},' for each in manifest.state),
            "}",
            "state, outputs = jax.jit(program.call, donate_argnums=1)(params, state, inputs)",
        ]
    else:
        lines += ["outputs = jax.jit(program.call)(params, inputs)"]
    lines += [
        "for name, array in outputs.items():",
        "    print(name, array.dtype, array.shape)",
    ]
    return "\n".join(lines)


def _zeros(shape: tuple[int, ...], dtype: str) -> str:
    size = f"({shape[0]},)" if len(shape) == 1 else f"({', '.join(map(str, shape))})"
    return f'jnp.zeros({size}, "{dtype}")'
