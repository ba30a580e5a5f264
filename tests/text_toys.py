"""A byte-level tokenizer made by hand, and models over its tokens.

Ids 0 to 255 are bytes, in the order of their values; then `PIECES`, some of which cut characters in two; then
`SPECIAL`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from language_toys import CONFIG, Toy, compiled
from servax.generation.tokenizer import Tokenizer
from servax.zoo.llama import Llama

PIECES = (b"the", b" the", b"\xf0\x9f", b"\x98\x80", b"a\xe2\x82", b"\xac b", b"\n\n", b"STOP", b"OP", b"ST")
SPECIAL = ("<end>", "<user>", "<assistant>", "<system>")
END, USER, ASSISTANT, SYSTEM = (256 + len(PIECES) + index for index in range(len(SPECIAL)))
VOCABULARY = 256 + len(PIECES) + len(SPECIAL)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template as models have them."""

SPELLED = "Hi 😀!"
"""What `speller` answers; no byte twice."""

SURE = 10.0
"""The logit of the byte that follows; of all others 0."""

LOGPROB = -math.log(1 + (VOCABULARY - 1) * math.exp(-SURE))
OTHER = LOGPROB - SURE
"""Log probabilities of the byte that follows and of any other, by the definition of softmax."""


def characters() -> list[str]:
    """The character that stands for each byte in the files of byte-level tokenizers (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found, spare = [], 0
    for value in range(256):
        found.append(chr(value) if value in printable else chr(0x100 + spare))
        spare += value not in printable
    return found


def content(token: int) -> bytes:
    """The bytes of a token; none of a special one."""
    if token < 256:
        return bytes([token])
    return PIECES[token - 256] if token < END else b""


def library() -> Library:
    names = characters()
    vocabulary = {name: value for value, name in enumerate(names)}
    vocabulary |= {"".join(names[byte] for byte in piece): 256 + index for index, piece in enumerate(PIECES)}
    tokenizer = Library(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokenizer as servables have it."""
    return Tokenizer(library().to_str())


@functools.cache
def speller() -> Toy:
    """A model that spells `SPELLED`: after each byte the next one is sure, but for what `LOGPROB` says.

    It starts after a colon, and after `<assistant>`.
    """
    table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    path = [ASSISTANT, *SPELLED.encode(), END]
    for token, following in [*pairwise(path), (ord(":"), path[1])]:
        table[token, following] = SURE
    return compiled(_Table(table), slots=4, context=64, chunks=(8, 32), end=(END,))


@functools.cache
def rambler() -> Toy:
    """A random Llama over the same tokens: bytes in no order, whole characters and broken ones."""
    net = Llama(dataclasses.replace(CONFIG, vocabulary=VOCABULARY), rngs=nnx.Rngs(0))
    return compiled(net, slots=4, context=96, chunks=(8, 32), end=(END,))


class _Table(nnx.Module):
    """Logits by the last token alone; what it keeps of a sequence is nothing."""

    vocabulary = VOCABULARY

    def __init__(self, table: np.ndarray) -> None:
        self.table = nnx.Param(jnp.asarray(table))

    def cache(self, slots, length):
        return {"nothing": f"int32[{slots}, 1]"}

    def prefill(self, cache, tokens, slot, start):
        return cache

    def decode(self, cache, tokens, positions, running):
        return cache, self.table[...][tokens]


def frames(text: str) -> list[Any]:
    """The JSON of a stream's server-sent events, which must end in `[DONE]`."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(each.startswith("data: ") for each in events)
    return [json.loads(each.removeprefix("data: ")) for each in events]
