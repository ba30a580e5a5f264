"""How many threads XLA runs programs on, where the device is a CPU."""

from __future__ import annotations

import os
import sys

from servax.core.errors import UsageError

VARIABLE = "PJRT_NPROC"
"""Read once, when JAX makes its CPU client: jax 0.10.2 and 0.12.0. It goes before `NPROC`, which means the same; the
flag `--xla_cpu_multi_thread_eigen` changes nothing there."""


def set_threads(count: int) -> None:
    """Has XLA's CPU client run programs on `count` threads. It is part of a fingerprint: executables are made for it.

    Raises:
      UsageError: it is too late, since JAX has its devices already; or there are no such many threads.
    """
    if count < 1:
        raise UsageError("a program needs a thread to run on", where="threads", seen=str(count), expected="1 or more")
    if _has_started():
        raise UsageError(
            "the number of threads cannot be changed any more: JAX has its devices already",
            where="threads",
            seen=str(count),
            remedy=f"set it before JAX starts, or the environment variable {VARIABLE}",
        )
    os.environ[VARIABLE] = str(count)


def _has_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())
