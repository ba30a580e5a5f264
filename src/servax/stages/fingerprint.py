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

SETTINGS = (
    "eager_constant_folding",
    "jax_accurate_erf_inv",
    "jax_allow_f16_reductions",
    "jax_auto_pcast",
    "jax_bcoo_cusparse_lowering",
    "jax_compiler_enable_remat_pass",
    "jax_cpu_collectives_implementation",
    "jax_custom_jvp3",
    "jax_custom_vjp3",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_embedded_constants_max_bytes",
    "jax_enable_custom_prng",
    "jax_enable_pgle",
    "jax_enable_x64",
    "jax_error_checking_behavior_divide",
    "jax_error_checking_behavior_nan",
    "jax_error_checking_behavior_oob",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_pallas_enable_debug_checks",
    "jax_pallas_use_mosaic_gpu",
    "jax_pgle_profiling_runs",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_random_seed_offset",
    "jax_remat3",
    "jax_remat_barrier_no_cotangents",
    "jax_scan3",
    "jax_softmax_custom_jvp",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
    "jax_use_direct_linearize",
    "jax_use_emit_pipeline_primitive",
    "jax_use_hlo_logistic_lowering",
    "jax_use_magma",
    "jax_use_shardy_partitioner",
    "jax_use_simplified_jaxpr_constants",
    "jax_xla_profile_version",
)
"""Settings of JAX that change the code it makes; those that a version of JAX lacks are left out."""

_ABSENT = object()
_WORD_LISTS = ("cpu features", "xla flags")
_PLUGINS = re.compile(r"^(jax[-_](cuda|rocm|oneapi|metal)|jax-.*-pjrt|libtpu|nvidia-(cudnn|cublas))", re.IGNORECASE)
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
    accelerator the driver and the plugin's libraries take that place, and the host may change.
    """
    first = devices[0]
    fields = {
        "platform": platform_of(first),
        "device kind": first.device_kind,
        "device ids": " ".join(str(device.id) for device in devices),
        "topology": f"{jax.process_count()} processes, {first.client.device_count()} devices",
        "runtime": str(first.client.platform_version),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "jaxlib build": _jaxlib_build(),
        "xla flags": " ".join(_xla_flags()),
        **settings(),
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


def settings() -> dict[str, str]:
    """The settings of JAX that change code, as they hold on this thread."""
    # Settings that a context can change are attributes of `jax.config`, the rest are in its `values`.
    everywhere: Mapping[str, object] = jax.config.values
    found = {name: getattr(jax.config, name, everywhere.get(name, _ABSENT)) for name in SETTINGS}
    return {name: str(value) for name, value in found.items() if value is not _ABSENT}


def _host() -> dict[str, str]:
    model, features = cpu()
    return {"cpu model": model, "cpu features": features, "cpu cores": str(_cores())}


@functools.cache
def cpu(path: str = "/proc/cpuinfo") -> tuple[str, str]:
    """Model name and features of the host's CPU; where Linux does not say, what the platform calls its processor."""
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
    features = first.get("flags") or first.get("Features") or platform.machine()
    return model or platform.machine(), " ".join(sorted(features.split()))


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
    """Flags of XLA, sorted; those that only write dumps change no code."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return sorted(flag for flag in flags if not flag.startswith("--xla_dump"))


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
