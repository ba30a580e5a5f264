"""The device that a verb runs on: the one asked for, or an error; never a silent fallback to the CPU (contract 9)."""

from __future__ import annotations

from pathlib import Path

import jax

from servax.core.device import Device, platform_of
from servax.core.errors import PlatformError
from servax.core.events import Notice, emit

PLATFORMS = ("cpu", "cuda", "tpu")


def pick_device(platform: str | None = None) -> Device:
    """The first device of `platform`, or of JAX's default backend when None.

    Raises:
      PlatformError: JAX has no such device here. The message carries JAX's own reason.
    """
    if platform is None:
        device = jax.devices()[0]
        if device.platform == "cpu" and Path("/dev/nvidia0").exists():
            emit(
                Notice(
                    "an NVIDIA GPU is on this machine, but JAX runs on the CPU; "
                    "pass --platform cuda to insist (and install jax[cuda13])",
                    level="warning",
                )
            )
        return device
    check_platform(platform)
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise PlatformError(
            f"JAX has no {platform} device on this machine",
            seen=f"{', '.join(sorted({platform_of(device) for device in jax.devices()}))}; {error}",
            expected=platform,
            remedy=f"install JAX with {platform} support (pip install 'jax[{platform}]'), "
            "look at JAX_PLATFORMS, or leave --platform out",
        ) from error


def check_platform(platform: str) -> None:
    """Raises PlatformError for a name that is not a platform."""
    if platform not in PLATFORMS:
        raise PlatformError("no such platform", seen=platform, expected=" or ".join(PLATFORMS))
