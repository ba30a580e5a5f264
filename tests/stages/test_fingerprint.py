from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib
import pytest

from servax.stages import fingerprint
from servax.stages.fingerprint import COMPILED_BY, Fingerprint, cpu, current, differences
from servax.stages.settings import SETTINGS

CHILD = """
import json, jax
from servax.stages import fingerprint
print(json.dumps(dict(fingerprint.current(jax.devices()[:1]).fields)))
"""


def child(code: str = CHILD, **environment: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    return child()


def here() -> Fingerprint:
    return current(jax.devices()[:1])


def test_fields_of_this_machine() -> None:
    fields = here().fields
    assert fields["platform"] == "cpu"
    assert fields["jax"] == jax.__version__
    assert fields["jaxlib"] == jaxlib.__version__
    assert fields["device ids"] == "0"
    assert fields["device kind"] == jax.devices()[0].device_kind
    assert re.fullmatch(r"[0-9a-f]{16}", fields["jaxlib build"])
    assert fields["jax_enable_x64"] == "False"
    assert all(isinstance(value, str) for value in fields.values())


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says what its CPU can do")
def test_the_host_is_part_of_it_on_a_cpu() -> None:
    fields = here().fields
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags is not None
    words = set(fields["cpu features"].split())
    assert words <= set(flags[1].split())
    # What LLVM may choose instructions by; not the kernel's mitigations, which an update may change.
    instructions = {"sse4_2", "avx", "avx2", "avx512f", "fma", "f16c", "bmi2", "amx_bf16", "gfni", "asimd", "sve"}
    assert instructions & set(flags[1].split()) <= words
    assert not words & {"ibrs", "ibpb", "stibp", "ssbd", "pti", "md_clear", "flush_l1d", "hypervisor", "constant_tsc"}
    assert fields["cpu model"]
    assert fields["cpu cores"] == str(len(os.sched_getaffinity(0)))


def test_the_same_process_has_the_same_id() -> None:
    assert here().id == here().id
    assert re.fullmatch(r"[0-9a-f]{16}", here().id)


def test_a_fresh_process_has_the_same_fingerprint(plain: dict[str, str]) -> None:
    assert child() == plain


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"JAX_ENABLE_X64": "1"}, "jax_enable_x64"),
        ({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}, "jax_default_matmul_precision"),
        ({"JAX_DEFAULT_PRNG_IMPL": "rbg"}, "jax_default_prng_impl"),
        ({"JAX_THREEFRY_PARTITIONABLE": "0"}, "jax_threefry_partitionable"),
        ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, "jax_disable_most_optimizations"),
        ({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "xla flags"),
        ({"NPROC": "1"}, "cpu cores"),
    ],
)
def test_a_setting_that_changes_code_changes_the_fingerprint(
    plain: dict[str, str], environment: dict[str, str], field: str
) -> None:
    changed = child(**environment)
    assert [name for name, _, _ in differences(Fingerprint(plain), Fingerprint(changed))] == [field]
    assert Fingerprint(plain).id != Fingerprint(changed).id


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_NUMPY_DTYPE_PROMOTION": "strict"},
        {"JAX_DEBUG_NANS": "1"},
        {"JAX_PGLE_PROFILING_RUNS": "5"},
        {"XLA_FLAGS": "--xla_dump_to=/tmp/nowhere"},
    ],
)
def test_a_setting_that_acts_before_the_export_does_not(plain: dict[str, str], environment: dict[str, str]) -> None:
    assert child(**environment) == plain


def test_what_an_executable_depends_on_is_among_what_changes_code() -> None:
    assert set(COMPILED_BY) < set(SETTINGS)


def test_a_context_changes_it_too() -> None:
    before = here()
    with jax.default_matmul_precision("highest"):
        assert differences(before, here()) == (("jax_default_matmul_precision", "None", "highest"),)


def test_the_devices_and_their_number() -> None:
    code = CHILD.replace("[:1]", "[2:4]")
    fields = child(code, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert fields["device ids"] == "2 3"
    assert fields["topology"] == "1 processes"


def test_flags_that_only_write_dumps_and_their_order_do_not_matter(tmp_path: Path) -> None:
    one = child(
        XLA_FLAGS=f"--xla_cpu_enable_fast_math=false --xla_cpu_multi_thread_eigen=true --xla_dump_to={tmp_path}"
    )
    other = child(XLA_FLAGS="--xla_cpu_multi_thread_eigen=true  --xla_cpu_enable_fast_math=false")
    assert one == other


def test_of_a_flag_that_is_given_twice_the_last_counts() -> None:
    fast, slow = "--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"
    assert child(XLA_FLAGS=f"{fast} {slow}")["xla flags"] == slow
    assert child(XLA_FLAGS=f"{slow} --xla_cpu_enable_fast_math")["xla flags"] == fast


def test_differences_name_the_fields() -> None:
    one = Fingerprint({"jax": "1", "driver": "550", "cpu features": "avx avx2 sse", "platform": "cpu"})
    other = Fingerprint({"jax": "2", "cpu features": "avx avx512f sse", "platform": "cpu", "plugin": "x"})
    assert differences(one, other) == (
        ("cpu features", "avx2", "avx512f"),
        ("driver", "550", "absent"),
        ("jax", "1", "2"),
        ("plugin", "absent", "x"),
    )
    assert differences(one, one) == ()


def test_the_id_is_of_the_fields_in_any_order() -> None:
    assert Fingerprint({"a": "1", "b": "2"}).id == Fingerprint({"b": "2", "a": "1"}).id
    assert Fingerprint({"a": "1", "b": "2"}).id != Fingerprint({"a": "12", "b": ""}).id


def test_an_arm_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n"
    )
    assert cpu(str(file)) == ("CPU implementer 0x41 CPU part 0xd40 CPU variant 0x1", "asimd fp")


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    model, features = cpu(str(tmp_path / "none"))
    assert model
    assert features


class _Accelerator:
    """A device as the CUDA plugin shows one."""

    id, platform, device_kind, compute_capability, core_count = 0, "gpu", "NVIDIA H200", "9.0", 132

    class client:
        platform_version = "PJRT C API\ncuda 12090"

        @staticmethod
        def device_count() -> int:
            return 1

    def memory_stats(self) -> None:
        return None


def test_on_an_accelerator_driver_and_plugin_take_the_place_of_the_host() -> None:
    device: Any = _Accelerator()
    fields = current([device]).fields
    assert fields["platform"] == "cuda"
    assert fields["device kind"] == "NVIDIA H200"
    assert fields["compute capability"] == "9.0"
    assert fields["core count"] == "132"
    assert fields["runtime"] == "PJRT C API\ncuda 12090"
    assert {"driver", "plugin"} <= set(fields)
    assert not {"cpu model", "cpu features", "cpu cores"} & set(fields)


def test_every_setting_that_jax_traces_by_is_known() -> None:
    # JAX keys its own cache of traces by these; the list is private, so it is read here and not in the package.
    from jax._src import config

    no_code = {
        "jax_check_static_indices",  # these check, forbid or warn, and leave the code as it is
        "jax_debug_key_reuse",
        "jax_mutable_array_checks",
        "jax_no_collectives",
        "jax_no_execution",
        "jax_numpy_rank_promotion",
        "jax_raise_on_ppermute_sort_diff",
        "jax_default_device",  # the devices are a field of their own
        "jax_disable_jit",  # nothing is compiled then
        "jax_hlo_source_file_canonicalization_regex",  # names of source files
        "jax_remove_size_one_mesh_axis_from_type",  # meshes; programs are for one device
    }
    traced_by = {name for name in config.trace_context_names() if name.startswith("jax_")}
    assert traced_by - no_code - set(SETTINGS) == set()


def test_the_build_of_jaxlib_is_told_by_its_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version.py").touch()
    library = tmp_path / "libjax_common.so"
    monkeypatch.setattr(fingerprint.jaxlib.version, "__file__", str(tmp_path / "version.py"))
    builds: list[str] = []
    for content in (b"one", b"one", b"three"):
        library.write_bytes(content)
        builds.append(fingerprint._jaxlib_build.__wrapped__())  # pyright: ignore[reportPrivateUsage]
    assert builds[0] == builds[1] != builds[2]
