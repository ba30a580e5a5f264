"""What a process serves: servables that a function loads, or a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from servax.core.errors import UsageError
from servax.protocols.dataplane import Repository
from servax.protocols.repository import StoreRepository
from servax.runtime.catalog import Catalog
from servax.runtime.local import LocalServable
from servax.runtime.store import Store

Loader = Callable[[], LocalServable | Sequence[LocalServable]]
"""Loads what is to be served. What comes back LOADING is warmed later, where readiness sees each program."""


class Models(Protocol):
    """Models of a process.

    Attributes:
      catalog: what is served; filled by `start`, and perhaps changed later.
      repository: loads and unloads on request; None: nothing does.
      servables: what takes requests at present.
    """

    @property
    def catalog(self) -> Catalog: ...
    @property
    def repository(self) -> Repository | None: ...
    @property
    def servables(self) -> Sequence[LocalServable]: ...

    def start(self) -> None:
        """Loads and warms everything; raises what keeps it from being served."""
        ...

    def close(self) -> None:
        """Frees what they hold; after a drain."""
        ...


class LoadedModels:
    """Models that are loaded once, by a function."""

    repository = None

    def __init__(self, load: Loader) -> None:
        self.catalog = Catalog()
        self.servables: tuple[LocalServable, ...] = ()
        self._load = load

    def start(self) -> None:
        loaded = self._load()
        servables = (loaded,) if isinstance(loaded, LocalServable) else tuple(loaded)
        names = [servable.name for servable in servables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(
                "two models have one name",
                seen=", ".join(twice),
                expected="names of their own",
                remedy="give each its name when it is built, or put versions of one model into a store",
            )
        self.servables = servables
        for servable in servables:
            self.catalog.add(servable)
        for servable in servables:
            servable.warm()

    def close(self) -> None:
        for servable in self.servables:
            servable.close()


class StoredModels:
    """Models of a store, whose versions may change while it is served."""

    def __init__(self, store: Store) -> None:
        self.catalog = store.catalog
        self.repository = StoreRepository(store)
        self._store = store

    @property
    def servables(self) -> Sequence[LocalServable]:
        return self._store.servables

    def start(self) -> None:
        self._store.start()

    def close(self) -> None:
        self.repository.close()
        self._store.close()
