"""A server with a model that spells, one that rambles, one that embeds, and one that none of the API is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import serving_toys
import text_toys as toys
from servax.core.tensors import Signature, TensorSpec
from servax.generation.servable import LanguageServable
from servax.generation.template import ChatTemplate
from servax.model.processors import Text
from servax.runtime.local import LocalServable
from servax.runtime.runner import ServedFunction
from servax.server.background import BackgroundServer, serve
from servax.stages.buckets import Bucket, BucketGrid
from servax.targets.target import ProgramTable

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "seven": 7}


def embed_flat(params, state, inputs):
    """Of each row the sum of its ids, how many there are, and a half."""
    n, x = inputs
    total = jnp.where(jnp.arange(x.shape[1])[None] < n[:, None], x, 0).sum(1)
    return (), (jnp.stack([total, n, jnp.full_like(n, 0.5, jnp.float32)], axis=1).astype(jnp.float32),)


def embedding_toy(tokenizer: Path) -> LocalServable:
    ids = TensorSpec("x", "int32", ("batch", "length"))
    lengths = TensorSpec("n", "int32", ("batch",))
    outputs = (TensorSpec.parse("embedding", "float32[batch, 3]"),)
    signature = Signature((lengths, ids), outputs, lengths={"n": "length"})
    bucket = Bucket.of(batch=4, length=16)
    return serving_toys.toy(
        "embedder",
        functions={"embed": ServedFunction(signature, processors={"x": Text(tokenizer, 16)})},
        grid=BucketGrid({"embed": (bucket,)}),
        table=ProgramTable({("embed", bucket): serving_toys.compiled(embed_flat, signature, bucket, jax.devices()[0])}),
        state=(),
    ).warm()


def language(toy: Any, name: str, **options: Any) -> LanguageServable:
    template = ChatTemplate(toys.TEMPLATE, {})
    return toy.servable(name=name, tokenizer=toys.tokenizer(), template=template, **options)


@pytest.fixture(scope="session")
def rambler() -> Iterator[LanguageServable]:
    with language(toys.rambler(), "rambler") as servable:
        yield servable


@pytest.fixture(scope="session")
def server(rambler: LanguageServable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    tokenizer = serving_toys.word_tokenizer(tmp_path_factory.mktemp("words"), WORDS)
    with (
        language(toys.speller(), "speller") as speller,
        embedding_toy(tokenizer) as embedder,
        serving_toys.toy().warm() as other,
        serve([speller, rambler, embedder, other], port=0) as server,
    ):
        yield server


@pytest.fixture
def http(server: BackgroundServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client
