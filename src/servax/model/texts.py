"""A language model's tokenizer and chat template: declared by where they are, read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from servax.core.errors import UsageError

TextSource = str | Path | Callable[[], str]
"""A path, relative ones from the folder of the model's source file; or a function that gives the text."""

SpecialTokens = Mapping[str, str] | Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class LanguageTexts:
    """What stands between text and token ids.

    Attributes:
      tokenizer: text of `tokenizer.json`; None: prompts are token ids, and answers have no text.
      template: the chat template; None: there is no chat.
      special: tokens that the template may name, such as `bos_token`.
    """

    tokenizer: str | None
    template: str | None
    special: Mapping[str, str]


def read_text(source: TextSource | None, folder: Path | None, what: str) -> str | None:
    """The text that a source gives; None of none, and of an empty one.

    Raises:
      UsageError: the file is not there.
    """
    if source is None:
        return None
    if not isinstance(source, str | Path):
        return source() or None
    path = Path(source) if folder is None else folder / source
    if not path.is_file():
        raise UsageError(f"the {what}'s file is not there", seen=str(path))
    return path.read_text(encoding="utf-8") or None
