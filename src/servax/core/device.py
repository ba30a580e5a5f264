"""A device as JAX shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms that programs are made for; each can be lowered for on any machine."""


class Device(Protocol):
    """The part of `jax.Device` that servax uses; jaxlib, which defines the class, ships no type information."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def client(self) -> Any: ...
    def memory_stats(self) -> Mapping[str, int] | None: ...


def platform_of(device: Device) -> str:
    """The platform a program for this device is lowered for: `cpu`, `cuda`, `rocm`, `tpu`.

    JAX calls every GPU `gpu`; the version string of the client tells NVIDIA's from AMD's.
    """
    if device.platform == "gpu":
        return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"
    return device.platform
