import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servax.checkpoint.memory import returned_when_freed

BENCH = Path(__file__).parents[2] / "bench" / "restore_memory.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


class Mallopt:
    def __init__(self):
        self.calls = []

    def mallopt(self, option, value):
        self.calls.append((option, value))


@pytest.fixture
def libc(monkeypatch):
    fake = Mallopt()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_thresholds_are_lowered_and_then_left_where_glibc_would_leave_them(libc):
    with returned_when_freed(), returned_when_freed():
        assert libc.calls == [(-3, 1 << 20), (-3, 1 << 20)]
    assert libc.calls[2:] == [(-3, 32 << 20), (-1, 64 << 20)]


def test_the_operators_thresholds_stand(libc, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    with returned_when_freed():
        pass
    assert libc.calls == []


def test_other_c_libraries_are_left_alone(libc, monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    with returned_when_freed():
        pass
    assert libc.calls == []


@pytest.fixture(scope="module")
def quarter_gib(tmp_path_factory):
    """A train state with 256 MiB of parameters, and Adam's moments beside them."""
    path = tmp_path_factory.mktemp("memory") / "checkpoint"
    subprocess.run(
        [sys.executable, BENCH, "--write", "orbax v1", path, "--mib", "256"], check=True, capture_output=True
    )
    return path


@linux
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1.3), ("bfloat16", 1.5)])
def test_a_restore_peaks_within_contract_3(quarter_gib, dtype, limit):
    done = subprocess.run(
        [sys.executable, BENCH, "--measure", quarter_gib, dtype, "--mib", "256"],
        check=True,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
    )
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    assert measured["restored_mib"] > (240 if dtype == "float32" else 120)
    assert measured["ratio"] <= limit
