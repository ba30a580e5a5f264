"""A server's processes: their environment, their processor time and memory, read from /proc."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def environment(**more: str) -> dict[str, str]:
    """Variables with which a child finds `network` and this package; more of them by name."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def pinned(core: int | None, command: Sequence[str], nice: int = 0) -> list[str]:
    """The command, kept on one core with all that it starts; in a session of its own `nice` counts on a desktop too.

    A core of None: on all of them.
    """
    return [sys.executable, "-I", "-S", "-c", _PINNED, "" if core is None else str(core), str(nice), *command]


_PINNED = """
import os, sys
if sys.argv[1]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
if int(sys.argv[2]):
    os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[2]))
    try:  # Linux weighs sessions against one another before it weighs processes
        open("/proc/self/autogroup", "w").write(sys.argv[2])
    except OSError:
        pass
os.execv(sys.argv[3], sys.argv[3:])
"""


def prioritise(nice: int) -> None:
    """Gives this process a priority, and its session; 0 leaves it."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice))


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def marked(mark: str) -> list[int]:
    """Processes whose environment began with `mark` (`NAME=value`): a server's, wherever they were moved to."""
    wanted = mark.encode()
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes together."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICK


def busy_seconds() -> float:
    """Time that all cores were busy, with anything."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / _TICK


def peak_bytes(pids: Iterable[int]) -> int:
    """Peak memory of these processes together; pages that several hold count once.

    The sum of `Pss` now, and of how far each process once stood above where it stands (`VmHWM - VmRSS`).
    """
    total = 0
    for pid in pids:
        try:
            total += _kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:")
            status = f"/proc/{pid}/status"
            total += _kilobytes(status, "VmHWM:") - _kilobytes(status, "VmRSS:")
        except (OSError, StopIteration):
            continue
    return total * 1024


def _kilobytes(file: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(name))
