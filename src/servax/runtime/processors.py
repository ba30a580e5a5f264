"""Processors at work: text becomes rows of token ids on the host, before a request is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from servax.core.errors import InvalidInput, StartupError
from servax.core.tensors import TensorSpec
from servax.model.processors import Processor, Text
from servax.runtime.runner import ServedFunction
from servax.stages.conversion import check_unicode


class Tokenizing:
    """`string[batch]` to ragged token ids, by a `tokenizer.json`; long text is cut as the tokenizer does it.

    Raises:
      StartupError: the file cannot be read as a tokenizer.
    """

    def __init__(self, declaration: Text, produces: TensorSpec) -> None:
        from tokenizers import Tokenizer

        self.name = declaration.name
        self.produces = produces.name
        self._dtype = produces.numpy_dtype
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(declaration.tokenizer))
        except Exception as error:  # tokenizers raises bare Exception
            raise StartupError(
                "a tokenizer cannot be read",
                where=str(declaration.tokenizer),
                seen=str(error),
                expected="a Hugging Face tokenizer.json",
            ) from error
        self._tokenizer.enable_truncation(declaration.max_length)
        self._tokenizer.no_padding()

    def __call__(self, texts: Any) -> list[np.ndarray[Any, Any]]:
        """Token ids, one array of its own length for each text.

        Raises:
          InvalidInput: this is no list of texts.
        """
        rows = self._rows(texts)
        return [np.asarray(encoding.ids, self._dtype) for encoding in self._tokenizer.encode_batch(rows)]

    def _rows(self, texts: Any) -> list[str]:
        if isinstance(texts, (str, bytes)) or np.ndim(texts) != 1:
            raise InvalidInput(
                f"tensor {self.name!r} is not a list of texts",
                where=self.name,
                seen=f"a single {type(texts).__name__}"
                if isinstance(texts, (str, bytes))
                else f"rank {np.ndim(texts)}",
                expected="string[batch]: one text for each row",
                remedy='put one text into a list: ["..."]',
            )
        rows: list[str] = []
        for index, text in enumerate(texts):
            if isinstance(text, bytes):
                try:
                    text = text.decode()  # noqa: PLW2901 (the same text, decoded)
                except UnicodeDecodeError as error:
                    raise InvalidInput(
                        f"tensor {self.name!r} holds bytes that are not UTF-8",
                        where=f"{self.name}[{index}]",
                        seen=str(error),
                    ) from error
            if not isinstance(text, str):
                raise InvalidInput(
                    f"tensor {self.name!r} holds something that is not a text",
                    where=f"{self.name}[{index}]",
                    seen=type(text).__name__,
                    expected="a string",
                )
            rows.append(text)
        check_unicode(self.name, rows)
        return rows


class Processing:
    """All processors of one function."""

    def __init__(self, tokenizings: Sequence[Tokenizing] = ()) -> None:
        self._by_name = {tokenizing.name: tokenizing for tokenizing in tokenizings}

    @classmethod
    def of(cls, function: ServedFunction) -> Processing:
        """The processors that `function` declares, loaded."""
        return cls([_start(each, function.signature.input(name)) for name, each in function.processors.items()])

    @property
    def texts(self) -> Mapping[str, str]:
        """Names of text tensors with the input each is turned into."""
        return {name: each.produces for name, each in self._by_name.items()}

    def __call__(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors of a request with texts replaced by what they are turned into.

        Raises:
          InvalidInput: a text tensor is not a list of texts, or stands beside the input it is turned into.
        """
        if not self.needed(tensors):
            return tensors
        out = dict(tensors)
        for name, tokenizing in self._by_name.items():
            if name not in out:
                continue
            if tokenizing.produces in out:
                raise InvalidInput(
                    f"{name!r} and {tokenizing.produces!r} were both sent, but {name!r} is turned into the other",
                    where=name,
                    remedy="send one of them",
                )
            out[tokenizing.produces] = tokenizing(out.pop(name))
        return out

    def needed(self, tensors: Mapping[str, Any]) -> bool:
        """Whether this request has work for a processor."""
        return bool(self._by_name) and any(name in tensors for name in self._by_name)


def _start(declaration: Processor, produces: TensorSpec) -> Tokenizing:
    return Tokenizing(declaration, produces)
