"""What is served under which name: versions, labels and shares; read by every request, replaced as a whole."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from servax.core.errors import InvalidInput, NotFound, NotReady
from servax.runtime.labels import Split, draw
from servax.runtime.servable import Progress, Servable, State


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Where a version of a model is in its life, and how far its warming is.

    Attributes:
      reason: why it failed, is not loaded, or is not as it should be; None where there is nothing to say.
      labels: that name this version.
    """

    name: str
    version: str
    state: State
    reason: str | None = None
    progress: Progress = field(default_factory=Progress)
    labels: tuple[str, ...] = ()


def status_of(servable: Servable, labels: tuple[str, ...] = ()) -> ModelStatus:
    """The status of one servable."""
    return ModelStatus(servable.name, servable.version, servable.state, servable.reason, servable.progress, labels)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The versions of a model as requests find them.

    Attributes:
      versions: those that are loaded, by version; `Catalog.put` sorts them, the newest last.
      labels: versions by label; a label whose version is not loaded is not there for requests.
      split: shares of the requests that name neither version nor label; None: the newest READY version has them all.
      aside: versions that are warming, or that answer what they have accepted before they go; requests find none.
      absent: statuses of versions that are known but not loaded: failed, or left out.
      wanted: whether the server is ready only with a READY version of it.
    """

    name: str
    versions: Mapping[str, Servable] = field(default_factory=dict[str, Servable])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    split: Split | None = None
    aside: Mapping[str, Servable] = field(default_factory=dict[str, Servable])
    absent: Mapping[str, ModelStatus] = field(default_factory=dict[str, ModelStatus])
    wanted: bool = True

    @property
    def ready(self) -> bool:
        """Whether a version answers."""
        return any(servable.state is State.READY for servable in self.versions.values())

    @property
    def statuses(self) -> tuple[ModelStatus, ...]:
        """The status of every version, the oldest first."""
        known = dict(self.absent)
        known |= {version: status_of(servable) for version, servable in self.aside.items()}
        for version, servable in self.versions.items():
            labels = tuple(sorted(label for label, named in self.labels.items() if named == version))
            known[version] = status_of(servable, labels)
        return tuple(known[version] for version in sorted(known, key=version_order))

    def latest(self) -> Servable | None:
        """The newest READY version, or the newest where none is; None where none is loaded."""
        newest: Servable | None = None
        for servable in reversed(tuple(self.versions.values())):
            if servable.state is State.READY:
                return servable
            newest = newest or servable
        return newest

    def drawn(self, point: float) -> Servable | None:
        """The version that `point`, of 0 up to 1, falls on by the split; `latest` without one, or if none is READY."""
        if self.split is not None:
            shares = [
                (weight, servable)
                for name, weight in self.split.weights.items()
                if (servable := self.versions.get(self.labels.get(name, name))) and servable.state is State.READY
            ]
            if (servable := draw(point, shares)) is not None:
                return servable
        return self.latest()


def version_order(version: str) -> tuple[int, str]:
    """Numbers by their size, other texts before them."""
    return (int(version), "") if version.isdecimal() else (-1, version)


class Catalog:
    """Models by name. Readers see whole states of a model: each is replaced, never changed."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        """Starts empty; `chance` gives numbers of 0 up to 1, for splits."""
        self._models: Mapping[str, ServedModel] = {}
        self._chance = chance
        self._changing = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[ServedModel]:
        """The models in order of name."""
        models = self._models
        return iter([models[name] for name in sorted(models)])

    def __len__(self) -> int:
        return len(self._models)

    def model(self, name: str) -> ServedModel | None:
        """The model of this name."""
        return self._models.get(name)

    def put(self, model: ServedModel) -> None:
        """Puts a model under its name, in place of the one that had it: at once for all requests to come."""
        ordered = {version: model.versions[version] for version in sorted(model.versions, key=version_order)}
        with self._changing:
            self._models = {**self._models, model.name: replace(model, versions=ordered)}

    def add(self, servable: Servable) -> None:
        """Puts a servable under its name and version."""
        model = self._models.get(servable.name) or ServedModel(servable.name)
        self.put(replace(model, versions={**model.versions, servable.version: servable}))

    def remove(self, name: str) -> None:
        """Takes a model away."""
        with self._changing:
            self._models = {each: model for each, model in self._models.items() if each != name}

    def resolve(
        self, name: str, version: str | None = None, label: str | None = None, *, drawing: bool = True
    ) -> Servable:
        """The servable that a request means: of a version, of a label, or by the split; else the newest READY one.

        Args:
          name: of the model.
          version: as the store's directory is named.
          label: in place of a version.
          drawing: whether the split decides where nothing is named.

        Raises:
          InvalidInput: both a version and a label.
          NotFound: there is none.
          NotReady: the version is known but not loaded; says why.
        """
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"there is no model {name!r}", expected=" or ".join(sorted(self._models)) or "no model")
        if version is None and label is None:
            servable = model.drawn(self._chance()) if drawing and model.split is not None else model.latest()
            return servable or _no_version(model)
        if label is not None:
            if version is not None:
                raise InvalidInput("a request names a version or a label, not both", seen=f"{version} and {label}")
            version = model.labels.get(label)
            if version is None or version not in model.versions:
                known = sorted(each for each, named in model.labels.items() if named in model.versions)
                raise NotFound(f"model {name!r} has no label {label!r}", expected=" or ".join(known) or "no label")
        assert version is not None
        servable = model.versions.get(version)
        if servable is None:
            if known := [status for status in model.statuses if status.version == version]:
                raise _not_loaded(known[0])
            raise NotFound(
                f"model {name!r} has no version {version!r}", expected=" or ".join(model.versions) or "no version"
            )
        return servable


def _no_version(model: ServedModel) -> Servable:
    """Raises the error for a model without a loaded version."""
    statuses = model.statuses
    if not statuses:
        raise NotFound(f"model {model.name!r} has no version")
    told = [each for each in statuses if each.reason is not None]
    raise _not_loaded((told or statuses)[-1])


def _not_loaded(status: ModelStatus) -> NotReady:
    seen = status.state if status.reason is None else f"{status.state}: {status.reason}"
    return NotReady(
        f"version {status.version} of model {status.name!r} is not loaded",
        seen=seen,
        expected=State.READY,
        remedy="ask for another version, or load it; POST /v2/repository/index lists all with their state",
    )
