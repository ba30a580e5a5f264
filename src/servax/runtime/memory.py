"""How much memory a device has left."""

from __future__ import annotations

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


def require_room(device: Device, needed: int) -> None:
    """Raises MemoryShortage, with numbers, unless `needed` bytes fit beside what `device` holds."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryShortage(
            "the new parameters do not fit beside the old ones",
            where=f"{device.platform}:{device.id}",
            seen=f"{bytes_text(free)} free ({free} bytes)",
            expected=f"{bytes_text(needed)} ({needed} bytes)",
            remedy="close other servables on this device, or close this one and load it again from the new checkpoint",
        )
