"""New weights go live under load: no compile, no failed request, answers change from old to new."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1

import servax
from servax.core.errors import CheckpointError

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: _events.append(name) if name.startswith("/jax/core/compile") else None
)


class Net(nnx.Module):
    def __init__(self, width: int = 8, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def checkpoint(path: Path, value: float, width: int = 8) -> str:
    """A checkpoint whose answer for a row of ones is `width * value` everywhere."""
    kernel, bias = np.full((width, 4), value, np.float32), np.zeros(4, np.float32)
    v1.save(str(path), {"linear": {"kernel": kernel, "bias": bias}})
    return str(path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap")
    model = servax.Model(
        lambda: Net(rngs=nnx.Rngs(0)),
        inputs={"x": "float32[batch, 8]"},
        buckets={"batch": [1, 4]},
        name="net",
    )
    servax.build(model, checkpoint=checkpoint(folder / "old", 1.0), targets=["aot"], output=folder / "net.bundle")
    return folder / "net.bundle"


@pytest.mark.parametrize("wrapper", ["aot", "export"])
def test_a_swap_under_load(bundle: Path, tmp_path: Path, wrapper: str) -> None:
    new = checkpoint(tmp_path / "new", 2.0)
    x = np.ones((3, 8), np.float32)
    with servax.load(bundle, require=wrapper) as servable, servax.serve(servable, port=0) as server:
        swapped, enough = threading.Event(), [threading.Event() for _ in range(3)]

        def client(own: int) -> list[float]:
            seen: list[float] = []
            with servax.load(server.url) as remote:
                for number in range(2000):
                    answer = np.asarray(remote.predict(x=x)["output"])
                    assert np.ptp(answer) == 0, "an answer mixes old and new weights"
                    seen.append(float(answer.flat[0]))
                    if number == 20:
                        enough[own].set()
                    if swapped.is_set() and seen[-1] == 16.0:
                        break
            return seen

        with ThreadPoolExecutor(3) as pool:
            clients = [pool.submit(client, number) for number in range(3)]
            assert all(each.wait(60) for each in enough)
            before = len(_events)
            servable.swap(new)
            swapped.set()
            answers = [each.result() for each in clients]
        assert _events[before:] == []
    for seen in answers:
        assert set(seen) == {8.0, 16.0}
        assert seen == sorted(seen), "an old answer after a new one"


def test_a_swap_to_another_structure_is_refused_and_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    wide = checkpoint(tmp_path / "wide", 1.0, width=9)
    x = np.ones((1, 8), np.float32)
    with servax.load(bundle) as servable:
        with pytest.raises(CheckpointError, match="linear/kernel"):
            servable.swap(wide)
        assert servable.predict(x=x)["output"].tolist() == [[8.0] * 4]


def test_a_bundle_serves_other_weights_from_the_start(bundle: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", 3.0)
    with servax.load(bundle, checkpoint=other) as servable:
        assert servable.predict(x=np.ones((1, 8), np.float32))["output"].tolist() == [[24.0] * 4]
