import subprocess
import sys

import servax.server


def test_the_room_s_table_of_contents_is_complete():
    for name in servax.server.__all__:
        assert getattr(servax.server, name).__name__ == name


def test_importing_the_rooms_is_cheap():
    code = (
        "import sys, servax.server, servax.protocols, servax.runtime, servax.api;"
        "print([m for m in ('jax', 'flax', 'orbax', 'tensorflow', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_serving_imports_neither_flax_nor_orbax_nor_tensorflow():
    code = (
        "import sys, servax.server.process, servax.runtime.local;"
        "print([m for m in ('flax', 'orbax', 'tensorflow', 'tokenizers', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
