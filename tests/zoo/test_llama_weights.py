"""Checkpoints as others keep them, against an independent implementation in NumPy."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from servax.zoo.llama import Llama, LlamaConfig
from servax.zoo.llama_weights import (
    config_of_gguf,
    config_of_hugging_face,
    parameters_of_gguf,
    parameters_of_hugging_face,
)

sys.path.insert(0, str(Path(__file__).parent))

from llama_reference import logits, random_tensors

TOKENS = [3, 17, 0, 31, 17, 5, 9]

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "tied llama": {},
    "untied mistral": {"model_type": "mistral", "tie_word_embeddings": False},
    "qwen2 with biases": {"model_type": "qwen2"},
    "qwen3 with norms of query and key": {"model_type": "qwen3", "tie_word_embeddings": False},
}


def answers(config: LlamaConfig, parameters: Mapping[str, Any]) -> np.ndarray:
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(state, keyed(parameters))
    return np.asarray(nnx.merge(graph, state)(np.array([TOKENS], np.int32))[0])


def keyed(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return jnp.asarray(tree)
    return {int(key) if key.isdigit() else key: keyed(value) for key, value in tree.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_checkpoints_give_the_reference_s_logits(kind: str, tmp_path: Path) -> None:
    fields = {**BASE, **KINDS[kind]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_of_hugging_face(tmp_path / "config.json")
    tensors = random_tensors(fields)
    found = answers(config, parameters_of_hugging_face(tensors, config))
    np.testing.assert_allclose(found, logits(fields, tensors, TOKENS), rtol=0, atol=2e-5)


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order that GGUF keeps them for llama: 0, half, 1, half + 1, ..."""
    size = matrix.shape[0] // heads
    order = [
        head * size + index + half for head in range(heads) for index in range(size // 2) for half in (0, size // 2)
    ]
    return matrix[order]


def write_gguf(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray], kind: str) -> Path:
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_rope_freq_base(fields["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    }  # fmt: skip
    turned = {
        "self_attn.q_proj": fields["num_attention_heads"],
        "self_attn.k_proj": fields["num_key_value_heads"],
    }
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        block = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            block = f"blk.{layer}."
        heads = turned.get(stem) if kind == "llama" else None
        values = tensor if heads is None else interleaved(tensor, heads)
        writer.add_tensor(f"{block}{names[stem]}.{suffix}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["tied llama", "qwen2 with biases", "qwen3 with norms of query and key"])
def test_gguf_files_give_the_reference_s_logits(kind: str, tmp_path: Path) -> None:
    fields = {**BASE, **KINDS[kind]}
    tensors = random_tensors(fields)
    path = write_gguf(tmp_path / "model.gguf", fields, tensors, fields["model_type"])
    config = config_of_gguf(path)
    found = answers(config, parameters_of_gguf(path, config))
    np.testing.assert_allclose(found, logits(fields, tensors, TOKENS), rtol=0, atol=2e-5)


def test_a_gguf_file_and_a_config_json_say_the_same_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    path = write_gguf(tmp_path / "model.gguf", BASE, random_tensors(BASE), "llama")
    assert config_of_gguf(path) == config_of_hugging_face(tmp_path / "config.json")


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    config = config_of_hugging_face(tmp_path / "config.json")
    tensors = random_tensors(BASE)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((40, 12), np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((40, 24), np.float32)
    with pytest.raises(ValueError, match="3 tensors do not fit") as caught:
        parameters_of_hugging_face(tensors, config)
    assert "model.norm.weight: missing" in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight: shape [40, 12], expected [40, 24]" in str(caught.value)
    assert "model.layers.2.mlp.up_proj.weight: unknown" in str(caught.value)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    for fields, message in (
        ({"model_type": "gemma"}, "architecture 'gemma'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "known is rope_type llama3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **fields}))
        with pytest.raises(ValueError, match=message):
            config_of_hugging_face(tmp_path / "config.json")


def test_llama_3_s_scaling_is_read(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "rope_scaling": scaling}))
    found = config_of_hugging_face(tmp_path / "config.json").rope_scaling
    assert found is not None
    assert (found.factor, found.low, found.high, found.context) == (8.0, 1.0, 4.0, 8192)
