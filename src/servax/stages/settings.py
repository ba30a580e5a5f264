"""The settings of JAX that change the code it makes, from the trace to the executable."""

from __future__ import annotations

from collections.abc import Mapping

import jax

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
"""By name; a version of JAX may lack some."""

_ABSENT = object()


def settings_here() -> dict[str, object]:
    """Each of `SETTINGS` that this JAX has, with its value on this thread."""
    # Settings that a context can change are attributes of `jax.config`, the rest are in its `values`.
    everywhere: Mapping[str, object] = jax.config.values
    found = {name: getattr(jax.config, name, everywhere.get(name, _ABSENT)) for name in SETTINGS}
    return {name: value for name, value in found.items() if value is not _ABSENT}
