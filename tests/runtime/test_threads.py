import subprocess
import sys

import jax
import pytest

from servax.core.errors import UsageError
from servax.runtime.threads import set_threads

CODE = """
import os, sys
if sys.argv[1] != "0":
    from servax.runtime.threads import set_threads
    set_threads(int(sys.argv[1]))
import jax, numpy as np
jax.jit(lambda x: x + 1)(np.ones(4)).block_until_ready()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(sum(name == "tf_XLAEigen" for name in names))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the names of threads from /proc")
def test_xla_s_pool_has_as_many_threads_as_it_is_told():
    """In processes of their own; the kernel says how many threads of XLA's there are."""
    run = [sys.executable, "-c", CODE]
    one, three = (
        int(subprocess.run([*run, count], capture_output=True, text=True, check=True).stdout) for count in ("1", "3")
    )
    assert three - one == 2


def test_it_is_too_late_once_jax_has_its_devices():
    jax.devices()
    with pytest.raises(UsageError, match="JAX has its devices already"):
        set_threads(2)


def test_no_threads_are_refused():
    with pytest.raises(UsageError, match="needs a thread"):
        set_threads(0)
