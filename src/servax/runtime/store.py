"""A store of versioned models: loads what the rules want beside what serves, swaps, and unloads what is left over.

`STORE/<name>/<integer version>/` holds a bundle each. Whatever is loaded is loaded, warmed and only then given
requests; what it replaces drains and goes. A version that does not load leaves everything as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from etils import epath

from servax.core.device import Device
from servax.core.errors import (
    MemoryShortage,
    NotFound,
    NotReady,
    ServaxError,
    StartupError,
    UsageError,
    first_line,
)
from servax.core.events import Notice, emit
from servax.core.monitoring import LOADING, thread_role
from servax.runtime.catalog import Catalog, ModelStatus, ServedModel
from servax.runtime.directories import lacks_only_executables, models_of, stamp, unfinished, versions_of
from servax.runtime.local import LocalServable
from servax.runtime.memory import give_back, require_room
from servax.runtime.policy import Rules
from servax.runtime.servable import State
from servax.targets.target import ProgramTable


class Candidate(Protocol):
    """A version whose manifest is read, but nothing else yet.

    Attributes:
      programs: equal for versions whose compiled programs are interchangeable; None: for no other.
      device: where it will run.
      parameter_bytes: of its parameters there.
      program_bytes: of its programs' code, and of what the largest needs while it runs.
    """

    @property
    def programs(self) -> Hashable: ...
    @property
    def device(self) -> Device: ...
    @property
    def parameter_bytes(self) -> int: ...
    @property
    def program_bytes(self) -> int: ...

    def load(self, table: ProgramTable | None) -> LocalServable:
        """The servable, LOADING, with the programs of `table` in place of its own where one is given."""
        ...


class Loader(Protocol):
    """Reads a version's manifest."""

    def __call__(self, path: epath.Path, name: str, version: str) -> Candidate: ...


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store is served.

    Attributes:
      rules: of every model that has none of its own.
      models: rules by model.
      control: `none`: every model is served from the start. `explicit`: those in `start`, and what is loaded later.
      start: the models to begin with; None: all with `none`, no model with `explicit`.
      poll: seconds between two looks at the directories; None: they are looked at once, and when something is loaded.
      swap: `keep-both`: the new version is loaded beside the old one. `unload-first`: the old one is unloaded before,
        for devices that have no room for both; the model does not answer meanwhile.
      drain_timeout: seconds that requests have in a version that is taken away.
    """

    rules: Rules = field(default_factory=Rules)
    models: Mapping[str, Rules] = field(default_factory=dict[str, Rules])
    control: Literal["none", "explicit"] = "none"
    start: tuple[str, ...] | None = None
    poll: float | None = None
    swap: Literal["keep-both", "unload-first"] = "keep-both"
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.poll is not None and not self.poll > 0:
            raise UsageError("the time between two looks at a store is above 0", seen=f"{self.poll} s")
        for value, known in ((self.control, ("none", "explicit")), (self.swap, ("keep-both", "unload-first"))):
            if value not in known:
                raise UsageError("no such way to serve a store", seen=value, expected=" or ".join(known))


@dataclass(frozen=True, slots=True)
class _Loaded:
    servable: LocalServable
    programs: Hashable
    bytes: int


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a version did not load, and how its files were then: it is tried again once they differ.

    `passing`: for want of memory, which may come back while the files stay.
    """

    error: ServaxError
    stamp: str
    passing: bool


class _Model:
    """What a store knows of one model."""

    def __init__(self, name: str, rules: Rules, *, wanted: bool) -> None:
        self.name = name
        self.rules = rules
        self.wanted = wanted
        self.loaded: dict[int, _Loaded] = {}
        self.aside: dict[int, LocalServable] = {}
        self.failures: dict[int, _Failure] = {}
        self.unfinished: dict[int, str] = {}
        self.there: tuple[int, ...] = ()
        self.making_room: str | None = None
        self.told: set[str] = set()


class Store:
    """Models in versions, loaded and unloaded while others serve.

    `start` loads what is to be served; `load`, `unload` and polling change it later. All of them load on the thread
    that calls, one at a time, in the role of a loader.

    Attributes:
      root: the store's directory.
      catalog: what requests find.
      options: how it is served.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        loader: Loader,
        options: StoreOptions | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        self.root = epath.Path(root).expanduser()
        self.options = StoreOptions() if options is None else options
        self.catalog = Catalog() if catalog is None else catalog
        self._loader = loader
        self._models: dict[str, _Model] = {}
        self._working = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether something is loaded or unloaded at this moment."""
        return self._working.locked()

    @property
    def servables(self) -> tuple[LocalServable, ...]:
        """Every version that takes requests."""
        return tuple(loaded.servable for model in list(self._models.values()) for loaded in list(model.loaded.values()))

    def start(self) -> None:
        """Loads what is to be served, and begins to poll where the options say so.

        Raises:
          StartupError: a model has no version that serves, and polling will not find one.
        """
        self._look(retry=True)
        if self.options.poll is not None:
            self._thread = threading.Thread(target=self._poll, name="servax-store", daemon=True)
            self._thread.start()
            return
        if missing := [name for name in self.options.start or () if name not in self._models]:
            raise StartupError(
                "there is no such model in the store",
                where=str(self.root),
                seen=", ".join(missing),
                expected=", ".join(models_of(self.root)) or "a directory NAME/VERSION with a bundle",
            )
        if not self._models and self.options.control == "none":
            raise StartupError(
                "the store has no model",
                where=str(self.root),
                expected="NAME/VERSION/bundle.json, VERSION being a whole number",
                remedy="build one (servax build ... -o STORE/NAME/1), or pass --poll to wait for it",
            )
        broken = [model for model in self._models.values() if model.wanted and not model.loaded]
        if broken:
            raise StartupError(
                f"no version of {', '.join(model.name for model in broken)} can be served",
                where=str(self.root),
                seen="; ".join(_why_not(model) for model in broken),
            )

    def look(self) -> None:
        """Looks at the directories, and loads and unloads by the rules what has changed there."""
        self._look(retry=False)

    def _look(self, *, retry: bool) -> None:
        with self._working, thread_role(LOADING):
            explicit = self.options.control == "explicit"
            for name in models_of(self.root):
                if name not in self._models:
                    start = self.options.start
                    wanted = not explicit if start is None else name in start
                    self._models[name] = _Model(name, self._rules(name), wanted=wanted)
            for model in self._models.values():
                if not self._stopped.is_set():
                    self._reconcile(model, retry=retry)

    def load(self, name: str, rules: Rules | None = None) -> None:
        """Loads what the rules want of a model, what failed before included; `rules` replace those it had.

        Raises:
          NotFound: there is no such model.
          NotReady: a version that the rules want did not load; what served before serves on.
        """
        with self._working, thread_role(LOADING):
            model = self._models.get(name)
            if model is None:
                if name not in models_of(self.root):
                    raise NotFound(f"there is no model {name!r} in the store", where=str(self.root))
                model = self._models[name] = _Model(name, self._rules(name), wanted=True)
            model.wanted = True
            model.rules = rules or model.rules
            self._reconcile(model, retry=True)
            failed = {*model.failures, *model.unfinished} & {*model.rules.wanted(model.there)}
            if failed or not model.loaded:
                serving = ", ".join(map(str, sorted(model.loaded)))
                raise NotReady(
                    f"{name} was not loaded as asked for",
                    seen=_why_not(model),
                    expected=f"versions {', '.join(map(str, model.rules.wanted(model.there))) or 'by the policy'}",
                    remedy=f"version {serving} serves on" if serving else "mend or remove the version, and load again",
                )

    def unload(self, name: str) -> None:
        """Takes a model's versions away, all at once; they answer what they have accepted.

        Raises:
          NotFound: there is no such model.
        """
        with self._working, thread_role(LOADING):
            model = self._models.get(name)
            if model is None:
                raise NotFound(f"there is no model {name!r} in the store", where=str(self.root))
            model.wanted = False
            self._retire(model, tuple(model.loaded))

    def rules(self, name: str) -> Rules:
        """How a model is served at present."""
        model = self._models.get(name)
        return self._rules(name) if model is None else model.rules

    def close(self, timeout: float | None = None) -> bool:
        """Ends polling, and drains and unloads everything; False if that was not possible in time.

        Each version has `timeout` seconds for its requests, and so has a version that is being loaded: a thread inside
        XLA cannot be ended.
        """
        self._stopped.set()
        if not self._working.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            for model in self._models.values():
                model.wanted = False
                self._retire(model, tuple(model.loaded), timeout=timeout)
        finally:
            self._working.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        return True

    def _rules(self, name: str) -> Rules:
        return self.options.models.get(name, self.options.rules)

    def _poll(self) -> None:
        assert self.options.poll is not None
        told: set[str] = set()
        while not self._stopped.wait(self.options.poll):
            try:
                self.look()
            except Exception as error:  # a file system that comes and goes must not end the server
                if (line := first_line(error)) not in told:
                    told.add(line)
                    emit(Notice(f"the store {self.root} cannot be looked at: {line}", "warning"))

    def _reconcile(self, model: _Model, *, retry: bool) -> None:
        """Loads what the rules want and is not loaded, then takes away what they do not want.

        A failure takes its version out, and the rules are asked again: so the newest versions that load are served, and
        one that was unloaded to make room comes back.
        """
        found = versions_of(self.root / model.name)
        if not found and model.loaded:
            self._tell(model, f"{model.name} has no version in {self.root} any more; what serves goes on", "warning")
            return
        model.there = tuple(found)
        self._forget(model, found, retry=retry)
        if not model.wanted:
            self._publish(model)
            return
        if retry:
            dead = [version for version, loaded in model.loaded.items() if loaded.servable.state is State.FAILED]
            self._retire(model, dead)
        before = set(model.loaded)
        tables = {loaded.programs: loaded.servable.table for loaded in model.loaded.values()}
        while not self._stopped.is_set():
            usable = [version for version in found if version not in model.failures and version not in model.unfinished]
            wanted = model.rules.wanted(usable)
            if not any(version in model.loaded for version in wanted):  # whatever was there is better than nothing
                wanted = wanted or tuple(sorted(before & {*usable}, reverse=True))
            missing = [version for version in wanted if version not in model.loaded]
            if not missing:
                break
            self._load(model, missing[0], found[missing[0]], wanted, tables)
        else:
            return
        surplus = [version for version in model.loaded if version not in wanted]
        if surplus and wanted:
            self._retire(model, surplus)
        self._publish(model)

    def _forget(self, model: _Model, found: Mapping[int, epath.Path], *, retry: bool) -> None:
        """Drops what is known of versions that are gone or have changed, and looks at how complete the others are."""
        for version in [each for each in (*model.failures, *model.unfinished) if each not in found]:
            model.failures.pop(version, None)
            model.unfinished.pop(version, None)
        for version, path in found.items():
            if version in model.loaded:
                continue
            failure = model.failures.get(version)
            if failure is not None and not (retry or failure.passing or stamp(path) != failure.stamp):
                continue
            model.failures.pop(version, None)
            before = model.unfinished.pop(version, None)
            try:
                lacks = unfinished(path)
            except ServaxError:
                continue  # loading says what is wrong with the manifest
            # Executables can be done without, but not while they may still be on their way.
            if lacks is not None and not (lacks_only_executables(path) and (retry or before == lacks)):
                model.unfinished[version] = lacks
                self._tell(model, f"version {version} of {model.name} is not complete: {lacks}", "info")

    def _load(
        self,
        model: _Model,
        version: int,
        path: epath.Path,
        wanted: Sequence[int],
        tables: Mapping[Hashable, ProgramTable],
    ) -> None:
        """Loads, warms and publishes one version; a failure is kept with its reason, and nothing else changes."""
        mark = stamp(path)
        try:
            candidate = self._loader(path, model.name, str(version))
            table = tables.get(candidate.programs) if candidate.programs is not None else None
            self._make_room(model, version, candidate, table, [each for each in model.loaded if each not in wanted])
            servable = candidate.load(table)
            model.aside[version] = servable
            self._publish(model)
            if self._stopped.is_set():
                raise NotReady("the store was closed before the version was warm")
            servable.warm()
        except ServaxError as error:
            self._fail(model, version, _Failure(error, mark, isinstance(error, MemoryShortage)))
        except Exception as error:
            told = StartupError("the version cannot be loaded", where=str(path), seen=first_line(error))
            self._fail(model, version, _Failure(told, mark, passing=False))
        else:
            del model.aside[version]
            model.loaded[version] = _Loaded(servable, candidate.programs, candidate.parameter_bytes)
            emit(
                Notice(
                    f"version {version} of {model.name} is served",
                    fields={"model": model.name, "version": str(version), "programs": "reused" if table else "loaded"},
                )
            )
        finally:
            model.making_room = None
        self._publish(model, only=wanted)

    def _make_room(
        self,
        model: _Model,
        version: int,
        candidate: Candidate,
        table: ProgramTable | None,
        surplus: Sequence[int],
    ) -> None:
        """Sees to it that a version fits; unloads what it replaces where that is to go first.

        Raises:
          MemoryShortage: it does not; says by how much.
        """
        parameters, programs = candidate.parameter_bytes, 0 if table is not None else candidate.program_bytes
        freed = sum(model.loaded[each].bytes for each in surplus)
        gone = ", ".join(map(str, surplus))
        first = self.options.swap == "unload-first" and bool(surplus)
        offer = f"start with --swap=unload-first, which unloads version {gone} first and frees {freed} bytes"
        require_room(
            candidate.device,
            parameters,
            programs,
            freed=freed if first else 0,
            what=f"version {version} of {model.name} does not fit "
            + ("even in place of what it replaces" if first else "beside what is loaded"),
            remedy=offer if surplus and not first else "unload another model, or use a larger device",
        )
        if first:
            model.making_room = f"version {gone} was unloaded to make room for version {version} (--swap unload-first)"
            emit(Notice(model.making_room, fields={"model": model.name}))
            self._retire(model, surplus)

    def _fail(self, model: _Model, version: int, failure: _Failure) -> None:
        if (servable := model.aside.pop(version, None)) is not None:
            servable.close()
            give_back()
        model.failures[version] = failure
        kind = failure.error.what if failure.passing else failure.error.sentence()
        self._tell(
            model,
            f"version {version} of {model.name} is not served: {failure.error.sentence()}",
            "error",
            once=f"{version} {failure.stamp} {kind}",
        )

    def _retire(self, model: _Model, versions: Sequence[int], *, timeout: float | None = None) -> None:
        """Takes versions from requests at once, lets them answer what they have accepted, and frees them."""
        if not versions:
            self._publish(model)
            return
        for version in versions:
            model.aside[version] = model.loaded.pop(version).servable
        self._publish(model)
        for version in versions:
            model.aside[version].close(self.options.drain_timeout if timeout is None else timeout)
            del model.aside[version]
        give_back()
        self._publish(model)

    def _publish(self, model: _Model, *, only: Sequence[int] | None = None) -> None:
        """Shows the model's present state to requests; `only` these versions take them, if any of them is loaded."""
        served = [version for version in model.loaded if only is None or version in only] or list(model.loaded)
        labels = model.rules.labels_of(served)
        if model.rules.split is not None:
            self._warn_of_split(model, {labels.get(name, name) for name in model.rules.split.weights})
        self.catalog.put(
            ServedModel(
                model.name,
                versions={str(version): model.loaded[version].servable for version in served},
                labels=labels,
                split=model.rules.split,
                aside={
                    **{str(version): servable for version, servable in model.aside.items()},
                    **{str(each): loaded.servable for each, loaded in model.loaded.items() if each not in served},
                },
                absent={str(version): _absent(model, version) for version in model.there},
                wanted=model.wanted,
            )
        )

    def _warn_of_split(self, model: _Model, shared: Set[str]) -> None:
        """Says so where requests are shared out between versions that do not take the same."""
        loaded = [each.servable for version, each in model.loaded.items() if str(version) in shared]
        if any(servable.signatures != loaded[0].signatures for servable in loaded[1:]):
            versions = ", ".join(servable.version for servable in loaded)
            self._tell(model, f"{model.name} is split between versions of different signatures: {versions}", "warning")

    def _tell(self, model: _Model, text: str, level: str, *, once: str | None = None) -> None:
        """Says something of a model, once."""
        if (once or text) not in model.told:
            model.told.add(once or text)
            emit(Notice(text, level, {"model": model.name}))


def _absent(model: _Model, version: int) -> ModelStatus:
    """The status of a version that is not loaded."""
    state = State.UNLOADED
    if (failure := model.failures.get(version)) is not None:
        state, reason = State.FAILED, failure.error.sentence()
    elif version in model.unfinished:
        reason = f"not complete: {model.unfinished[version]}"
    elif not model.wanted:
        reason = "not loaded: unloaded, or never asked for"
    elif model.making_room is not None:
        reason = model.making_room
    elif version in model.rules.wanted(model.there):
        reason = "not loaded yet"
    else:
        reason = f"not loaded: the policy is {model.rules.policy}"
    return ModelStatus(model.name, str(version), state, reason)


def _why_not(model: _Model) -> str:
    """The reasons of all versions that do not serve, in one line."""
    told = {version: failure.error.sentence() for version, failure in model.failures.items()}
    told |= {version: f"not complete: {lacks}" for version, lacks in model.unfinished.items()}
    if not told:
        return f"{model.name}: versions {', '.join(map(str, model.there)) or 'none'}, policy {model.rules.policy}"
    return "; ".join(f"{model.name}/{version}: {reason}" for version, reason in sorted(told.items()))
