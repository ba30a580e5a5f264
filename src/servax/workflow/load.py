"""A bundle, or a model with its checkpoint, becomes a servable."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax

from servax.core import trees
from servax.core.device import Device
from servax.core.errors import ArtifactUnavailable, BundleError, UsageError
from servax.core.events import Notice, emit
from servax.core.events import step as named_step
from servax.core.tensors import TensorSpec
from servax.model.digest import source_digest
from servax.model.function import Function
from servax.model.model import Model
from servax.model.processors import Text
from servax.model.reference import load_model as find_model
from servax.runtime.batching import DEFAULT as DEFAULT_BATCHING
from servax.runtime.batching import Batching
from servax.runtime.local import AppFactory, LocalServable
from servax.runtime.runner import ServedFunction
from servax.stages import fingerprint
from servax.stages.buckets import Bucket
from servax.stages.pipeline import run_parallel
from servax.targets import aot, exported, jit
from servax.targets.bundle import PARAMETERS, Bundle
from servax.targets.compilation_cache import enable_cache
from servax.targets.manifest import Manifest
from servax.targets.target import LoadedProgram, ProgramTable, StableHLOSource
from servax.workflow.device import pick_device
from servax.workflow.language import language_of_bundle, language_of_model, servable
from servax.workflow.parameters import lifted_values, restore_as, restore_bundle
from servax.workflow.probe import probe
from servax.workflow.source import CheckpointChoice, Source, abstract, is_int8, prepare

PLATFORM_NAMES = {"jit": "jax_jit", "aot": "jax_executable", "export": "jax_stablehlo"}
"""The wrapper's name on the wire, as the Open Inference Protocol's `platform`."""

Key = tuple[str, Bucket]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a servable is loaded.

    Attributes:
      name: the name it is served under; None: the bundle's or the model's.
      version: the version it is served under.
      require: the only wrapper that will do: `aot`, `export` or `jit`.
      platform: the device it must run on: `cpu`, `cuda`, `tpu`.
      executables: whether native code of a bundle may be loaded.
      model: `MODEL.py:NAME` to fall back to when nothing in the bundle runs here.
      cache_dir: persistent compilation cache.
      app_factory: makes the servable's `app`.
      batching: how requests are joined, and how many may wait.
    """

    name: str | None = None
    version: str = "1"
    require: str | None = None
    platform: str | None = None
    executables: bool = True
    model: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    app_factory: AppFactory | None = None
    batching: Batching = DEFAULT_BATCHING

    def __post_init__(self) -> None:
        if self.require not in (None, "aot", "export", "jit"):
            raise UsageError(
                "no such wrapper to require",
                seen=str(self.require),
                expected="aot, export or jit (a SavedModel is served by TensorFlow Serving)",
            )


def load_bundle(
    path: str | os.PathLike[str],
    options: LoadOptions,
    choice: CheckpointChoice | None = None,
    table: ProgramTable | None = None,
) -> LocalServable:
    """The servable of a bundle, its programs loaded but not yet run; `choice` names other weights than its own.

    Programs come from `table` if it is given, the same programs, loaded for another version; from the executables
    where their fingerprint is this machine's, else from the exports, which is said once; from `options.model`'s source
    only if nothing else runs.

    Raises:
      BundleError: the bundle is damaged; a parameter file that changed is named.
      ArtifactUnavailable: the required wrapper, or any, cannot be used here.
      PlatformError: the platform asked for is not here.
    """
    bundle = Bundle.open(path)
    if options.require == "aot" and not options.executables:
        raise UsageError("--require aot and --no-executables contradict one another", remedy="leave one of them out")
    device = pick_device(options.platform)
    if options.require == "jit":
        return _load_source(bundle, options, device, choice)
    try:
        programs = _programs(bundle, options, device) if table is None else _own_text(bundle, table)
    except ArtifactUnavailable as error:
        if options.model is None or options.require is not None:
            raise
        emit(Notice(f"nothing in the bundle runs here, so {options.model} is traced: {error.sentence()}", "warning"))
        return _load_source(bundle, options, device, choice)
    params = restore_bundle(bundle, device, choice)
    lifted = lifted_values(bundle, params)
    return servable(
        options.name or bundle.manifest.name,
        language_of_bundle(bundle),
        platform=PLATFORM_NAMES[_slowest(programs)],
        functions=served_functions(bundle),
        grid=bundle.manifest.grid(),
        table=ProgramTable(programs),
        params=params,
        state=state_specs(bundle.manifest),
        device=device,
        swapper=functools.partial(
            restore_as,
            like=bundle.manifest.abstract_params(),
            selected=bundle.manifest.provenance.select,
            device=device,
            lifted=lifted,
            int8=bundle.manifest.is_int8,
        ),
        app_factory=options.app_factory,
        version=options.version,
        batching=options.batching,
    )


def load_model(
    model: Model | str,
    choice: CheckpointChoice,
    options: LoadOptions,
    *,
    params: Any = None,
    buckets: Sequence[str] = (),
    bucket_file: str | os.PathLike[str] | None = None,
) -> LocalServable:
    """The servable of a model in this process, by the `jit` wrapper; its programs compiled but not yet run.

    Raises:
      UsageError: another wrapper is required, or the parameters come from nowhere.
      ModelError, CheckpointError: the model or the checkpoint does not fit.
    """
    if options.require not in (None, "jit"):
        raise UsageError(
            f"{options.require} is required, but a model in this process is served by jit",
            remedy=f"build a bundle (servax build -t {options.require}) and load that",
        )
    device = pick_device(options.platform)
    source = prepare(model, choice, params=params, device=device, buckets=buckets, bucket_file=bucket_file)
    return _serve_source(source, options, device)


def state_specs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """Specs of a bundle's state."""
    return tuple(record.spec() for record in manifest.state)


def served_functions(bundle: Bundle) -> dict[str, ServedFunction]:
    """The bundle's functions as the runtime takes them; files of processors are checked against their digests."""
    functions: dict[str, ServedFunction] = {}
    for name, record in bundle.manifest.functions.items():
        processors: dict[str, Text] = {}
        for processor in record.processors:
            bundle.check(processor.file)
            processors[processor.input] = Text(str(bundle.path(processor.file)), processor.max_length, processor.name)
        functions[name] = ServedFunction(record.signature(), record.stateful, processors)
    return functions


@contextlib.contextmanager
def _cached(options: LoadOptions, device: Device) -> Generator[None]:
    """Compiles through the persistent cache inside the block, then leaves JAX's settings as they were."""
    if options.cache_dir is None:
        yield
        return
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        enable_cache(options.cache_dir, [device])
    except OSError as error:
        emit(
            Notice(f"no compilation cache: {error}; every start compiles (--cache-dir names another place)", "warning")
        )
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _programs(bundle: Bundle, options: LoadOptions, device: Device) -> dict[Key, LoadedProgram]:
    keys = list(bundle.manifest.grid())
    wanted = "aot" if bundle.manifest.executables and options.executables else "export"
    wanted = options.require or wanted
    if wanted == "export":
        with _cached(options, device):
            return _load_all(keys, lambda key: exported.load(bundle, *key, device), "compile exports")
    mark = fingerprint.current([device])

    def load(key: Key) -> LoadedProgram | ArtifactUnavailable | BundleError:
        try:
            return aot.load(bundle, *key, device, mark=mark)
        except (ArtifactUnavailable, BundleError) as error:
            if options.require == "aot" or not bundle.manifest.programs:
                raise
            return error

    loaded = _load_all(keys, load, "load executables")
    failures = {key: found for key, found in loaded.items() if isinstance(found, Exception)}
    programs = {key: found for key, found in loaded.items() if not isinstance(found, Exception)}
    if failures:
        first = next(iter(failures.values()))
        emit(
            Notice(
                f"{len(failures)} of {len(keys)} programs are served through their exports, which compile now: "
                f"{first.sentence()}",
                "warning",
            )
        )
        with _cached(options, device):
            programs |= _load_all(list(failures), lambda key: exported.load(bundle, *key, device), "compile exports")
    return programs


def _own_text(bundle: Bundle, table: ProgramTable) -> dict[Key, LoadedProgram]:
    """Programs loaded for another version of the bundle, which show their StableHLO from this one."""

    def text(function: str, bucket: Bucket) -> StableHLOSource | None:
        record = bundle.manifest.program(function, bucket.label)
        return None if record is None else lambda: exported.stablehlo_text(bundle.read(record.file))

    return {key: replace(table[key], stablehlo=text(*key)) for key in bundle.manifest.grid()}


def _load_all(keys: Sequence[Key], load: Callable[[Key], T], name: str) -> dict[Key, T]:
    def job(key: Key) -> Callable[[], T]:
        return lambda: load(key)

    jobs = {f"{function}@{bucket.label}": job((function, bucket)) for function, bucket in keys}
    return dict(zip(keys, run_parallel(jobs, name), strict=True))


def _slowest(programs: Mapping[Key, LoadedProgram]) -> str:
    order = ("aot", "export", "jit")
    return max((program.target for program in programs.values()), key=order.index)


def _load_source(
    bundle: Bundle, options: LoadOptions, device: Device, choice: CheckpointChoice | None
) -> LocalServable:
    """The bundle's parameters, or those of `choice`, under its model's source."""
    named = bundle.manifest.provenance.source if "jit" in bundle.manifest.targets else None
    reference = options.model or named
    if reference is None:
        raise ArtifactUnavailable(
            "jit needs the model's source, and the bundle has no jit part",
            where=str(bundle.root),
            remedy="pass --model MODEL.py:NAME, or serve the bundle through aot or export",
        )
    _tell_of_changed_source(bundle, reference)
    if choice is None or choice.path is None:
        bundle.check(PARAMETERS)
        choice = CheckpointChoice(path=bundle.path(PARAMETERS))
    if bundle.manifest.language is not None:
        choice = replace(choice, weights=bundle.manifest.language.weights)
    source = prepare(reference, choice, device=device, grid=bundle.manifest.grid())
    return _serve_source(source, replace(options, name=options.name or bundle.manifest.name), device)


def _tell_of_changed_source(bundle: Bundle, reference: str) -> None:
    recorded = bundle.manifest.provenance.source_digest
    if recorded is not None and source_digest(find_model(reference)) != recorded:
        emit(
            Notice(
                f"the source of {reference} is not the one that the bundle was built from and proved with", "warning"
            )
        )


def _serve_source(source: Source, options: LoadOptions, device: Device) -> LocalServable:
    params = trees.flatten(source.params)

    def load(key: Key) -> LoadedProgram:
        function = source.functions[key[0]]
        return jit.load(function, key[1], source.params, device)

    with _cached(options, device):
        programs = _load_all(list(source.grid), load, "compile")
        with named_step("probe"):
            for name, function in source.functions.items():
                of_function = {bucket: program for (each, bucket), program in programs.items() if each == name}

                def compile_at(bucket: Bucket, function: Function = function) -> LoadedProgram:
                    return jit.load(function, bucket, source.params, device)

                probe(function, of_function, compile_at, tuple(params.values()), device)
    states = [function.state for function in source.functions.values() if function.state is not None]
    return servable(
        options.name or source.model.name,
        language_of_model(source.model),
        platform=PLATFORM_NAMES["jit"],
        functions={
            name: ServedFunction(
                function.signature, function.state is not None, resolved(source.model, function.processors)
            )
            for name, function in source.functions.items()
        },
        grid=source.grid,
        table=ProgramTable(programs),
        params=params,
        state=states[0] if states else (),
        device=device,
        swapper=functools.partial(
            restore_as,
            like=abstract(source.params),
            selected=source.provenance.select,
            device=device,
            lifted=source.model.defaults(),
            int8=is_int8(source.model),
        ),
        app_factory=options.app_factory,
        version=options.version,
        batching=options.batching,
    )


def resolved(model: Model, processors: Mapping[str, Text]) -> dict[str, Text]:
    """Processors with the paths of their files made absolute, relative ones read from the model's folder."""
    folder = model.source_file.parent if model.source_file is not None else None
    return {
        name: replace(processor, tokenizer=str(folder / processor.tokenizer if folder else processor.tokenizer))
        for name, processor in processors.items()
    }
