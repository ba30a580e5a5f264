"""Versions come and go under load: no failed request, no compilation, no memory kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1

import bundle_toys as toys
import servax
from servax.core import monitoring
from servax.protocols.dataplane import DataPlane
from servax.runtime.request import InferRequest
from servax.runtime.store import Store, StoreOptions
from servax.server.background import serve
from servax.stages.buckets import Bucket
from servax.workflow.load import LoadOptions
from servax.workflow.store import open_store

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: _events.append(name) if name.startswith("/jax/core/compile") else None
)

ROWS, COLUMNS = 512, 1024
"""2 MiB of parameters a version."""

PRODUCT = toys.make_function(
    "predict",
    {"x": f"float32[batch, {ROWS}]"},
    {"y": f"float32[batch, {COLUMNS}]"},
    lambda params, state, inputs: (None, {"y": inputs["x"] @ params["w"]}),
)
BUCKETS = (Bucket.of(batch=1), Bucket.of(batch=8))


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((ROWS, COLUMNS), value, np.float32)}


class Load:
    """Clients that ask one after another, within the process and over HTTP, and what they got.

    A row of x is 1, 0, 0, ...; every element of its answer is thus the number of the version that gave it.
    """

    def __init__(self, plane: DataPlane, url: str, inside: int = 6, outside: int = 2) -> None:
        self.seen: list[list[float]] = [[] for _ in range(inside + outside)]
        self.errors: list[Exception] = []
        self._plane = plane
        self._over = threading.Event()
        row = np.zeros((1, ROWS), np.float32)
        row[0, 0] = 1
        self._row = row
        self._threads = [
            threading.Thread(target=asyncio.run, args=(self._within(range(inside)),)),
            *(threading.Thread(target=self._over_http, args=(url, inside + number)) for number in range(outside)),
        ]

    @property
    def answered(self) -> int:
        return sum(map(len, self.seen))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    async def _within(self, numbers: range) -> None:
        async def client(number: int) -> None:
            while not self._over.is_set():
                with self._noting():
                    request = InferRequest("predict", {"x": self._row}, owned=True)
                    self._take(number, (await self._plane.infer("net", None, request)).tensors["y"])

        await asyncio.gather(*map(client, numbers))

    def _over_http(self, url: str, number: int) -> None:
        with servax.load(url) as remote:
            while not self._over.is_set():
                with self._noting():
                    self._take(number, remote.predict(x=self._row)["y"])

    def _take(self, number: int, answer: np.ndarray) -> None:
        assert np.ptp(answer) == 0, "an answer mixes the weights of two versions"
        self.seen[number].append(float(answer[0, 0]))

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def versions(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """As many versions as the test asks for, made by refreshing, each with its number as every weight."""
    toys.write_bundle(tmp_path / "made" / "net" / "1", {"predict": (PRODUCT, BUCKETS)}, weights(1), executables=True)
    for version in range(2, request.param + 1):
        v1.save(tmp_path / "checkpoint", weights(version))
        servax.refresh(tmp_path / "made" / "net", checkpoint=tmp_path / "checkpoint")
        shutil.rmtree(tmp_path / "checkpoint")
    return tmp_path / "made" / "net"


@contextlib.contextmanager
def served(root: Path) -> Iterator[tuple[Store, DataPlane, str]]:
    store = open_store(root, StoreOptions(), LoadOptions())
    store.start()
    plane = DataPlane(catalog=store.catalog)
    with serve(plane, port=0) as server:
        yield store, plane, server.url
    store.close()


def swap_through(versions: Path, store: Path, count: int) -> tuple[dict[int, int], int]:
    """Serves the versions one after another under load; memory after each swap, and the number of answers."""
    (store / "net").mkdir(parents=True)
    (versions / "1").rename(store / "net" / "1")
    memory: dict[int, int] = {}
    with served(store) as (running, plane, url), Load(plane, url) as load:
        enough(load, 100)
        before = len(_events)
        for version in range(2, count + 2):
            (versions / str(version)).rename(store / "net" / str(version))
            running.look()
            enough(load, 20)
            assert [each.version for each in running.servables] == [str(version)]
            memory[version - 1] = resident()
            shutil.rmtree(store / "net" / str(version - 1))
        enough(load, 100)
        assert _events[before:] == []
    assert load.errors == []
    for seen in load.seen:
        assert seen == sorted(seen), "an answer of a version after one of a later version"
        assert seen[-1] == count + 1
    return memory, load.answered


def enough(load: Load, more: int) -> None:
    """Waits until so many further requests are answered."""
    until = load.answered + more
    ticks = threading.Event()
    while load.answered < until and not load.errors:
        ticks.wait(0.002)


@pytest.mark.parametrize("versions", [6], indirect=True)
def test_versions_swap_under_load(versions: Path, tmp_path: Path) -> None:
    swap_through(versions, tmp_path / "store", 5)


@pytest.mark.long
@pytest.mark.parametrize("versions", [101], indirect=True)
def test_a_hundred_versions_swap_under_load_and_keep_no_memory(versions: Path, tmp_path: Path) -> None:
    memory, answered = swap_through(versions, tmp_path / "store", 100)
    print(
        f"{answered} answers, none failed; resident after swap 10: {memory[10] / 2**20:.1f} MiB, "
        f"after swap 100: {memory[100] / 2**20:.1f} MiB, most: {max(memory.values()) / 2**20:.1f} MiB"
    )
    assert memory[100] <= 1.05 * memory[10]


def _deep(params: Any, state: Any, inputs: Any) -> Any:
    """The product again, after work that takes XLA a while to compile and adds 0."""
    y = inputs["x"] @ params["w"]
    zero = jnp.zeros_like(y)
    for number in range(60):
        zero = jnp.tanh(zero * number) @ jnp.zeros((COLUMNS, 8)) @ jnp.zeros((8, COLUMNS))
    return None, {"y": y + zero}


def test_serving_goes_on_while_another_version_compiles_its_exports(tmp_path: Path) -> None:
    """The new version has no executables, so that its loader compiles; serving threads stay guarded and answer."""
    deep = toys.make_function(
        "predict", {"x": f"float32[batch, {ROWS}]"}, {"y": f"float32[batch, {COLUMNS}]"}, _deep
    )  # fmt: skip
    store = tmp_path / "store"
    toys.write_bundle(store / "net" / "1", {"predict": (PRODUCT, BUCKETS)}, weights(1), executables=True)
    with served(store) as (running, plane, url), Load(plane, url) as load:
        enough(load, 50)
        toys.write_bundle(tmp_path / "other", {"predict": (deep, BUCKETS)}, weights(2))
        (tmp_path / "other").rename(store / "net" / "2")
        serving, loading = monitoring.counts(monitoring.SERVING), monitoring.counts(monitoring.LOADING)
        answered = load.answered
        running.look()
        assert load.answered > answered
        enough(load, 50)
        assert (monitoring.counts(monitoring.SERVING) - serving).total == 0
        assert (monitoring.counts(monitoring.LOADING) - loading).compiled == len(BUCKETS)
        assert [each.platform for each in running.servables] == ["jax_stablehlo"]
    assert load.errors == []
    for seen in load.seen:
        assert set(seen) == {1.0, 2.0}
