"""Models that people really have: each works, or is refused with what, where and the remedy; none kills the parent."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import servax
from servax.core.errors import ModelError
from servax.targets.bundle import Bundle

Build = Callable[..., Bundle]
BATCH = {"batch": [1, 4]}
random = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds `aot` and `export` of a model with live parameters."""

    def run(model: servax.Model, params: Any, **options: Any) -> Bundle:
        targets = options.pop("targets", ["aot"])
        return servax.build(model, params=params, targets=targets, output=tmp_path / "odd.bundle", **options)

    return run


def refused(call: Callable[[], Any], *parts: str) -> ModelError:
    """The error that `call` raises; its text has every one of `parts`, and a remedy."""
    with pytest.raises(ModelError) as caught:
        call()
    text = str(caught.value)
    for part in parts:
        assert part in text, text
    assert caught.value.remedy, text
    assert caught.value.where, text
    return caught.value


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def test_a_model_that_closes_over_its_weights_is_refused(build: Build) -> None:
    weights = {"w": normal(256, 256)}
    closed = jnp.asarray(weights["w"])
    model = servax.Model(
        lambda params, x: x @ closed, inputs={"x": "float32[batch, 256]"}, buckets=BATCH, name="closed"
    )
    refused(lambda: build(model, weights), "closes over", "w", "256")


def test_a_causal_mask_and_a_position_table_as_plain_attributes_are_arguments(build: Build) -> None:
    class Attention(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(50, 8, rngs=rngs)
            self.positions = jnp.sin(jnp.arange(64 * 8, dtype=jnp.float32)).reshape(64, 8)
            self.mask = jnp.tril(jnp.ones((64, 64), bool))

        def __call__(self, tokens: jax.Array) -> jax.Array:
            length = tokens.shape[1]
            x = self.embed(tokens) + self.positions[:length]
            scores = jnp.where(self.mask[:length, :length], x @ x.swapaxes(1, 2), -1e9)
            return jax.nn.softmax(scores) @ x

    live = Attention(rngs=nnx.Rngs(0))
    model = servax.Model(
        lambda: Attention(rngs=nnx.Rngs(0)),
        inputs={"tokens": "int32[batch, length]"},
        buckets={"batch": [1, 2], "length": [16, 64]},
        name="causal",
    )
    bundle = build(model, live)
    paths = {record.path for record in bundle.manifest.parameters}
    assert {"positions", "mask", "embed/embedding"} <= paths
    assert max(program.constant_bytes for program in bundle.manifest.programs) < 64 * 64
    tokens = random.integers(0, 50, (2, 11), dtype=np.int32)
    with servax.load(bundle.root, require="aot") as servable:
        np.testing.assert_allclose(servable.predict(tokens=tokens)["output"], live(tokens), atol=1e-5)


def test_batch_norm_in_train_mode_is_refused(build: Build) -> None:
    class Normed(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.norm(x, use_running_average=False)

    model = servax.Model(
        lambda: Normed(rngs=nnx.Rngs(0)), inputs={"x": "float32[batch, 4]"}, buckets=BATCH, name="normed"
    )
    error = refused(lambda: build(model, Normed(rngs=nnx.Rngs(0))), "row", "predict")
    assert "evaluation" in str(error)


def test_dropout_is_off(build: Build) -> None:
    class Dropped(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.linear(x))

    live = Dropped(rngs=nnx.Rngs(0))
    model = servax.Model(
        lambda: Dropped(rngs=nnx.Rngs(0)), inputs={"x": "float32[batch, 4]"}, buckets=BATCH, name="dropped"
    )
    bundle = build(model, live)
    x = normal(3, 4)
    expected = x @ np.asarray(live.linear.kernel[...]) + np.asarray(live.linear.bias[...])
    with servax.load(bundle.root, require="aot") as servable:
        np.testing.assert_allclose(servable.predict(x=x)["output"], expected, atol=1e-5)


def test_an_output_that_changes_with_padding_is_refused(build: Build) -> None:
    model = servax.Model(
        lambda params, x: (x * params["w"]).mean(axis=1),
        inputs={"x": "float32[batch, length]"},
        buckets={"batch": [2], "length": [8]},
        pad={"x": 1.0},
        name="mean",
    )
    error = refused(lambda: build(model, {"w": np.float32(2.0) * np.ones((), np.float32)}), "padding", "output")
    assert "lengths" in str(error)


def test_a_callback_is_refused(build: Build) -> None:
    def spoken(params: Any, x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        return x * params["w"]

    model = servax.Model(spoken, inputs={"x": "float32[batch]"}, buckets=BATCH, name="spoken")
    refused(lambda: build(model, {"w": np.ones((), np.float32)}), "calls back into Python", "debug")


def test_lapack_runs_in_every_wrapper(build: Build) -> None:
    model = servax.Model(
        lambda params, x: jnp.linalg.inv(x + params["shift"]),
        inputs={"x": "float32[batch, 3, 3]"},
        buckets=BATCH,
        name="inverse",
    )
    shift = 4 * np.eye(3, dtype=np.float32)
    bundle = build(model, {"shift": shift}, targets=["aot", "export"], max_precision_error=None)
    x = normal(3, 3, 3)
    with servax.load(bundle.root, require="aot") as servable:
        np.testing.assert_allclose(servable.predict(x=x)["output"], np.linalg.inv(x + shift), atol=1e-4)


def test_two_thousand_small_leaves(build: Build) -> None:
    params = {f"w{index:04}": normal(4) for index in range(2000)}
    model = servax.Model(
        lambda params, x: x + sum(params.values()),
        inputs={"x": "float32[batch, 4]"},
        buckets={"batch": [2]},
        name="many",
    )
    bundle = build(model, params)
    assert len(bundle.manifest.parameters) == 2000
    x = normal(2, 4)
    with servax.load(bundle.root, require="aot") as servable:
        np.testing.assert_allclose(servable.predict(x=x)["output"], x + sum(params.values()), atol=1e-3)


def test_a_linen_model_with_batch_statistics(build: Build) -> None:
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return linen.Dense(3)(linen.BatchNorm(use_running_average=not train)(x))

    module = Normed()
    variables = module.init(jax.random.key(0), jnp.ones((2, 4)), train=False)
    mean, var = normal(4), np.abs(normal(4)) + 0.5
    variables["batch_stats"]["BatchNorm_0"] = {"mean": mean, "var": var}
    model = servax.Model(Normed(), inputs={"x": "float32[batch, 4]"}, buckets=BATCH, name="linen")
    bundle = build(model, variables)
    assert {"batch_stats/BatchNorm_0/mean", "params/Dense_0/kernel"} <= {p.path for p in bundle.manifest.parameters}
    x = normal(3, 4)
    dense = variables["params"]["Dense_0"]
    expected = (x - mean) / np.sqrt(var + 1e-5) @ dense["kernel"] + dense["bias"]
    with servax.load(bundle.root, require="aot") as servable:
        np.testing.assert_allclose(servable.predict(x=x)["output"], expected, atol=1e-4)


def test_an_equinox_model(build: Build) -> None:
    import equinox as eqx

    live = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    model = servax.Model(
        lambda: eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0)),
        inputs={"x": "float32[batch, 4]"},
        buckets=BATCH,
        vmap=True,
        name="equinox",
    )
    bundle = build(model, live)
    x = normal(3, 4)
    first, second = live.layers
    hidden = np.maximum(x @ np.asarray(first.weight).T + np.asarray(first.bias), 0)
    with servax.load(bundle.root, require="aot") as servable:
        expected = hidden @ np.asarray(second.weight).T + np.asarray(second.bias)
        np.testing.assert_allclose(servable.predict(x=x)["output"], expected, atol=1e-5)


def test_a_stateful_model_keeps_its_state_in_every_wrapper_and_out_of_a_saved_model(build: Build) -> None:
    model = servax.Model(
        lambda params, x: x * params["scale"],
        inputs={"x": "float32[batch, 4]"},
        buckets={"batch": [1, 2]},
        state={"total": "float32[4]", "calls": "int32[]"},
        name="running",
    )

    def accumulate(params: Any, state: Any, x: jax.Array) -> Any:
        total = state["total"] + (x * params["scale"]).sum(axis=0)
        return {"total": total, "calls": state["calls"] + 1}, {"total": total, "calls": state["calls"] + 1}

    model.function(name="accumulate", inputs={"x": "float32[batch, 4]"}, buckets={"batch": [1, 2]}, stateful=True)(
        accumulate
    )
    bundle = build(model, {"scale": np.float32(2) * np.ones(4, np.float32)}, targets=["aot", "export", "saved_model"])
    assert set(bundle.manifest.saved_model.signatures.values()) == {"predict"}
    assert bundle.manifest.functions["accumulate"].stateful
    assert bundle.parity.proved
    x = normal(2, 4)
    for wrapper in ("aot", "export"):
        with servax.load(bundle.root, require=wrapper) as servable:
            for count in (1, 2, 3):
                answer = servable.predict("accumulate", x=x)
                np.testing.assert_allclose(answer["total"], 2 * count * x.sum(axis=0), atol=1e-5)
                assert answer["calls"] == count


NOTEBOOK = """
import numpy as np
from flax import nnx
import servax

class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 2, rngs=rngs)
    def __call__(self, x):
        return self.linear(x)

live = Net(nnx.Rngs(0))
inputs = {"x": "float32[batch, 4]"}
model = servax.Model(lambda: Net(nnx.Rngs(0)), inputs=inputs, buckets={"batch": [1, 2]}, name="cell")
bundle = servax.build(model, params=live, targets=["jit", "aot"], output=OUTPUT)
assert bundle.manifest.targets == ("aot", "export"), bundle.manifest.targets
assert bundle.parity.proved
with servax.load(OUTPUT, require="aot") as servable:
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(servable.predict(x=x)["output"], live(x), atol=1e-5)
print("done")
"""


def test_a_model_defined_in_a_notebook_cell(tmp_path: Path) -> None:
    """It lives in `__main__`, where no child process can import it: no jit part is written, which is said."""
    code = f"OUTPUT = {str(tmp_path / 'cell.bundle')!r}\n" + textwrap.dedent(NOTEBOOK)
    said = """
from servax.core import events
events.subscribe(lambda e: print("NOTICE", e.message) if isinstance(e, events.Notice) else None)
"""
    done = subprocess.run([sys.executable, "-c", said + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no jit part is written" in done.stdout
    assert done.stdout.rstrip().endswith("done")


def test_a_crash_in_a_child_is_a_verdict_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real signal in a real child: an executable's process that ends itself with SIGSEGV while it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any('servax.targets.child' in part for part in sys.orig_argv): os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = servax.Model(
        lambda params, x: x * params["w"], inputs={"x": "float32[batch]"}, buckets={"batch": [1]}, name="crash"
    )
    output = tmp_path / "crash.bundle"
    with pytest.raises(servax.ServaxError, match="SIGSEGV"):
        servax.build(model, params={"w": np.ones((), np.float32)}, targets=["aot"], output=output)
    assert not output.exists()
    assert not list(tmp_path.glob(".crash.bundle*"))


def test_bfloat16_reports_its_precision(tmp_path: Path) -> None:
    live = Linear(64, 8, rngs=nnx.Rngs(0))
    model = servax.Model(
        lambda: Linear(64, 8, rngs=nnx.Rngs(0)), inputs={"x": "float32[batch, 64]"}, buckets=BATCH, name="narrow"
    )
    from orbax.checkpoint import v1

    v1.save(str(tmp_path / "checkpoint"), nnx.to_pure_dict(nnx.state(live)))
    bundle = servax.build(
        model, checkpoint=str(tmp_path / "checkpoint"), dtype="bfloat16", targets=["aot"], output=tmp_path / "n.bundle"
    )
    assert {record.dtype for record in bundle.manifest.parameters} == {"bfloat16"}
    assert bundle.parity.proved
    precision = [verdict.precision for verdict in bundle.parity.verdicts if verdict.precision is not None]
    assert precision
    assert all(1e-5 < each < 5e-2 for each in precision), precision
