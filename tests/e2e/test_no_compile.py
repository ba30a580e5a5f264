"""Contract 1: no compile after ready, counted by JAX itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.monitoring
import numpy as np
import pytest

import servax
from servax.bench.naive import naive
from servax.runtime.request import InferRequest
from servax.targets.bundle import Bundle

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: _events.append(name) if name.startswith("/jax/core/compile") else None
)


def compilations() -> int:
    """Backend compilations so far, by a listener that is no part of servax."""
    return sum("backend_compile" in name for name in _events)


def traffic(count: int) -> Iterator[np.ndarray]:
    """Token ids of every batch size 1..8 and lengths over all of 1..128, in random order."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.linspace(1, 128, count).round().astype(int))
    batches = random.permutation(np.resize(np.arange(1, 9), count))
    for batch, length in zip(batches, lengths, strict=True):
        yield random.integers(1000, 30000, (batch, length), dtype=np.int32)


@pytest.mark.parametrize("wrapper", ["jit", "aot", "export"])
def test_mixed_traffic_compiles_nothing(minilm_bundle: Bundle, wrapper: str) -> None:
    with servax.load(minilm_bundle.root, require=wrapper) as servable:
        before = len(_events)
        for tokens in traffic(300 if wrapper == "aot" else 48):
            embedding = servable.predict(tokens=tokens)["embedding"]
            assert embedding.shape == (len(tokens), 384)
        assert _events[before:] == []


def test_plain_jit_compiles_for_every_new_shape(minilm_checkpoint: Path) -> None:
    plain = naive("servax.zoo.minilm:model", str(minilm_checkpoint))
    requests = [tokens[:, :40] for tokens in traffic(30)]
    shapes = {tokens.shape for tokens in requests}
    before = compilations()
    for tokens in requests:
        plain.infer(InferRequest("predict", {"tokens": tokens}))
    assert compilations() - before >= len(shapes) > 10


def test_an_aot_server_never_compiles_and_imports_no_framework(minilm_bundle: Bundle) -> None:
    """From its first line on: nothing traced, lowered or compiled; no TensorFlow, no Flax, no source of the model."""
    script = f"""
import sys
import jax.monitoring
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: events.append(name))
import servax.server.process  # what `servax serve` runs
from servax.api.load import load
with load({str(minilm_bundle.root)!r}, require="aot") as servable:
    assert servable.predict(text=["hello"])["embedding"].shape == (1, 384)
compiles = [name for name in events if name.startswith("/jax/core/compile")]
assert not compiles, compiles
heavy = [name for name in ("tensorflow", "flax", "optax", "servax.zoo") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_servax_imports_nothing_heavy() -> None:
    heavy = ("jax", "orbax", "flax", "starlette", "tensorflow")
    script = f"import sys, servax; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
