"""`python -m servax.protocols.grpc.compile` compiles every `.proto` file of the protocols; it needs grpcio-tools."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2

from servax.protocols.grpc.messages import COMPILED

ROOT = Path(__file__).parents[1]
"""Where the `.proto` files are: below the room of the protocols."""


def compiled(source: Path) -> bytes:
    """The serialized `FileDescriptorSet` of a `.proto` file and of what it imports, without comments.

    Raises:
      ValueError: the file cannot be compiled; the compiler's message is on stderr.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "set")
        # A child of its own: TensorFlow in this process has a C++ library of the same symbols.
        command = (sys.executable, "-m", "grpc_tools.protoc", f"-I{source.parent}", "--include_imports")
        if subprocess.run([*command, f"--descriptor_set_out={output}", str(source)], check=False).returncode:
            raise ValueError(f"{source} cannot be compiled")
        found = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    return found.SerializeToString(deterministic=True)


def sources() -> Iterator[Path]:
    """Every `.proto` file of the protocols."""
    return ROOT.rglob("*.proto")


if __name__ == "__main__":
    for each in sources():
        each.with_suffix(COMPILED).write_bytes(compiled(each))
