"""A store as the repository extensions of the protocols ask for it: loading and unloading beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servax.core.errors import InvalidInput, UsageError
from servax.runtime.catalog import ModelStatus
from servax.runtime.labels import Split, parse_labels
from servax.runtime.policy import Policy, Rules
from servax.runtime.store import Store

_PARAMETERS = ("policy", "labels", "split")


class StoreRepository:
    """`dataplane.Repository` over a store. One thing is loaded or unloaded at a time, on a thread of its own."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="servax-repository")

    def index(self) -> tuple[ModelStatus, ...]:
        """Every version of every model there is; `Repository.index`."""
        return tuple(status for model in self._store.catalog for status in model.statuses)

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Loads what the rules want of a model; `Repository.load`.

        Args:
          name: of the model.
          parameters: `policy` (`latest:2`), `labels` (`stable=3,canary=4`) and `split` (`stable=0.9,canary=0.1`), each
            in place of what the model has; an empty text takes labels or the split away.
        """
        self._require_explicit()
        rules = changed(self._store.rules(name), parameters)
        await self._run(lambda: self._store.load(name, rules))

    async def unload(self, name: str) -> None:
        """Drains and unloads every version of a model; `Repository.unload`."""
        self._require_explicit()
        await self._run(lambda: self._store.unload(name))

    def close(self) -> None:
        """Takes no more work; what goes on is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _require_explicit(self) -> None:
        if self._store.options.control != "explicit":
            raise InvalidInput(
                "models are not loaded and unloaded on request here",
                seen=f"--control {self._store.options.control}",
                expected="--control explicit",
                remedy="start the server with --control explicit, or with --poll to follow the store's directories",
            )


def changed(rules: Rules, parameters: Mapping[str, Any]) -> Rules:
    """The rules with what a request to load says in place of what they said.

    Raises:
      InvalidInput: a parameter is not known, or cannot be read.
    """
    if unknown := sorted(parameters.keys() - {*_PARAMETERS}):
        raise InvalidInput(
            "parameters of loading are not known", seen=", ".join(unknown), expected=", ".join(_PARAMETERS)
        )
    if wrong := sorted(key for key, value in parameters.items() if not isinstance(value, str)):
        raise InvalidInput("parameters of loading are texts", where=", ".join(wrong), expected="a string")
    try:
        labels, split = parameters.get("labels"), parameters.get("split")
        return Rules(
            Policy.parse(parameters["policy"]) if "policy" in parameters else rules.policy,
            rules.labels if labels is None else parse_labels([labels] if labels else []),
            rules.split if split is None else (Split.parse(split) if split else None),
        )
    except UsageError as error:
        raise InvalidInput(error.what, seen=error.seen, expected=error.expected) from error
