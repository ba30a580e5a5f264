"""The data plane: named servables, free of any wire format; every protocol asks here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from servax.core.errors import NotFound, NotReady
from servax.core.tensors import Signature
from servax.protocols.generation_statistics import GenerationStatistics
from servax.protocols.statistics import Statistics
from servax.runtime.catalog import Catalog, ModelStatus, status_of
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import Servable, State, default_function

__all__ = ["DataPlane", "LoadingStep", "ModelMetadata", "ModelStatus", "Repository", "status_of"]

_TRIES = 8
"""Versions that a request is offered to when each begins to drain before it has accepted."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a client may know of a model.

    Attributes:
      versions: all that are loaded, the oldest first.
      functions: signatures by function name.
      default: the function that a request without a function means.
      texts: by function name, text tensors and the input each is turned into.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    functions: Mapping[str, Signature]
    default: str
    texts: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class LoadingStep:
    """A step of loading, before there is a servable: `restore`, 3 of 12 parts done."""

    step: str
    done: int
    total: int
    seconds: float | None


class Repository(Protocol):
    """Models that can be loaded and unloaded while the server runs."""

    def index(self) -> tuple[ModelStatus, ...]:
        """Every version of every model there is, loaded or not, with its state and reason."""
        ...

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Loads the versions that the policy wants, again where files changed; returns once they are READY.

        Raises:
          NotFound: there is no such model.
          InvalidInput: a parameter is not known.
          NotReady: it did not load; says why, and what served before serves on.
        """
        ...

    async def unload(self, name: str) -> None:
        """Drains and unloads every version; returns once they are gone.

        Raises:
          NotFound: there is no such model.
        """
        ...


class DataPlane:
    """Servables by name, version and label.

    Attributes:
      loading: gives the steps of a start-up that still goes on; None once everything is loaded. Nothing is ready
        before.
      closing: whether the process is about to end: nothing new is taken, and nothing is ready.
      repository: loads and unloads models; None where the server has no store.
      statistics: what the models have done so far.
      generation: likewise, of language models.
    """

    def __init__(
        self,
        servables: Iterable[Servable] = (),
        *,
        catalog: Catalog | None = None,
        repository: Repository | None = None,
        loading: Callable[[], tuple[LoadingStep, ...]] | None = None,
    ) -> None:
        """Serves `catalog`, which others may fill and change meanwhile, and `servables` besides."""
        self.loading = loading
        self.closing = False
        self.repository = repository
        self._catalog = Catalog() if catalog is None else catalog
        for servable in servables:
            self.add(servable)
        self.statistics = Statistics(self.__contains__)
        self.generation = GenerationStatistics(self.__contains__)

    def add(self, servable: Servable) -> None:
        """Puts a servable under its name and version, in place of one that had both."""
        self._catalog.add(servable)

    def __contains__(self, name: str) -> bool:
        return name in self._catalog

    @property
    def names(self) -> tuple[str, ...]:
        """Models of which a version is loaded, in order of name."""
        return tuple(model.name for model in self._catalog if model.versions)

    def get(self, name: str, version: str | None = None, label: str | None = None) -> Servable:
        """The servable of a version or a label; where none is named, by the split, else the newest READY version.

        Raises:
          InvalidInput: a version and a label.
          NotFound: there is none.
          NotReady: there is none yet, or it is known but not loaded.
        """
        return self._resolve(name, version, label, drawing=True)

    def list(self) -> tuple[ModelStatus, ...]:
        """The status of every version of every model, in order of name and version."""
        return tuple(status for model in self._catalog for status in model.statuses)

    def versions(self, name: str) -> tuple[ModelStatus, ...]:
        """The status of every version of a model; NotFound where there is none."""
        model = self._catalog.model(name)
        if model is None:
            self._resolve(name, None, None, drawing=False)  # says why not
            return ()
        return model.statuses

    @property
    def ready(self) -> bool:
        """Whether everything is loaded and every model that is to be served has a version that answers."""
        models = list(self._catalog)
        return (
            self.loading is None
            and not self.closing
            and (bool(models) or self.repository is not None)
            and all(model.ready for model in models if model.wanted)
        )

    @property
    def live(self) -> bool:
        """Whether this process is worth keeping: False once all that is loaded has failed, which a restart may mend."""
        loaded = [servable for model in self._catalog for servable in model.versions.values()]
        return not loaded or any(each.state is not State.FAILED for each in loaded)

    def metadata(self, name: str, version: str | None = None, label: str | None = None) -> ModelMetadata:
        """What a client may know of a model; errors as of `get`."""
        servable = self._resolve(name, version, label, drawing=False)
        signatures = servable.signatures
        model = self._catalog.model(name)
        return ModelMetadata(
            name=servable.name,
            versions=(servable.version,) if model is None else tuple(model.versions),
            platform=servable.platform,
            functions=signatures,
            default=default_function(None, signatures),
            texts=servable.texts,
        )

    def signature(
        self, name: str, version: str | None, function: str | None, label: str | None = None
    ) -> tuple[str, Signature]:
        """The function that a request means, with its signature.

        Raises:
          NotFound: no such model, version or function; the others as of `get`.
        """
        signatures: Mapping[str, Any] = self._resolve(name, version, label, drawing=False).signatures
        chosen = default_function(function, signatures)
        if chosen not in signatures:
            raise NotFound(f"model {name!r} has no function {chosen!r}", expected=" or ".join(sorted(signatures)))
        return chosen, signatures[chosen]

    async def infer(
        self, name: str, version: str | None, request: InferRequest, label: str | None = None
    ) -> InferResult:
        """Answers a request; cancelling takes it out of the queue.

        A version that begins to drain before it has run the request is replaced by the one that is served now, so
        that no request fails by a swap.
        """
        servable = self.get(name, version, label)
        for _ in range(_TRIES):
            if self.closing:
                raise NotReady("the server stops", remedy="send the request to another server")
            try:
                return await servable.infer_async(request)
            except NotReady:
                now = self.get(name, version, label)
                if now is servable:
                    raise
                servable = now
        return await servable.infer_async(request)

    def _resolve(self, name: str, version: str | None, label: str | None, *, drawing: bool) -> Servable:
        if self.loading is not None and name not in self._catalog:
            raise NotReady(f"model {name!r} may still be loading", remedy="wait until GET /v2/health/ready says so")
        return self._catalog.resolve(name, version, label, drawing=drawing)
