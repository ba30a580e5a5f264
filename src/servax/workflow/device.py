"""The device that a verb runs on: the one asked for, or an error; never a silent fallback to the CPU (contract 9)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from servax.core.device import PLATFORMS, Device, platform_of
from servax.core.errors import PlatformError, UsageError
from servax.core.events import Notice, emit


def pick_device(platform: str | None = None) -> Device:
    """The first device of `platform`, or of JAX's default backend when None.

    Raises:
      PlatformError: JAX has no such device here. The message carries JAX's own reason.
    """
    import jax

    if platform is None:
        try:
            device = jax.devices()[0]
        except (RuntimeError, AssertionError) as error:  # JAX asserts where JAX_PLATFORMS names a missing platform
            raise _no_device("any", error) from error
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
    except (RuntimeError, AssertionError) as error:
        raise _no_device(platform, error) from error


def _no_device(platform: str, error: Exception) -> PlatformError:
    asked = os.environ.get("JAX_PLATFORMS")
    return PlatformError(
        f"JAX has no {platform} device on this machine",
        seen=f"{f'JAX_PLATFORMS={asked}; ' if asked else ''}{type(error).__name__}: {error}".rstrip(": "),
        expected=platform if platform != "any" else "a device of some platform",
        remedy="install JAX with support for it (pip install 'jax[cuda13]', 'jax[tpu]'), "
        "look at JAX_PLATFORMS, or leave --platform out",
    )


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
    """Raises UsageError for a name that is not a platform."""
    if platform not in PLATFORMS:
        raise UsageError("no such platform", seen=platform, expected=" or ".join(PLATFORMS))


if __name__ == "__main__":
    print(platform_of(pick_device(*sys.argv[1:])))
