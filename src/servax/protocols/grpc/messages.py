"""Message classes of our own `.proto` files, from a pool of their own.

The process' default pool is left to others: TensorFlow and Triton's client register the same names there, and a second
registration of a name is an error.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any, Self

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

COMPILED = ".binpb"
"""Suffix of a compiled file; it stands beside the `.proto` it was made of."""


class Messages:
    """The messages and services of one serialized `FileDescriptorSet`.

    Attributes:
      files: the descriptors, in order of dependence.
      pool: where they are registered; nothing else is.
    """

    def __init__(self, compiled: bytes) -> None:
        self.files = tuple(descriptor_pb2.FileDescriptorSet.FromString(compiled).file)
        self.pool = descriptor_pool.DescriptorPool()
        for file in self.files:
            self.pool.Add(file)

    @classmethod
    @functools.cache
    def load(cls, package: str, name: str) -> Self:
        """Those of `NAME.proto` in a package of ours."""
        return cls((files(package) / f"{name}{COMPILED}").read_bytes())

    def __getitem__(self, name: str) -> Any:
        """The class of a message by its full name, e.g. `inference.ModelInferRequest`; KeyError where there is none."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    def methods(self, service: str) -> dict[str, tuple[Any, Any]]:
        """Request and answer classes by method, of the service with this full name."""
        found = self.pool.FindServiceByName(service)
        return {
            method.name: (
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
            )
            for method in found.methods
        }
