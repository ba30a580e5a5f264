"""The fingerprint of a machine and a setting: an executable runs where its own is met, and nowhere else."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib.version

from servax.core.device import Device, platform_of
from servax.stages.settings import settings_here

COMPILED_BY = (
    "jax_compiler_enable_remat_pass",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_pgle",
    "jax_enable_x64",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
    "jax_use_simplified_jaxpr_constants",
    "jax_xla_profile_version",
)
"""Settings of JAX that an executable depends on beyond its StableHLO.

An executable is compiled from an export whose digest its record holds, so a setting that acts only while a function is
traced or its operations are lowered (`jax_numpy_dtype_promotion`, `jax_debug_nans`) has done its work in that digest,
and refusing an executable for it would cost a start-up and gain nothing. These are read when the export is called and
compiled (`jax/_src/compiler.py`, `jax/_src/interpreters/mlir.py`), and 64-bit mode, matmul precision and PRNG, which
decide what a caller's arrays and keys are.
"""

_WORD_LISTS = ("cpu features", "xla flags")
_PLUGINS = re.compile(r"^(jax[-_](cuda|rocm|oneapi|metal)|jax-.*-pjrt|libtpu|nvidia-(cudnn|cublas))", re.IGNORECASE)
_X86_INSTRUCTIONS = re.compile(
    r"(mmx|sse|ssse3|pni|avx|fma|f16c|xop|tbm|bmi|abm|adx|aes|vaes|v?pclmulqdq|sha|sm[34]|gfni|amx|popcnt|movbe|rdrand"
    r"|rdseed|cx8|cx16|cmov|fxsr|lahf_lm|xsave|3dnow|prefetch|clflushopt|clwb|movdir|lm$|apx)"
)
_LIBRARY = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that an executable depends on beyond its program, by name of the field."""

    fields: Mapping[str, str]

    @property
    def id(self) -> str:
        """A digest over the fields, 16 hexadecimal digits: the name of the executables' folder."""
        content = json.dumps(dict(self.fields), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def current(devices: Sequence[Device]) -> Fingerprint:
    """The fingerprint of this process for programs on these devices.

    On a CPU the host is part of it: its features decide the instructions, its cores how the work is split. On an
    accelerator the driver and the plugin's libraries take that place, and the host may change. Devices that the program
    does not use are no part of it: what eight GPUs built, one GPU runs.
    """
    first = devices[0]
    fields = {
        "platform": platform_of(first),
        "device kind": first.device_kind,
        "device ids": " ".join(str(device.id) for device in devices),
        "topology": f"{jax.process_count()} processes",
        "runtime": str(first.client.platform_version),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "jaxlib build": _jaxlib_build(),
        "xla flags": " ".join(_xla_flags()),
        **{name: str(value) for name, value in settings_here().items() if name in COMPILED_BY},
    }
    if first.platform == "cpu":
        fields |= _host()
    else:
        fields |= _accelerator(first)
    return Fingerprint(dict(sorted(fields.items())))


def differences(a: Fingerprint, b: Fingerprint) -> tuple[tuple[str, str, str], ...]:
    """Fields that differ, each with its value in `a` and in `b`; `absent` where there is none.

    Of lists of words (CPU features, XLA flags) each side shows what the other one lacks.
    """
    found: list[tuple[str, str, str]] = []
    for field in sorted({*a.fields, *b.fields}):
        one, other = a.fields.get(field), b.fields.get(field)
        if one == other:
            continue
        if field in _WORD_LISTS and one is not None and other is not None:
            only_one, only_other = set(one.split()) - set(other.split()), set(other.split()) - set(one.split())
            found.append((field, " ".join(sorted(only_one)) or "none", " ".join(sorted(only_other)) or "none"))
        else:
            found.append((field, "absent" if one is None else one, "absent" if other is None else other))
    return tuple(found)


def _host() -> dict[str, str]:
    model, features = cpu()
    return {"cpu model": model, "cpu features": features, "cpu cores": str(_cores())}


@functools.cache
def cpu(path: str = "/proc/cpuinfo") -> tuple[str, str]:
    """Model name and instruction sets of the host's CPU; without `/proc`, what the platform calls its processor."""
    try:
        content = Path(path).read_text()
    except OSError:
        return platform.processor() or platform.machine(), platform.machine()
    first: dict[str, str] = {}
    for line in content.splitlines():
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    # x86 gives a name, which a hypervisor may shorten, and numbers; Arm gives numbers alone, and calls flags features.
    known = ("model name", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")
    model = " ".join(
        value if name == "model name" else f"{name} {value}" for name in known if (value := first.get(name))
    )
    if "flags" in first:  # of x86, among words about the kernel's mitigations and the hypervisor
        features = [word for word in first["flags"].split() if _X86_INSTRUCTIONS.match(word)]
    else:
        features = first.get("Features", platform.machine()).split()
    return model or platform.machine(), " ".join(sorted(features))


def _cores() -> int:
    """Size of XLA's pool of threads on a CPU: `PJRT_NPROC` or `NPROC`, else the cores this process may run on."""
    for name in ("PJRT_NPROC", "NPROC"):
        if (value := os.environ.get(name, "")).isdigit() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _accelerator(device: Device) -> dict[str, str]:
    plugins = {
        name: each.version
        for each in importlib.metadata.distributions()
        if (name := str(each.metadata["Name"])) and _PLUGINS.match(name)
    }
    fields = {"plugin": " ".join(f"{name}=={version}" for name, version in sorted(plugins.items())) or "none"}
    for name in ("compute_capability", "core_count"):
        if (value := getattr(device, name, None)) is not None:
            fields[name.replace("_", " ")] = str(value)
    if (flags := os.environ.get("LIBTPU_INIT_ARGS")) is not None:
        fields["libtpu flags"] = flags
    try:
        fields["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        fields["driver"] = "unknown"
    return fields


def _xla_flags() -> list[str]:
    """Flags of XLA by name, the last of a name as XLA takes it; those that only write dumps change no code."""
    flags: dict[str, str] = {}
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        flags[name] = value or "true"
    return sorted(f"{name}={value}" for name, value in flags.items() if not name.startswith("--xla_dump"))


@functools.cache
def _jaxlib_build() -> str:
    """Which build of jaxlib this is: two builds of one version differ in code (jax#38445).

    A digest over the digests of its native libraries as the wheel lists them, and over their sizes, which tell when
    one was replaced in place.
    """
    content = hashlib.sha256(str(getattr(jaxlib.version, "_git_hash", "")).encode())
    root = Path(jaxlib.version.__file__).parent
    try:
        files = importlib.metadata.files("jaxlib") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    listed = {str(file): file.hash.value for file in files if file.hash is not None and _LIBRARY.search(file.name)}
    for name, listed_digest in sorted(listed.items()):
        content.update(f"{name} {listed_digest}\n".encode())
    for file in sorted(each for each in root.rglob("*") if _LIBRARY.search(each.name)):
        content.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
    return content.hexdigest()[:16]
