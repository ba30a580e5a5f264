"""What a language model has beside its functions: into a bundle, and out of it to its servable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from servax.core.errors import BundleError
from servax.model.language import LanguageModel, LanguageSpec
from servax.model.model import Model
from servax.model.texts import LanguageTexts
from servax.runtime.local import LocalServable
from servax.targets.manifest import LanguageRecord

if TYPE_CHECKING:
    from servax.targets.bundle import Bundle, BundleWriter

TOKENIZER = "processors/tokenizer.json"
TEMPLATE = "processors/chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Language:
    """A language model beside its functions.

    Attributes:
      spec: what the engine must know.
      texts: its tokenizer and chat template.
    """

    spec: LanguageSpec
    texts: LanguageTexts


def language_of_model(model: Model) -> Language | None:
    """Of a model in this process; None where it is none that generates."""
    return Language(model.spec, model.texts()) if isinstance(model, LanguageModel) else None


def language_of_bundle(bundle: Bundle) -> Language | None:
    """Of a bundle, its files checked against their digests; None where its model is none that generates."""
    record = bundle.manifest.language
    if record is None:
        return None
    return Language(
        LanguageSpec(record.slots, record.context, record.burst, record.vocabulary, record.end, record.recomputes),
        LanguageTexts(_text(bundle, record.tokenizer), _text(bundle, record.template), record.special),
    )


def write_language(writer: BundleWriter, model: Model) -> LanguageRecord | None:
    """The record of a model that generates, its files written into the temporary directory."""
    language = language_of_model(model)
    if language is None:
        return None
    assert isinstance(model, LanguageModel)
    spec, texts = language.spec, language.texts
    for file, text in ((TOKENIZER, texts.tokenizer), (TEMPLATE, texts.template)):
        if text is not None:
            writer.write(file, text.encode())
    return LanguageRecord(
        slots=spec.slots,
        context=spec.context,
        burst=spec.burst,
        vocabulary=spec.vocabulary,
        end=spec.end,
        recomputes=spec.recomputes,
        weights=model.weights,
        tokenizer=None if texts.tokenizer is None else TOKENIZER,
        template=None if texts.template is None else TEMPLATE,
        special=dict(texts.special),
    )


def servable(name: str, language: Language | None, **local: Any) -> LocalServable:
    """A servable of these functions: one that generates where they are a language model's.

    Raises:
      StartupError: the tokenizer or the chat template cannot be read.
    """
    if language is None:
        return LocalServable(name, **local)
    from servax.generation.servable import LanguageServable
    from servax.generation.template import ChatTemplate
    from servax.generation.tokenizer import Tokenizer

    texts = language.texts
    return LanguageServable(
        name,
        spec=language.spec,
        tokenizer=None if texts.tokenizer is None else Tokenizer(texts.tokenizer),
        template=None if texts.template is None else ChatTemplate(texts.template, texts.special),
        **local,
    )


def _text(bundle: Bundle, file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return bundle.read(file).decode()
    except UnicodeDecodeError as error:
        raise BundleError("this is not text", where=str(bundle.path(file)), seen=str(error)) from error
