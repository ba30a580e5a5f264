"""Compilations counted where they happen: one `jax.monitoring` listener, registered once, by role of the thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass

from servax.core.events import CompileEvent, emit

SERVING = "serving"
LOADING = "loading"
OTHER = "other"

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

_thread = threading.local()
_lock = threading.Lock()
_registered = False
_counts: dict[tuple[str, str], int] = {}


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """How often JAX traced, lowered and compiled on threads of one role.

    `compiled` counts backend compilations including those answered by the persistent cache, which JAX reports
    alike; `cache_hits` counts these.
    """

    traced: int = 0
    lowered: int = 0
    compiled: int = 0
    cache_hits: int = 0

    def __sub__(self, other: CompileCounts) -> CompileCounts:
        return CompileCounts(
            self.traced - other.traced,
            self.lowered - other.lowered,
            self.compiled - other.compiled,
            self.cache_hits - other.cache_hits,
        )

    @property
    def total(self) -> int:
        """All trace, lower and compile events."""
        return self.traced + self.lowered + self.compiled


def register() -> None:
    """Starts counting; further calls do nothing. `jax.monitoring` has no unregistration, so this is for good."""
    global _registered
    with _lock:
        if _registered:
            return
        _registered = True
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)


def counts(role: str) -> CompileCounts:
    """What has been counted since `register` on threads of this role."""
    with _lock:
        get = {stage: _counts.get((role, stage), 0) for stage in ("trace", "lower", "compile", "cache_hit")}
    return CompileCounts(get["trace"], get["lower"], get["compile"], get["cache_hit"])


@contextlib.contextmanager
def thread_role(role: str) -> Generator[None]:
    """Gives this thread a role for the duration of the block."""
    before = getattr(_thread, "role", OTHER)
    _thread.role = role
    try:
        yield
    finally:
        _thread.role = before


def _record(stage: str, function: str, seconds: float) -> None:
    role = getattr(_thread, "role", OTHER)
    with _lock:
        _counts[role, stage] = _counts.get((role, stage), 0) + 1
    emit(CompileEvent(stage, function, seconds, role))


def _on_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if (stage := _STAGES.get(event)) is not None:
        _record(stage, str(kwargs.get("fun_name", "")), duration_secs)


def _on_event(event: str, **kwargs: str | int) -> None:
    if event == _CACHE_HIT:
        _record("cache_hit", str(kwargs.get("fun_name", "")), 0.0)
