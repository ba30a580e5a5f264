"""The data plane: named servables, free of any wire format; every protocol asks here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from servax.core.errors import NotFound, NotReady
from servax.core.tensors import Signature
from servax.protocols.statistics import Statistics
from servax.runtime.request import InferRequest, InferResult
from servax.runtime.servable import Progress, Servable, State, default_function


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a client may know of a model.

    Attributes:
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
class ModelStatus:
    """Where a model is in its life, and how far its warming is."""

    name: str
    version: str
    state: State
    reason: str | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class LoadingStep:
    """A step of loading, before there is a servable: `restore`, 3 of 12 parts done."""

    step: str
    done: int
    total: int
    seconds: float | None


class DataPlane:
    """Servables by name.

    Attributes:
      loading: gives the steps of a start-up that still goes on; None once everything is loaded. Nothing is ready
        before.
      statistics: what the models have done so far.
    """

    def __init__(
        self,
        servables: Iterable[Servable] = (),
        *,
        loading: Callable[[], tuple[LoadingStep, ...]] | None = None,
    ) -> None:
        self.loading = loading
        self._servables = {servable.name: servable for servable in servables}
        self.statistics = Statistics(self.__contains__)

    def add(self, servable: Servable) -> None:
        """Puts a servable under its name, in place of one that had it."""
        self._servables[servable.name] = servable

    def __contains__(self, name: str) -> bool:
        return name in self._servables

    def get(self, name: str, version: str | None = None) -> Servable:
        """The servable of this name, and of this version if one is given.

        Raises:
          NotFound: there is none.
          NotReady: there is none, but loading still goes on.
        """
        servable = self._servables.get(name)
        if servable is None:
            if self.loading is not None:
                raise NotReady(f"model {name!r} may still be loading", remedy="wait until GET /v2/health/ready says so")
            raise NotFound(f"there is no model {name!r}", expected=" or ".join(sorted(self._servables)) or "no model")
        if version is not None and version != servable.version:
            raise NotFound(f"model {name!r} has no version {version!r}", expected=servable.version)
        return servable

    def list(self) -> tuple[ModelStatus, ...]:
        """The status of every model, in order of name."""
        return tuple(status_of(self._servables[name]) for name in sorted(self._servables))

    @property
    def ready(self) -> bool:
        """Whether everything is loaded and every model answers."""
        return (
            self.loading is None
            and bool(self._servables)
            and all(servable.state is State.READY for servable in self._servables.values())
        )

    @property
    def live(self) -> bool:
        """Whether this process is worth keeping: False once every model has failed, which only a restart mends."""
        return not self._servables or any(each.state is not State.FAILED for each in self._servables.values())

    def metadata(self, name: str, version: str | None = None) -> ModelMetadata:
        """What a client may know of a model; NotFound where there is none."""
        servable = self.get(name, version)
        signatures = servable.signatures
        return ModelMetadata(
            name=servable.name,
            versions=(servable.version,),
            platform=servable.platform,
            functions=signatures,
            default=default_function(None, signatures),
            texts=servable.texts,
        )

    def signature(self, name: str, version: str | None, function: str | None) -> tuple[str, Signature]:
        """The function that a request means, with its signature.

        Raises:
          NotFound: no such model, version or function.
        """
        signatures: Mapping[str, Any] = self.get(name, version).signatures
        chosen = default_function(function, signatures)
        if chosen not in signatures:
            raise NotFound(f"model {name!r} has no function {chosen!r}", expected=" or ".join(sorted(signatures)))
        return chosen, signatures[chosen]

    async def infer(self, name: str, version: str | None, request: InferRequest) -> InferResult:
        """Answers a request; cancelling takes it out of the queue."""
        return await self.get(name, version).infer_async(request)


def status_of(servable: Servable) -> ModelStatus:
    """The status of one servable."""
    return ModelStatus(servable.name, servable.version, servable.state, servable.reason, servable.progress)
