"""Weights of the Llama family as others keep them: GGUF files and Hugging Face's safetensors, with their sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from servax.zoo.llama import LlamaConfig, RopeScaling

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
"""`general.architecture` of a GGUF file, and `model_type` of a `config.json`."""


def config_of_gguf(path: str | os.PathLike[str]) -> LlamaConfig:
    """The sizes that a GGUF file's header gives.

    Raises:
      ValueError: the file is of another architecture.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    kind = fields["general.architecture"]
    _require_known(kind, path)
    tensors = {tensor.name for tensor in reader.tensors}
    heads, width = fields[f"{kind}.attention.head_count"], fields[f"{kind}.embedding_length"]
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return LlamaConfig(
        vocabulary=int(embedding.shape[1]),
        width=width,
        layers=fields[f"{kind}.block_count"],
        heads=heads,
        key_value_heads=fields.get(f"{kind}.attention.head_count_kv", heads),
        head_size=fields.get(f"{kind}.attention.key_length", width // heads),
        feed_forward=fields[f"{kind}.feed_forward_length"],
        context=fields[f"{kind}.context_length"],
        rope_base=fields.get(f"{kind}.rope.freq_base", 10_000.0),
        epsilon=round(fields[f"{kind}.attention.layer_norm_rms_epsilon"], 12),
        tied="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in tensors,
    )


def config_of_hugging_face(path: str | os.PathLike[str]) -> LlamaConfig:
    """The sizes that a Hugging Face `config.json` gives.

    Raises:
      ValueError: it is of another architecture, or scales its positions in a way that is not known here.
    """
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    kind = fields["model_type"]
    _require_known(kind, path)
    scaling = fields.get("rope_scaling")
    if scaling is not None and scaling.get("rope_type", scaling.get("type")) not in ("llama3", "default"):
        raise ValueError(f"{os.fspath(path)}: rope_scaling {scaling}; known is rope_type llama3")
    stretched: RopeScaling | None = None
    if scaling is not None and scaling.get("rope_type") == "llama3":
        stretched = RopeScaling(
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        )
    return LlamaConfig(
        vocabulary=fields["vocab_size"],
        width=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        heads=fields["num_attention_heads"],
        key_value_heads=fields.get("num_key_value_heads", fields["num_attention_heads"]),
        head_size=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        feed_forward=fields["intermediate_size"],
        context=fields["max_position_embeddings"],
        rope_base=fields.get("rope_theta", 10_000.0),
        epsilon=fields["rms_norm_eps"],
        tied=fields.get("tie_word_embeddings", False),
        attention_bias=fields.get("attention_bias", kind == "qwen2"),
        query_key_norm=kind == "qwen3",
        rope_scaling=stretched,
    )


def parameters_of_gguf(path: str | os.PathLike[str], config: LlamaConfig) -> Tree:
    """The parameters of `Llama(config)`, float32, from a GGUF file of any quantisation that `gguf` dequantises.

    GGUF keeps query and key of the llama architecture permuted, for rotary pairs that lie side by side; the pairs of
    `Llama` are a head's two halves, as those of the other architectures are in GGUF too.

    Raises:
      ValueError: tensors are missing, unknown or misshapen; all of them are listed.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> Array | None:
        tensor = stored.get(name)
        if tensor is None:
            return None
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values.reshape([int(size) for size in reversed(tensor.shape)])

    names = {
        "embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
        "attention_norm": "attn_norm.weight", "feed_forward_norm": "ffn_norm.weight",
        "query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output",
        "query_norm": "attn_q_norm.weight", "key_norm": "attn_k_norm.weight",
        "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    }  # fmt: skip
    ignored = {"rope_freqs.weight"}
    turn = _unpermuted if kind == "llama" else None
    return _parameters(config, set(stored) - ignored, read, names, layer_name="blk.{}.", turn=turn)


def parameters_of_hugging_face(tensors: Mapping[str, Array], config: LlamaConfig) -> Tree:
    """The parameters of `Llama(config)` from tensors by their Hugging Face names.

    Raises:
      ValueError: tensors are missing, unknown or misshapen; all of them are listed.
    """
    names = {
        "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
        "attention_norm": "input_layernorm.weight", "feed_forward_norm": "post_attention_layernorm.weight",
        "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "query_norm": "self_attn.q_norm.weight", "key_norm": "self_attn.k_norm.weight",
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    return _parameters(config, set(tensors) - ignored, tensors.get, names, layer_name="model.layers.{}.", turn=None)


def _parameters(
    config: LlamaConfig,
    left: set[str],
    read: Callable[[str], Array | None],
    names: Mapping[str, str],
    *,
    layer_name: str,
    turn: Callable[[Array, int], Array] | None,
) -> Tree:
    faults: list[str] = []

    def take(name: str, *shape: int) -> Array:
        left.discard(name)
        tensor = read(name)
        if tensor is None:
            faults.append(f"{name}: missing")
        elif tensor.shape != shape:
            faults.append(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
        else:
            return np.ascontiguousarray(tensor)
        return np.zeros(shape, np.float32)

    def dense(name: str, inputs: int, outputs: int, *, heads: int = 0, bias: bool = False) -> Tree:
        weight = take(f"{name}.weight", outputs, inputs)
        found: Tree = {"weight": turn(weight, heads) if turn is not None and heads else weight}
        if bias:
            offset = take(f"{name}.bias", outputs)
            found["bias"] = turn(offset, heads) if turn is not None and heads else offset
        return found

    width, size, wide = config.width, config.head_size, config.feed_forward
    queries, pairs = config.heads * size, config.key_value_heads * size
    blocks: Tree = {}
    for index in range(config.layers):
        layer = layer_name.format(index)
        own = {key: layer + value for key, value in names.items()}
        attention: Tree = {
            "query": dense(own["query"], width, queries, heads=config.heads, bias=config.attention_bias),
            "key": dense(own["key"], width, pairs, heads=config.key_value_heads, bias=config.attention_bias),
            "value": dense(own["value"], width, pairs, bias=config.attention_bias),
            "output": dense(own["output"], queries, width),
        }
        if config.query_key_norm:
            attention["query_norm"] = {"scale": take(own["query_norm"], size)}
            attention["key_norm"] = {"scale": take(own["key_norm"], size)}
        blocks[str(index)] = {
            "attention_norm": {"scale": take(own["attention_norm"], width)},
            "attention": attention,
            "feed_forward_norm": {"scale": take(own["feed_forward_norm"], width)},
            "feed_forward": {
                "gate": dense(own["gate"], width, wide),
                "up": dense(own["up"], width, wide),
                "down": dense(own["down"], wide, width),
            },
        }
    tree: Tree = {
        "embedding": {"weight": take(names["embedding"], config.vocabulary, width)},
        "blocks": blocks,
        "norm": {"scale": take(names["norm"], width)},
    }
    if not config.tied:
        tree["head"] = {"weight": take(names["head"], config.vocabulary, width)}
    faults += [f"{name}: unknown" for name in sorted(left)]
    if faults:
        raise ValueError(f"{len(faults)} tensors do not fit this network:\n  " + "\n  ".join(faults))
    return tree


def _unpermuted(matrix: Array, heads: int) -> Array:
    """Rows of a head from pairs side by side to its two halves: what llama.cpp's conversion did, undone."""
    rows = matrix.reshape(heads, matrix.shape[0] // heads // 2, 2, *matrix.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(matrix.shape))


def _require_known(kind: str, path: str | os.PathLike[str]) -> None:
    if kind not in ARCHITECTURES:
        raise ValueError(f"{os.fspath(path)} is of architecture {kind!r}; known are {', '.join(ARCHITECTURES)}")
