import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bundle_toys import (
    COUNT,
    MANY,
    MANY_LEAVES,
    PARAMS,
    PREDICT,
    SMALL,
    STATIC,
    flat_params,
    make_function,
    predict_by_numpy,
    put,
)
from servax.core.errors import ModelError
from servax.stages.buckets import Bucket
from servax.targets import jit

CACHED = """
import json, sys
sys.path.insert(0, sys.argv[2])
import jax
from bundle_toys import COUNT, PARAMS, PREDICT, LARGE, SMALL, STATIC
from servax.core import monitoring
from servax.targets import compilation_cache, jit

monitoring.register()
# A program that was compiled before the cache is switched on must not keep it off.
jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((1,), "float32")).compile()
folder = compilation_cache.enable_cache(sys.argv[1], jax.devices())
before = monitoring.counts("other")
for function, bucket in ((PREDICT, SMALL), (PREDICT, LARGE), (COUNT, STATIC)):
    jit.load(function, bucket, PARAMS, jax.devices()[0])
seen = monitoring.counts("other") - before
print(json.dumps({"compiled": seen.compiled, "hits": seen.cache_hits, "traced": seen.traced, "folder": str(folder)}))
"""


def test_the_program_gives_the_numbers_and_never_compiles_again():
    loaded = jit.load(PREDICT, SMALL, PARAMS, jax.devices()[0])
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    arguments = flat_params(), (), (put(x),)
    with jax.no_tracing(True), jax.transfer_guard("disallow"):
        state, (double, y) = loaded.program(*arguments)
    assert state == ()
    np.testing.assert_allclose(y, predict_by_numpy(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(double, 2 * predict_by_numpy(x), rtol=1e-5, atol=1e-5)


def test_what_is_known_of_the_program():
    loaded = jit.load(PREDICT, SMALL, PARAMS, jax.devices()[0])
    assert loaded.target == "jit"
    assert set(loaded.seconds) == {"trace", "lower", "compile"}
    assert loaded.cost["flops"] >= 2 * 4 * 4 * 6
    assert loaded.memory["argument"] == 4 * (4 + 16 + 24)
    assert loaded.stablehlo is not None
    assert "stablehlo.dot_general" in loaded.stablehlo()


def test_state_is_donated():
    loaded = jit.load(COUNT, STATIC, PARAMS, jax.devices()[0])
    state = put(np.zeros(4, np.float32))
    (after,), (total,) = loaded.program(flat_params(), (state,), (put(np.ones(4, np.float32)),))
    assert state.is_deleted()
    assert float(total) == 4
    np.testing.assert_array_equal(after, np.ones(4))


def test_abstract_parameters_are_enough():
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), PARAMS)
    loaded = jit.load(COUNT, STATIC, abstract, jax.devices()[0])
    _, (total,) = loaded.program(flat_params(), (put(np.zeros(4, np.float32)),), (put(np.arange(4, dtype=np.float32)),))
    assert float(total) == 6


def test_two_thousand_leaves():
    loaded = jit.load(MANY_LEAVES, Bucket.of(batch=2), MANY, jax.devices()[0])
    _, (y,) = loaded.program(flat_params(MANY), (), (put(np.array([1, 2], np.float32)),))
    np.testing.assert_array_equal(y, np.array([1, 2]) * (285 * 21 + 10))


def test_lapack_and_callbacks_need_no_artifact_and_work():
    def call(params, state, inputs):
        doubled = jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct((3, 3), jnp.float32), inputs["x"])
        return None, {"y": jnp.linalg.inv(doubled)}

    function = make_function("predict", {"x": "float32[3, 3]"}, {"y": "float32[3, 3]"}, call, batch=None)
    loaded = jit.load(function, STATIC, {}, jax.devices()[0])
    x = np.array([[2, 0, 0], [0, 4, 1], [0, 0, 1]], np.float32)
    np.testing.assert_allclose(loaded.program((), (), (put(x),))[1][0], np.linalg.inv(2 * x), rtol=1e-5)


def test_a_function_that_does_not_trace_is_a_model_error():
    function = make_function("broken", {"x": "float32[2]"}, {"y": "float32[2]"}, lambda *_: 1 / 0, batch=None)
    with pytest.raises(ModelError, match="does not trace") as caught:
        jit.load(function, STATIC, {}, jax.devices()[0])
    assert caught.value.where == "broken@static"
    assert "ZeroDivisionError" in str(caught.value.seen)


def test_a_second_start_finds_every_program_in_the_cache(tmp_path):
    def start():
        child = subprocess.run(
            [sys.executable, "-c", CACHED, str(tmp_path / "cache"), str(Path(__file__).parents[1])],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
            env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        )
        return json.loads(child.stdout)

    first, second = start(), start()
    assert (first["compiled"], first["hits"]) == (3, 0)
    assert (second["compiled"], second["hits"]) == (3, 3)
    assert second["traced"] > 0
    assert Path(first["folder"]).parent == tmp_path / "cache"
    assert second["folder"] == first["folder"]
