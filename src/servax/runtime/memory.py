"""How much memory a device has left, and giving freed memory back."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

from servax.core.device import Device
from servax.core.errors import MemoryShortage
from servax.core.table import bytes_text


def free_bytes(device: Device) -> int | None:
    """Bytes free on `device`: its allocator's limit less what is in use; for a CPU the machine's available memory.

    None where neither is known.
    """
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if device.platform != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def require_room(
    device: Device,
    parameters: int,
    programs: int = 0,
    *,
    freed: int = 0,
    what: str = "the new parameters do not fit beside the old ones",
    remedy: str = "close other servables on this device, or close this one and load it again from the new checkpoint",
) -> None:
    """Raises MemoryShortage, with numbers, unless parameters and programs fit beside what `device` holds.

    Args:
      device: where they go.
      parameters: bytes of the parameters.
      programs: bytes of code, and what the largest program needs while it runs.
      freed: bytes that are in use now and will not be then.
      what: the error's sentence.
      remedy: what to change.
    """
    free = free_bytes(device)
    needed = parameters + programs
    if free is None or needed <= free + freed:
        return
    after = f", and {bytes_text(freed)} once the old version is unloaded" if freed else ""
    parts = f": parameters {bytes_text(parameters)}, programs {bytes_text(programs)}" if programs else ""
    raise MemoryShortage(
        what,
        where=f"{device.platform}:{device.id}",
        seen=f"{bytes_text(free)} free ({free} bytes){after}",
        expected=f"{bytes_text(needed)} ({needed} bytes){parts}; {bytes_text(needed - free - freed)} lacking",
        remedy=remedy,
    )


def give_back() -> None:
    """Returns what was freed on the host to the system, where the C library would keep it for later (glibc)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
