"""The models that the OpenAI API finds here, and whether they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from servax.core.errors import InvalidInput, NotFound, ServaxError
from servax.generation.servable import LanguageServable
from servax.protocols.dataplane import DataPlane
from servax.protocols.openai.embeddings import embedder_of
from servax.protocols.openai.errors import ModelNotFound
from servax.runtime.servable import Servable

_STALLED = 30.0
"""Seconds after which an engine that has work and ends no step is taken for dead."""


class Models:
    """The models of a data plane as this API sees them."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._since = int(time.time())

    def get(self, name: str) -> Servable:
        """The model that a request names.

        Raises:
          ModelNotFound: there is none.
          NotReady: there is none yet.
        """
        try:
            return self._plane.get(name)
        except NotFound as error:
            raise ModelNotFound(error.what, where="model", expected=error.expected) from None

    def language(self, name: str) -> LanguageServable:
        """The language model that a request names; errors as of `get`.

        Raises:
          InvalidInput: it is another kind of model.
        """
        servable = self.get(name)
        if not isinstance(servable, LanguageServable):
            others = [each.name for each in usable(self._plane) if isinstance(each, LanguageServable)]
            raise InvalidInput(
                f"model {name!r} generates no text", where="model", expected=" or ".join(others) or "a language model"
            )
        return servable

    def list(self) -> dict[str, Any]:
        """Those that generate, and those that embed."""
        return {"object": "list", "data": [self._told(each) for each in usable(self._plane)]}

    def described(self, name: str) -> dict[str, Any]:
        """One of these; nothing for another."""
        return next((self._told(each) for each in usable(self._plane) if each.name == name), {})

    @property
    def healthy(self) -> bool:
        """Whether all models answer and no engine is stuck."""
        engines = [each.engine for each in usable(self._plane) if isinstance(each, LanguageServable)]
        return self._plane.ready and not any(each.status.silent > _STALLED for each in engines)

    def _told(self, servable: Servable) -> dict[str, Any]:
        length = {"max_model_len": servable.spec.context} if isinstance(servable, LanguageServable) else {}
        return {"id": servable.name, "object": "model", "created": self._since, "owned_by": "servax", **length}


def usable(plane: DataPlane) -> Iterator[Servable]:
    """The models that are of use to this API: those that generate, and those that embed."""
    for name in plane.names:
        try:
            servable = plane.get(name)
        except ServaxError:  # between two versions
            continue
        if isinstance(servable, LanguageServable) or embedder_of(servable) is not None:
            yield servable
