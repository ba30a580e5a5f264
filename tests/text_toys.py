"""A byte-level tokenizer made by hand: the 256 bytes, some pieces that cut characters in two, and special tokens.

Ids 0 to 255 are bytes, in the order of their values; then `PIECES`; then `SPECIAL`.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from servax.generation.tokenizer import Tokenizer

PIECES = (b"the", b" the", b"\xf0\x9f", b"\x98\x80", b"a\xe2\x82", b"\xac b", b"\n\n", b"STOP", b"OP", b"ST")
SPECIAL = ("<end>", "<user>", "<assistant>", "<system>")
END, USER, ASSISTANT, SYSTEM = (256 + len(PIECES) + index for index in range(len(SPECIAL)))
VOCABULARY = 256 + len(PIECES) + len(SPECIAL)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template as models have them."""


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        library().save(str(path))
        return Tokenizer(path)
