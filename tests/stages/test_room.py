from __future__ import annotations

import subprocess
import sys

from servax import stages


def test_every_name_of_the_room_is_there() -> None:
    assert sorted(stages.__all__) == dir(stages)
    for name in stages.__all__:
        assert getattr(stages, name).__name__ == name


def test_the_room_and_what_a_client_needs_of_it_cost_no_jax() -> None:
    code = (
        "import sys, servax.stages, servax.stages.buckets, servax.stages.padding\n"
        "print(*{'jax', 'flax', 'orbax', 'tensorflow', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
