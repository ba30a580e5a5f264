"""The Llama family in NumPy, float64, one token after another and one head after another, by Hugging Face's names.

Written from the papers and Hugging Face's description of `config.json`, not from `servax.zoo.llama`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def logits(config: Mapping[str, Any], tensors: Mapping[str, Array], tokens: list[int]) -> Array:
    """Of the token after each position, `[length, vocabulary]`."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    hidden = weights["model.embed_tokens.weight"][tokens]
    epsilon = config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):

        def own(name: str, layer: int = layer) -> Array | None:
            return weights.get(f"model.layers.{layer}.{name}")

        def dense(name: str, value: Array) -> Array:
            bias = own(f"{name}.bias")
            return value @ own(f"{name}.weight").T + (0 if bias is None else bias)

        normed = norm(hidden, own("input_layernorm.weight"), epsilon)
        query = dense("self_attn.q_proj", normed).reshape(-1, heads, size)
        key = dense("self_attn.k_proj", normed).reshape(-1, groups, size)
        value = dense("self_attn.v_proj", normed).reshape(-1, groups, size)
        if own("self_attn.q_norm.weight") is not None:
            query = norm(query, own("self_attn.q_norm.weight"), epsilon)
            key = norm(key, own("self_attn.k_norm.weight"), epsilon)
        mixed = np.zeros_like(query)
        for head in range(heads):
            group = head // (heads // groups)
            for at in range(len(tokens)):
                turned = turn(query[at, head], at, config)
                scores = np.array([turned @ turn(key[past, group], past, config) for past in range(at + 1)])
                shares = np.exp(scores / np.sqrt(size) - (scores / np.sqrt(size)).max())
                mixed[at, head] = (shares / shares.sum()) @ value[: at + 1, group]
        hidden = hidden + dense("self_attn.o_proj", mixed.reshape(len(tokens), -1))
        normed = norm(hidden, own("post_attention_layernorm.weight"), epsilon)
        gate = dense("mlp.gate_proj", normed)
        hidden = hidden + dense("mlp.down_proj", gate / (1 + np.exp(-gate)) * dense("mlp.up_proj", normed))
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(hidden, weights["model.norm.weight"], epsilon) @ head.T


def norm(value: Array, scale: Array, epsilon: float) -> Array:
    return value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def turn(vector: Array, position: int, config: Mapping[str, Any]) -> Array:
    """A head turned by its position: component `i` with component `i + size / 2`, as Hugging Face pairs them."""
    half = len(vector) // 2
    turned = vector.copy()
    for index in range(half):
        angle = position * config.get("rope_theta", 10_000.0) ** (-2 * index / len(vector))
        a, b = vector[index], vector[index + half]
        turned[index] = a * np.cos(angle) - b * np.sin(angle)
        turned[index + half] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """A random checkpoint of this `config.json`, by Hugging Face's names."""
    stream = np.random.default_rng(seed)
    width, wide, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or width // heads
    kind = config["model_type"]

    def draw(*shape: int, scale: float = 0.0, around: float = 0.0) -> Array:
        return (around + stream.normal(size=shape) * (scale or shape[-1] ** -0.5)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(vocabulary, width, scale=1.0),
        "model.norm.weight": draw(width, scale=0.1, around=1.0),
    }
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = draw(vocabulary, width)
    for layer in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": draw(width, scale=0.1, around=1.0),
            "post_attention_layernorm.weight": draw(width, scale=0.1, around=1.0),
            "self_attn.q_proj.weight": draw(heads * size, width),
            "self_attn.k_proj.weight": draw(groups * size, width),
            "self_attn.v_proj.weight": draw(groups * size, width),
            "self_attn.o_proj.weight": draw(width, heads * size),
            "mlp.gate_proj.weight": draw(wide, width),
            "mlp.up_proj.weight": draw(wide, width),
            "mlp.down_proj.weight": draw(width, wide),
        }
        if kind == "qwen2":
            for name, rows in (("q", heads * size), ("k", groups * size), ("v", groups * size)):
                own[f"self_attn.{name}_proj.bias"] = draw(rows, scale=0.5)
        if kind == "qwen3":
            own["self_attn.q_norm.weight"] = draw(size, scale=0.2, around=1.0)
            own["self_attn.k_norm.weight"] = draw(size, scale=0.2, around=1.0)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors
