"""SmolLM2 in the forms that the generators take: checkpoint, bundles, GGUF of 16 bits, Hugging Face's folder.

All hold the weights of the package's GGUF file, of 4 bits; each is made once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from measure import processes
from servax.zoo import smollm2

NAME = "smollm2"


def checkpoint(folder: Path) -> Path:
    """The weights as an Orbax checkpoint, float32."""
    path = folder / "checkpoint"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        smollm2.convert(smollm2.package_file(), path)
    return path


def network(checkpoint: str, weights: str) -> tuple[Any, Any]:
    """Graph and state of the network, its weights kept as asked for."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from servax.checkpoint.quantized import restore_quantized

    graph, like = nnx.split(nnx.eval_shape(lambda: smollm2.network(weights)))
    if weights == "bfloat16":
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), like)
    wanted = _keys(nnx.to_pure_dict(like), str)
    restored = restore_quantized(checkpoint, like=wanted, placement=jax.devices()[0]).params
    nnx.replace_by_pure_dict(like, _keys(restored, lambda key: int(key) if key.isdigit() else key))
    return graph, like


def _keys(tree: Any, change: Callable[[Any], Any]) -> Any:
    return {change(key): _keys(value, change) for key, value in tree.items()} if isinstance(tree, dict) else tree


def bundle(folder: Path, weights: str) -> Path:
    """The bundle of these weights, with every wrapper that can be loaded, built again when the network changes."""
    import jax

    import servax

    sources = [Path(servax.__file__).parent / part for part in ("zoo/llama.py", "zoo/smollm2.py", "model")]
    files = sorted(file for part in sources for file in ([part] if part.is_file() else part.glob("*.py")))
    text = b"".join(file.read_bytes() for file in files) + jax.__version__.encode()
    path = folder / f"{weights}-{hashlib.sha256(text).hexdigest()[:8]}.bundle"
    if not path.exists():
        for stale in folder.glob(f"{weights}-*.bundle"):
            shutil.rmtree(stale)
        print(f"building {path.name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "servax", "build", "servax.zoo.smollm2:model", "-o", str(path)]
        command += ["--checkpoint", str(checkpoint(folder)), "--weights", weights, "-t", "aot", "-t", "export"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=processes.environment())
    return path


def gguf_f16(folder: Path) -> Path:
    """The GGUF file with its matrices dequantised to 16 bits."""
    import gguf

    path = folder / "smollm2-f16.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(smollm2.package_file())
    architecture = reader.fields["general.architecture"].contents()
    writing = path.with_suffix(".part")
    writer = gguf.GGUFWriter(writing, architecture)
    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if name in own or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        writer.add_tensor(tensor.name, values.astype(np.float16 if values.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    writing.rename(path)
    return path


def hugging_face(folder: Path) -> Path:
    """A folder that `transformers` loads, float32, with the tokenizer beside the weights."""
    from safetensors.numpy import save_file

    path = folder / "hugging_face"
    if path.exists():
        return path
    from servax.zoo.gguf_tokenizer import template_of_gguf, tokenizer_of_gguf
    from servax.zoo.llama_weights import parameters_of_gguf

    config = smollm2.CONFIG
    part = folder / "hugging_face.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    tree = parameters_of_gguf(smollm2.package_file(), config)
    save_file(_hugging_face_names(tree), part / "model.safetensors", metadata={"format": "pt"})
    known = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.feed_forward,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (part / "config.json").write_text(json.dumps(known))
    tokenizer_of_gguf(smollm2.package_file()).save(str(part / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": template_of_gguf(smollm2.package_file()),
    }
    (part / "tokenizer_config.json").write_text(json.dumps(settings))
    os.rename(part, path)
    return path


def _hugging_face_names(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {"model.embed_tokens.weight": tree["embedding"]["weight"], "model.norm.weight": tree["norm"]["scale"]}
    for number, block in tree["blocks"].items():
        layer = f"model.layers.{number}"
        found[f"{layer}.input_layernorm.weight"] = block["attention_norm"]["scale"]
        found[f"{layer}.post_attention_layernorm.weight"] = block["feed_forward_norm"]["scale"]
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            found[f"{layer}.self_attn.{theirs}_proj.weight"] = block["attention"][ours]["weight"]
        for name in ("gate", "up", "down"):
            found[f"{layer}.mlp.{name}_proj.weight"] = block["feed_forward"][name]["weight"]
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in found.items()}
