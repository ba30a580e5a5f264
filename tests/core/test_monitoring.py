"""Compilations are counted by role of the thread, against `jax.monitoring` events that the test knows of."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np

from servax.core import monitoring
from servax.core.events import CompileEvent, listening
from servax.core.monitoring import LOADING, OTHER, SERVING, CompileCounts, counts, register, thread_role


def compile_once(factor: float) -> None:
    x = np.ones(3, np.float32)
    jax.jit(lambda x: jnp.sin(x) * factor).lower(x).compile()


def test_counts_go_to_the_role_of_the_thread():
    register()
    register()
    before = {role: counts(role) for role in (SERVING, LOADING, OTHER)}
    with thread_role(LOADING):
        compile_once(2.0)
        with thread_role(SERVING):
            compile_once(3.0)
        compile_once(4.0)
    seen = {role: counts(role) - before[role] for role in before}
    assert seen[LOADING].compiled == 2
    assert seen[SERVING].compiled == 1
    assert seen[OTHER].total == 0
    assert seen[SERVING].lowered == 1
    assert seen[SERVING].traced >= 1


def test_roles_are_each_threads_own():
    register()
    before = counts(SERVING)
    with thread_role(SERVING):
        thread = threading.Thread(target=compile_once, args=(5.0,))
        thread.start()
        thread.join()
    assert counts(SERVING) - before == CompileCounts()


def test_a_cached_call_counts_nothing():
    register()
    function = jax.jit(lambda x: x * 7)
    x = np.ones(3, np.float32)
    function(x)
    with thread_role(SERVING):
        before = counts(SERVING)
        function(x)
        assert counts(SERVING) - before == CompileCounts()


def test_each_stage_is_an_event():
    register()
    heard: list[CompileEvent] = []
    with (
        listening(lambda event: heard.append(event) if isinstance(event, CompileEvent) else None),
        thread_role(LOADING),
    ):
        compile_once(6.0)
    assert [event.stage for event in heard][-2:] == ["lower", "compile"]
    assert {event.role for event in heard} == {LOADING}
    assert all(event.seconds >= 0 for event in heard)


def test_counts_subtract_and_add_up():
    assert CompileCounts(5, 4, 3, 2) - CompileCounts(1, 1, 1, 1) == CompileCounts(4, 3, 2, 1)
    assert CompileCounts(5, 4, 3, 2).total == 12
    assert monitoring.counts("a role that nobody has") == CompileCounts()
