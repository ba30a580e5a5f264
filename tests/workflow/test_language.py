"""A tiny language model, built once with matrices of 8 bits, and what comes out of its bundle."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1

import servax
import text_toys
from servax.core.errors import BundleError, UsageError
from servax.generation.servable import LanguageServable
from servax.targets.bundle import Bundle
from servax.workflow.choose import choose
from servax.zoo.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocabulary=320,
    width=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    head_size=16,
    feed_forward=64,
    context=64,
    tied=True,
)
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}"


def network(weights: str = "float32", seed: int = 0) -> Llama:
    config = dataclasses.replace(
        CONFIG,
        cache_dtype="float32" if weights == "float32" else "bfloat16",
        weights="int8" if weights == "int8" else "float",
    )
    return Llama(config, rngs=nnx.Rngs(seed))


model = servax.LanguageModel(
    network,
    name="tiny",
    slots=2,
    context=48,
    chunks=(8,),
    batches=(2,),
    burst=2,
    end=(0,),
    tokenizer=lambda: text_toys.library().to_str(),
    template=TEMPLATE,
    special={"bos_token": "<s>"},
)


def checkpoint(path: Path, seed: int) -> Path:
    v1.save(path, nnx.to_pure_dict(nnx.state(network(seed=seed))))
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("language") / "first", 0)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("language") / "second", 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, first: Path) -> Path:
    """`STORE/tiny`, whose version 1 was built from the first checkpoint in 8 bits."""
    path = tmp_path_factory.mktemp("store") / "tiny"
    servax.build(model, checkpoint=first, weights="int8", targets=["aot"], output=path / "1")
    return path


@pytest.fixture(scope="module")
def servable(store: Path) -> Iterator[LanguageServable]:
    with servax.load(store / "1", require="aot") as servable:
        assert isinstance(servable, LanguageServable)
        yield servable


@nnx.jit
def plain(net: Any, tokens: Any) -> Any:
    return net(tokens)


def likeliest(net: Any, ids: list[int], count: int) -> list[int]:
    """The likeliest continuation by the plain call of a network."""
    found: list[int] = []
    for _ in range(count):
        padded = np.array([(ids + found + [0] * 16)[:16]], np.int32)
        found.append(int(np.argmax(plain(net, padded)[0, len(ids + found) - 1])))
    return found


def ids_of(answer: Any) -> list[int]:
    return [token.id for token, _, _ in answer.tokens]


def quantized(seed: int) -> Llama:
    """The network in 8 bits; NNX quantizes what it draws, independently of a checkpoint's quantization."""
    return network("int8", seed)


def test_the_manifest_says_what_the_engine_must_know(store: Path) -> None:
    bundle = Bundle.open(store / "1")
    language = bundle.manifest.language
    assert language is not None
    assert (language.slots, language.context, language.burst, language.vocabulary) == (2, 48, 2, 320)
    assert (language.end, language.recomputes, language.weights) == ((0,), False, "int8")
    assert language.special == {"bos_token": "<s>"}
    assert bundle.read("processors/chat_template.jinja").decode() == TEMPLATE
    assert {record.dtype for record in bundle.manifest.parameters if record.path.endswith("weight")} == {"int8"}
    assert not bundle.parity.failed


def test_a_bundle_generates_text_and_renders_chats(servable: LanguageServable) -> None:
    answer = servable.generate("hello", temperature=0, max_tokens=4)
    assert servable.tokenizer is not None
    assert answer.text == servable.tokenizer.decode(ids_of(answer))
    assert servable.render([{"role": "user", "content": "hi"}]) == servable.tokenizer.encode("<s>hi")


def test_answers_are_those_of_the_network_in_8_bits(servable: LanguageServable) -> None:
    answer = servable.generate([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True)
    assert ids_of(answer) == likeliest(quantized(0), [5, 6, 7], 4)


def test_a_swap_quantizes_too(store: Path, second: Path) -> None:
    with servax.load(store / "1") as servable:
        assert isinstance(servable, LanguageServable)
        assert servable.swap(second).finite
        answer = servable.generate([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True)
    assert ids_of(answer) == likeliest(quantized(1), [5, 6, 7], 4)


def test_a_refresh_quantizes_too(store: Path, second: Path) -> None:
    report = servax.refresh(store, checkpoint=second)
    assert report.bundle.manifest.language == Bundle.open(store / "1").manifest.language
    with servax.load(report.bundle.root) as servable:
        assert isinstance(servable, LanguageServable)
        answer = servable.generate([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True)
    assert ids_of(answer) == likeliest(quantized(1), [5, 6, 7], 4)


def test_a_model_in_this_process_generates(first: Path) -> None:
    with servax.load(model, checkpoint=first, weights="float32") as servable:
        assert isinstance(servable, LanguageServable)
        answer = servable.generate([5, 6, 7], temperature=0, max_tokens=4, ignore_eos=True)
        assert servable.render([{"role": "user", "content": "hi"}])
    assert ids_of(answer) == likeliest(network(), [5, 6, 7], 4)


def test_a_saved_model_is_refused_with_the_reason(store: Path) -> None:
    with pytest.raises(Exception, match="keeps state from call to call"):
        servax.build(model, params=network(), targets=["saved_model"], output=store / "9")
    (choice,) = choose(str(store / "1"), "tensorflow")
    assert any("keeps state" in obstacle for obstacle in choice.obstacles)


def test_weights_are_of_language_models_and_of_three_kinds(first: Path, store: Path) -> None:
    with pytest.raises(UsageError, match="float32 or bfloat16 or int8"):
        servax.load(model, checkpoint=first, weights="int4")
    with pytest.raises(UsageError, match="weights and dtype say the same"):
        servax.load(model, checkpoint=first, weights="int8", dtype="bfloat16")
    with pytest.raises(UsageError, match="does not offer weights of 8 bits"):
        servax.LanguageModel(network(), name="fixed", slots=1, context=8).with_weights("int8")
    with pytest.raises(UsageError, match="weights are chosen for language models"):
        servax.load(servax.Model(lambda params, x: x, inputs={"x": "float32[batch]"}), params={}, weights="bfloat16")
    with pytest.raises(UsageError, match="weights cannot be given with a bundle"):
        servax.load(store / "1", weights="int8")


def test_a_damaged_tokenizer_is_named(store: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(store / "1", tmp_path / "bundle")
    (tmp_path / "bundle/processors/tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"processors/tokenizer\.json"):
        servax.load(tmp_path / "bundle")
