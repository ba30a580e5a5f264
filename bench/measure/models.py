"""The two models: parameters by seed, the bundle servax serves, requests, and NumPy's answers to them.

NumPy's answers come from an implementation of its own, in float64.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import servax
from measure import processes
from network import HEADS, HIDDEN, LAYERS, LONGEST, VOCABULARY, WIDTH, encoder, mlp

MLP_BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 256
"""Most tokens in one call of the encoder's grid; only requests of several long rows need more."""

mlp_model = servax.Model(
    mlp,
    inputs={"x": "float32[batch, 784]"},
    buckets={"batch": MLP_BATCHES},
    name="mlp",
)
encoder_model = servax.Model(
    encoder,
    inputs={"tokens": "int32[batch, length]"},
    lengths={"n": "length"},
    name="encoder",
)


@dataclass(frozen=True, slots=True)
class Model:
    """One of the two networks.

    Attributes:
      name: mlp or encoder.
      input: name of its input.
      datatype: of the input, in the Open Inference Protocol's words.
    """

    name: str
    input: str
    datatype: str


MODELS = {"mlp": Model("mlp", "x", "FP32"), "encoder": Model("encoder", "tokens", "INT32")}


def grid() -> list[dict[str, int]]:
    """The encoder's buckets: lengths in steps of 16, batches that fill 256 tokens, and two for larger requests.

    Each costs some 6 MiB, so there are not more.
    """
    steps = range(16, LONGEST + 1, 16)
    alone = [(1, length) for length in steps]
    joined = [(4 if length <= 64 else 2, length) for length in steps]
    large = [(8, length) for length in (32, 64, 128)]
    return [{"batch": batch, "length": length} for batch, length in alone + joined + large]


@cache
def parameters(model: str) -> dict[str, np.ndarray]:
    """The parameters, by seed."""
    random = np.random.default_rng(0)

    def normal(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    if model == "mlp":
        sizes = (784, 512, 512, 10)
        kernels = {f"kernel{i}": normal(sizes[i], sizes[i + 1], (2 / sizes[i]) ** 0.5) for i in range(3)}
        biases = {f"bias{i}": normal(1, sizes[i + 1], 0.1)[0] for i in range(3)}
        return kernels | biases
    arrays = {"words": normal(VOCABULARY, WIDTH, 1.0), "positions": normal(LONGEST, WIDTH, 0.3)}
    for layer in range(LAYERS):
        name = f"layer{layer}"
        arrays[f"{name}_qkv"] = normal(WIDTH, 3 * WIDTH, WIDTH**-0.5)
        arrays[f"{name}_output"] = normal(WIDTH, WIDTH, WIDTH**-0.5)
        arrays[f"{name}_expand"] = normal(WIDTH, HIDDEN, WIDTH**-0.5)
        arrays[f"{name}_contract"] = normal(HIDDEN, WIDTH, HIDDEN**-0.5)
        arrays[f"{name}_norm0"] = 1 + normal(1, WIDTH, 0.1)[0]
        arrays[f"{name}_norm1"] = 1 + normal(1, WIDTH, 0.1)[0]
    return arrays


def requests(model: str, count: int, *, rows: Sequence[int] = (1,)) -> list[np.ndarray]:
    """Inputs of `count` requests: `[rows, 784]` in 0..1, or tokens `[rows, length]`, lengths spread over 5..128."""
    random = np.random.default_rng(1)
    sizes = np.resize(rows, count)
    random.shuffle(sizes)
    if model == "mlp":
        return [random.random((size, 784), dtype=np.float32) for size in sizes]
    lengths = np.linspace(5, LONGEST, count).round().astype(int)
    random.shuffle(lengths)
    return [
        random.integers(0, VOCABULARY, (size, length), dtype=np.int32)
        for size, length in zip(sizes, lengths, strict=True)
    ]


def answer(model: str, params: Mapping[str, np.ndarray], given: np.ndarray) -> np.ndarray:
    """NumPy's answer to one request."""
    wide = {name: array.astype(np.float64) for name, array in params.items()}
    if model == "mlp":
        hidden = given.astype(np.float64)
        for layer in range(2):
            hidden = np.maximum(hidden @ wide[f"kernel{layer}"] + wide[f"bias{layer}"], 0)
        return hidden @ wide["kernel2"] + wide["bias2"]
    hidden = wide["words"][given] + wide["positions"][: given.shape[1]]
    for layer in range(LAYERS):
        name = f"layer{layer}"
        query, key, value = np.split(_norm(hidden) * wide[f"{name}_norm0"] @ wide[f"{name}_qkv"], 3, axis=-1)
        attended = np.concatenate(
            [
                _softmax(q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5) @ v
                for q, k, v in zip(*(np.split(part, HEADS, axis=-1) for part in (query, key, value)), strict=True)
            ],
            axis=-1,
        )
        hidden = hidden + attended @ wide[f"{name}_output"]
        grown = _norm(hidden) * wide[f"{name}_norm1"] @ wide[f"{name}_expand"]
        gelu = 0.5 * grown * (1 + np.tanh((2 / np.pi) ** 0.5 * (grown + 0.044715 * grown**3)))
        hidden = hidden + gelu @ wide[f"{name}_contract"]
    return hidden.mean(axis=1)


def _norm(hidden: np.ndarray) -> np.ndarray:
    return (hidden - hidden.mean(-1, keepdims=True)) / np.sqrt(hidden.var(-1, keepdims=True) + 1e-6)


def _softmax(scores: np.ndarray) -> np.ndarray:
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


def parameters_file(model: str, folder: Path) -> Path:
    """The parameters as an npz, written once."""
    path = folder / f"{model}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, **parameters(model))
    return path


def bundle(model: str, folder: Path, targets: Sequence[str], core: int) -> Path:
    """The bundle of a model, built once for each set of targets and each jax.

    Args:
      core: where the server will run: executables are for one count of cores.
    """
    import jax

    from servax.checkpoint import save

    shapes = MLP_BATCHES if model == "mlp" else grid()
    digest = hashlib.sha256(repr((shapes, jax.__version__)).encode()).hexdigest()[:8]
    path = folder / f"{model}-{'-'.join(targets)}-{digest}.bundle"
    if path.exists():
        return path
    checkpoint = folder / f"{model}.checkpoint"
    if not checkpoint.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save(checkpoint, parameters(model))
    buckets: list[str] = []
    if model == "encoder":
        file = folder / "encoder_buckets.json"
        file.write_text(json.dumps({"predict": grid()}))
        buckets = ["--bucket-file", str(file)]
    chosen = [part for target in targets for part in ("-t", target)]
    command = [sys.executable, "-m", "servax", "build", f"{__file__}:{model}_model"]
    command += ["--checkpoint", str(checkpoint), "-o", str(path), "--overwrite", *buckets, *chosen]
    subprocess.run(processes.pinned(core, command), check=True, stdout=subprocess.DEVNULL, env=processes.environment())
    return path
