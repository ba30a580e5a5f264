from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from servax.stages import cost


def compiled(call: Any, *shapes: tuple[int, ...], donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(call, donate_argnums=donate).trace(*arguments).lower().compile()


def test_cost_of_a_matrix_product() -> None:
    found = cost.cost(compiled(jnp.matmul, (8, 16), (16, 4)))
    assert found["flops"] == 2 * 8 * 16 * 4
    assert found["bytes accessed"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert set(found) <= {"flops", "transcendentals", "bytes accessed"}


def test_transcendentals_are_apart() -> None:
    assert cost.cost(compiled(jnp.exp, (10,)))["transcendentals"] == 10


def test_memory_of_arguments_and_outputs() -> None:
    found = cost.memory(compiled(jnp.matmul, (8, 16), (16, 4)))
    assert set(found) == {"argument", "output", "temp", "code", "alias"}
    assert found["argument"] == 4 * (8 * 16 + 16 * 4)
    assert found["output"] == 4 * 8 * 4
    assert found["alias"] == 0


def test_a_donated_argument_is_overwritten() -> None:
    assert cost.memory(compiled(lambda x: x + 1, (100,), donate=(0,)))["alias"] == 400


def test_a_device_without_analysis() -> None:
    def refuse() -> None:
        raise NotImplementedError

    for analysis in (refuse, lambda: None):
        device: Any = SimpleNamespace(cost_analysis=analysis, memory_analysis=analysis)
        assert cost.cost(device) == {}
        assert cost.memory(device) == {}
