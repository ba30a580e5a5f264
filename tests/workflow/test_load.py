"""Loading a model or a bundle: who owns the parameters, what a swap takes, what the operator must name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import v1

import servax
from servax.core.errors import ArtifactUnavailable, CheckpointError, UsageError
from servax.core.events import Event, Notice, listening
from servax.targets.bundle import Bundle

ONES = np.ones((1, 4), np.float32)


class Net(nnx.Module):
    """A matrix and a plain attribute that Flax does not save."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.shift = np.arange(4, dtype=np.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + self.shift


def make() -> Net:
    return Net(rngs=nnx.Rngs(0))


MODEL = servax.Model(make, inputs={"x": "float32[batch, 4]"}, buckets={"batch": [1, 2]}, name="net")
PLAIN = servax.Model(
    lambda params, x: x @ params["w"], inputs={"x": "float32[batch, 4]"}, buckets={"batch": [1]}, name="plain"
)


def weights(value: float) -> dict[str, dict[str, np.ndarray]]:
    return {"linear": {"kernel": np.full((4, 4), value, np.float32), "bias": np.zeros(4, np.float32)}}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("load")
    v1.save(str(folder / "state"), {"model": weights(1.0), "ema": weights(5.0)})
    return servax.build(
        MODEL, checkpoint=folder / "state", select="model", targets=["aot"], output=folder / "net.bundle"
    )


def test_numpy_parameters_that_change_after_load_change_nothing() -> None:
    w = np.full((64, 64), 2.0, np.float32)
    model = servax.Model(lambda params, x: x @ params["w"], inputs={"x": "float32[batch, 64]"}, buckets={"batch": [1]})
    x = np.ones((1, 64), np.float32)
    with servax.load(model, params={"w": w}) as servable:
        w[:] = 0
        assert servable.predict(x=x)["output"].tolist() == [[128.0] * 64]


def test_parameters_that_the_caller_donates_stay_alive_here() -> None:
    w = jax.numpy.full((4, 4), 2.0)
    with servax.load(PLAIN, params={"w": w}) as servable:
        jax.jit(lambda w: w + 1, donate_argnums=0)(w).block_until_ready()
        assert servable.predict(x=ONES)["output"].tolist() == [[8.0] * 4]


def test_a_bundle_of_live_parameters_refuses_a_foreign_checkpoint(tmp_path: Path) -> None:
    bundle = servax.build(MODEL, params=make(), targets=["aot"], output=tmp_path / "live.bundle")
    v1.save(str(tmp_path / "foreign"), {"conv": {"kernel": np.zeros((3, 3), np.float32)}})
    with servax.load(bundle.root) as servable:
        before = servable.predict(x=ONES)["output"]
        with pytest.raises(CheckpointError, match="linear/kernel"):
            servable.swap(str(tmp_path / "foreign"))
        np.testing.assert_array_equal(servable.predict(x=ONES)["output"], before)


def test_a_swap_keeps_what_the_definition_gave_and_takes_the_subtree_of_the_build(
    bundle: Bundle, tmp_path: Path
) -> None:
    """`model` and `ema` fit alike; the bundle was built from `model`. `shift` is in neither."""
    v1.save(str(tmp_path / "next"), {"model": weights(2.0), "ema": weights(7.0)})
    with servax.load(bundle.root) as servable:
        assert servable.predict(x=ONES)["output"].tolist() == [[4.0, 5.0, 6.0, 7.0]]
        servable.swap(str(tmp_path / "next"))
        assert servable.predict(x=ONES)["output"].tolist() == [[8.0, 9.0, 10.0, 11.0]]
        servable.swap(str(tmp_path / "next"), select="ema")
        assert servable.predict(x=ONES)["output"].tolist() == [[28.0, 29.0, 30.0, 31.0]]


def test_a_cache_that_cannot_be_written_is_done_without(bundle: Bundle) -> None:
    said: list[str] = []

    def listener(event: Event) -> None:
        if isinstance(event, Notice):
            said.append(event.message)

    with listening(listener), servax.load(bundle.root, require="export", cache_dir="/proc/none/cache") as servable:
        assert servable.predict(x=ONES)["output"].shape == (1, 4)
    assert any("no compilation cache" in message for message in said)


def test_a_cache_leaves_jax_settings_as_they_were(bundle: Bundle, tmp_path: Path) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    with servax.load(bundle.root, require="export", cache_dir=tmp_path / "cache"):
        assert [getattr(jax.config, name) for name in names] == before
    assert list((tmp_path / "cache").rglob("*-cache")), "nothing was cached"


def test_source_that_the_operator_did_not_name_is_not_run(bundle: Bundle) -> None:
    with pytest.raises(ArtifactUnavailable, match="no jit part"):
        servax.load(bundle.root, require="jit")


def test_a_platform_that_is_missing_is_named(bundle: Bundle) -> None:
    command = [sys.executable, "-m", "servax", "predict", str(bundle.root), "-i", "x=[[1, 1, 1, 1]]"]
    done = subprocess.run(
        command, env={**os.environ, "JAX_PLATFORMS": "cuda"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "JAX_PLATFORMS=cuda" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [{"require": "aot"}, {"checkpoint": "x"}, {"dtype": "bfloat16"}])
def test_a_url_takes_no_options_of_loading(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        servax.load("http://127.0.0.1:9", **options)


def test_a_path_that_is_nothing_is_said_to_be_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a bundle nor a model"):
        servax.load(str(tmp_path / "nope.bundle"))


@pytest.mark.parametrize("dtype", ["int32", "bool", "string", "float99", "float64"])
def test_weights_are_cast_to_floating_dtypes_only(dtype: str) -> None:
    with pytest.raises(UsageError, match=dtype):
        servax.load(PLAIN, params={"w": np.ones((4, 4), np.float32)}, dtype=dtype)


@pytest.mark.parametrize("buckets", [{"batch": 5}, {"batch": None}, {"batch": ["1"]}])
def test_buckets_that_are_no_sizes_are_a_usage_error(buckets: object) -> None:
    with pytest.raises(UsageError, match="buckets"):
        servax.load(PLAIN, params={"w": np.ones((4, 4), np.float32)}, buckets=buckets)
