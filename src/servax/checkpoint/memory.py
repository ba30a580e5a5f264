"""Memory given back to the system during a restore, so that its peak stays near the size of what is restored."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Generator

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_DURING_RESTORE = 1 << 20
_AFTERWARDS = 32 << 20
"""Bytes; the most that glibc's own adaptation comes to (DEFAULT_MMAP_THRESHOLD_MAX), with twice that for trimming."""

_OPERATOR_DECIDES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

_lock = threading.Lock()
_restores = 0


@contextlib.contextmanager
def returned_when_freed() -> Generator[None]:
    """Blocks over 1 MiB that are freed inside go back to the system at once.

    glibc raises its threshold for memory mapping to the size of whatever is freed, up to 32 MiB; from then on the
    temporary arrays of a restore come from the heap and stay there: 1.3x the restored bytes instead of 1.0x. The
    threshold is lowered for the duration and then set to where glibc's adaptation ends. Nothing happens without
    glibc, or where the environment sets these thresholds (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`).
    """
    global _restores
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OPERATOR_DECIDES):
        yield
        return
    libc = ctypes.CDLL(None)
    with _lock:
        _restores += 1
        libc.mallopt(_M_MMAP_THRESHOLD, _DURING_RESTORE)
    try:
        yield
    finally:
        with _lock:
            _restores -= 1
            if _restores == 0:
                libc.mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)
                libc.mallopt(_M_TRIM_THRESHOLD, 2 * _AFTERWARDS)
