"""The device that a verb runs on: the one asked for, or an error; never a silent fallback to the CPU (contract 9)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from servax.core.device import Device, platform_of
from servax.core.errors import PlatformError
from servax.core.events import Notice, emit

PLATFORMS = ("cpu", "cuda", "tpu")


def pick_device(platform: str | None = None) -> Device:
    """The first device of `platform`, or of JAX's default backend when None.

    Raises:
      PlatformError: JAX has no such device here. The message carries JAX's own reason.
    """
    import jax

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


def platform_here(platform: str | None = None) -> str:
    """The platform of `pick_device(platform)`, asked in a child process, so that this one opens no accelerator.

    Raises:
      PlatformError: JAX has no such device here.
    """
    if platform is not None:
        check_platform(platform)
    command = [sys.executable, "-m", "servax.workflow.device", *([platform] if platform else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise PlatformError(
            f"JAX has no {platform or 'usable'} device on this machine",
            seen=done.stderr.strip()[-1000:],
            expected=platform,
            remedy="look at JAX_PLATFORMS and at the installed jax, or leave --platform out",
        )
    return done.stdout.split()[-1]


def check_platform(platform: str) -> None:
    """Raises PlatformError for a name that is not a platform."""
    if platform not in PLATFORMS:
        raise PlatformError("no such platform", seen=platform, expected=" or ".join(PLATFORMS))


if __name__ == "__main__":
    print(platform_of(pick_device(*sys.argv[1:])))
