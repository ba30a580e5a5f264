"""The tokenizer in a GGUF file's header, as a `tokenizer.json` of Hugging Face's `tokenizers`."""

from __future__ import annotations

import os
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

PATTERNS = {"gpt-2": _GPT2, "default": _GPT2, "smollm": _GPT2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
"""How a text is cut before its pieces are merged, by `tokenizer.ggml.pre`."""


def tokenizer_of_gguf(path: str | os.PathLike[str]) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file.

    Raises:
      ValueError: the tokenizer is of another kind, or cuts text in a way that is not known here.
    """
    fields = _fields(path)
    model, cut = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or cut not in PATTERNS:
        raise ValueError(
            f"{os.fspath(path)}: tokenizer {model!r} with {cut!r}; known is 'gpt2' with {', '.join(PATTERNS)}"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut == "smollm" else []
    steps += [
        pre_tokenizers.Split(Regex(PATTERNS[cut]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def template_of_gguf(path: str | os.PathLike[str]) -> str | None:
    """The chat template of a GGUF file; None where it has none."""
    return _fields(path).get("tokenizer.chat_template")


def end_ids_of_gguf(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """The ids that end an answer."""
    fields = _fields(path)
    found = [fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.eot_token_id")]
    return tuple(dict.fromkeys(int(each) for each in found if each is not None))


def special_of_gguf(path: str | os.PathLike[str]) -> dict[str, str]:
    """The tokens that a chat template may name: `bos_token` and `eos_token`, as far as the file has them."""
    fields = _fields(path)
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
