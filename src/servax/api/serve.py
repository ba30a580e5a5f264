"""`servax.serve` and what stands behind the `serve` verb."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from servax.core.errors import UsageError
from servax.runtime.servable import Servable

if TYPE_CHECKING:
    from servax.checkpoint.steps import Step
    from servax.runtime.batching import Batching
    from servax.runtime.local import LocalServable
    from servax.server.background import BackgroundServer
    from servax.server.models import Models
    from servax.server.settings import Settings

_OF_ONE_MODEL = {"name", "checkpoint", "select", "step", "item", "model", "dtype", "weights", "bucket", "bucket_file"}
"""Settings that say something of one bundle or model."""

_OF_STORES = {"policy", "label", "split", "poll", "swap", "control", "load"}
"""Settings that only a store has a use for."""

_OF_LOADING = {"require", "platform", "no_executables", "cache_dir", "max_delay", "max_queue", "max_queue_bytes"}
"""Settings of how each version of a store is loaded, and its requests joined."""


def serve(
    source: Servable | Iterable[Servable] | str | os.PathLike[str],
    port: int = 8000,
    host: str = "127.0.0.1",
    *,
    grpc_port: int | None = None,
    **options: Any,
) -> BackgroundServer:
    """Serves from a background thread; running the cell again replaces the server.

    Args:
      source: a servable, or several, which stay the caller's to close; or the directory of a store, which is loaded
        first, and closed with the server.
      port: of HTTP; 0 picks a free one.
      host: loopback unless told otherwise.
      grpc_port: of gRPC; 0 picks a free one; None: no gRPC.
      options: more of `servax serve`'s, by name: `max_body="1MiB"`, `api_key_file="keys"`, `cors_origin=["http://a"]`.
        Those of stores, loading and batching are for a store alone: `policy="all"`, `poll="10s"`.

    Returns:
      A server with `url`, `grpc` and `close()`.

    Raises:
      UsageError: an option cannot be used, or the directory is no store.
      StartupError: another process has the port; keys or certificates cannot be read; a model of the store has no
        version that serves.
    """
    from servax.server.background import serve as serve_in_background

    if not isinstance(source, (str, os.PathLike)):
        return serve_in_background(source, port, host, grpc_port=grpc_port, **options)
    from servax.protocols.dataplane import DataPlane
    from servax.server.settings import make
    from servax.targets.bundle import is_bundle

    if is_bundle(source):
        raise UsageError(
            "a bundle is loaded before it is served",
            where=os.fspath(source),
            expected="a servable, or the directory of a store",
            remedy=f"servax.serve(servax.load({os.fspath(source)!r}))",
        )
    of_store = {"cache_dir": "none"} | {name: options[name] for name in options if name in _OF_STORES | _OF_LOADING}
    others = {name: value for name, value in options.items() if name not in of_store}
    models = _stored(os.fspath(source), make(**of_store | others))
    plane = DataPlane(catalog=models.catalog, repository=models.repository)
    try:
        models.start()
        return serve_in_background(plane, port, host, grpc_port=grpc_port, closing=models.close, **others)
    except BaseException:
        models.close()
        raise


def run(given: Mapping[str, Any], *, config: str | os.PathLike[str] | None = None, as_json: bool = False) -> int:
    """Serves until a signal; returns the exit code.

    Args:
      given: settings of `servax serve` by name, over those of the file and of `SERVAX_*`.
      config: the file.
      as_json: whether standard output gets a JSON object a line.

    Raises:
      UsageError: a setting cannot be used, there is nothing to serve, or it is served already; with `as_json` that is
        told like any other failure.
    """
    from servax.runtime.threads import set_threads
    from servax.server.process import Told
    from servax.server.process import run as run_process
    from servax.server.settings import resolve

    told = Told(as_json)
    with contextlib.ExitStack() as stack:
        try:
            settings = resolve(given, file=config).settings
            if settings.threads is not None:
                set_threads(settings.threads)
            models = _models(settings)
            if settings.record_shapes is not None:
                from servax.workflow.recorder import ShapeRecorder

                stack.enter_context(ShapeRecorder(settings.record_shapes))
        except UsageError as error:
            if not as_json:
                raise
            print(f"start-up failed: {error}", file=sys.stderr)
            told.failed(error)
            told("ended", code=error.exit_code)
            return error.exit_code
        return run_process(models, settings, told)


def _models(settings: Settings) -> Models:
    from servax.checkpoint.steps import parse_step
    from servax.runtime.directories import is_store
    from servax.server.models import LoadedModels

    targets = settings.targets
    if not targets:
        raise UsageError("there is nothing to serve", expected="a bundle, a store, or MODEL.py:NAME")
    for target in targets:
        if target.startswith(("http://", "https://")):
            raise UsageError("a URL is served already", seen=target, expected="a bundle, or MODEL.py:NAME")
    stores = [target for target in targets if is_store(target)]
    if stores and len(targets) > 1:
        raise UsageError("a store is served alone", seen=", ".join(targets), expected="one store, or bundles")
    given = settings.model_fields_set
    wrong = given & (_OF_ONE_MODEL if stores or len(targets) > 1 else set()) | given & (set() if stores else _OF_STORES)
    if wrong:
        raise UsageError(
            f"{', '.join(each.replace('_', '-') for each in sorted(wrong))} cannot be said here",
            seen=", ".join(targets),
            expected="one bundle or model" if wrong & _OF_ONE_MODEL else "a store: STORE/NAME/VERSION/bundle.json",
        )
    if stores:
        return _stored(stores[0], settings)
    step = None if settings.step is None else parse_step(settings.step)
    batching = _batching(settings)
    return LoadedModels(lambda: [_load(target, settings, step, batching) for target in targets])


def _stored(path: str, settings: Settings) -> Models:
    from servax.api.load import load_options
    from servax.runtime.labels import Split, parse_labels
    from servax.runtime.policy import Policy, Rules
    from servax.runtime.store import StoreOptions
    from servax.server.models import StoredModels
    from servax.workflow.store import open_store

    rules = Rules(
        Policy.parse(settings.policy),
        parse_labels(settings.label),
        None if settings.split is None else Split.parse(settings.split),
    )
    options = StoreOptions(
        rules,
        control=settings.control,
        start=settings.load or None,
        poll=settings.poll,
        swap=settings.swap,
        drain_timeout=settings.drain_timeout,
    )
    load = load_options(
        require=settings.require,
        platform=settings.platform,
        executables=not settings.no_executables,
        cache_dir=_cache_dir(settings),
        batching=_batching(settings),
    )
    return StoredModels(open_store(path, options, load))


def _batching(settings: Settings) -> Batching:
    from servax.runtime.batching import Batching

    return Batching(settings.max_delay, settings.max_queue, settings.max_queue_bytes)


def _cache_dir(settings: Settings) -> str | None:
    return None if settings.cache_dir == "none" else settings.cache_dir


def _load(target: str, settings: Settings, step: Step | None, batching: Batching) -> LocalServable:
    from servax.api.load import load
    from servax.runtime.local import LocalServable

    servable = load(
        target,
        name=settings.name,
        require=settings.require,
        platform=settings.platform,
        model=settings.model,
        executables=not settings.no_executables,
        checkpoint=settings.checkpoint,
        select=settings.select,
        step=step,
        item=settings.item,
        dtype=settings.dtype,
        weights=settings.weights,
        buckets=settings.bucket,
        bucket_file=settings.bucket_file,
        cache_dir=_cache_dir(settings),
        batching=batching,
        warm=False,
    )
    assert isinstance(servable, LocalServable), "only a URL gives another kind, and it was refused"
    return servable
