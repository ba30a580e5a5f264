"""Virtual environments for clients whose libraries do not go together with ours: made once, kept in `.servax/venvs`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".servax" / "venvs"


def environment(name: str, *requirements: str) -> Path:
    """The interpreter of an environment that holds these; made where it is missing or was made for others."""
    folder = FOLDER / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv:
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
        fill = [uv, "pip", "install", "--quiet", "--python", str(python), *requirements]
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        fill = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    for command in (make, fill):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    stamp.write_text(wanted)
    return python
