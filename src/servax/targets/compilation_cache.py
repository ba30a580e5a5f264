"""JAX's persistent compilation cache: switched on for `jit`, kept out of the way of `aot`.

JAX reads its settings once, at the first compilation of a process; after a change it has to be told to look again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Sequence

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from servax.core.device import Device
from servax.stages import fingerprint

_lock = threading.Lock()
_suspended = 0
_enabled_before = True


def enable_cache(directory: str | os.PathLike[str], devices: Sequence[Device]) -> epath.Path:
    """Keeps every program that is compiled from now on in `directory`, however fast it compiled; returns the folder.

    Programs lie in a folder named for the fingerprint of this machine and these settings: code for a CPU with more
    features, or of a jaxlib that was replaced in place, would end the process (jax#38445).
    """
    folder = epath.Path(directory).expanduser().absolute() / fingerprint.current(devices).id
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    return folder


@contextlib.contextmanager
def suspended_cache() -> Generator[None]:
    """Compiles afresh inside the block, in the whole process; blocks may nest and run on several threads.

    An executable that came out of the cache loses functions when it is serialized again: on CPU it then fails at its
    first call with `NOT_FOUND: Function ... not found` (jax 0.10.2 and 0.12.0.1).
    """
    global _suspended, _enabled_before
    with _lock:
        _suspended += 1
        if _suspended == 1:
            _enabled_before = bool(jax.config.jax_enable_compilation_cache)
            _switch(False)
    try:
        yield
    finally:
        with _lock:
            _suspended -= 1
            if _suspended == 0:
                _switch(_enabled_before)


def _switch(enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
