"""`servax.load`: one call for a model, a bundle, or a server's URL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from servax.core.errors import UsageError

if TYPE_CHECKING:
    from servax.checkpoint.steps import Step
    from servax.model.model import Model
    from servax.runtime.batching import Batching
    from servax.runtime.local import LocalServable
    from servax.runtime.servable import Servable
    from servax.workflow.load import LoadOptions


def load(
    subject: Model | str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    params: Any = None,
    select: str | None = None,
    step: Step | None = None,
    item: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    buckets: Mapping[str, Sequence[int]] | Sequence[str] = (),
    bucket_file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    require: str | None = None,
    platform: str | None = None,
    executables: bool = True,
    model: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    warm: bool = True,
    batching: Batching | None = None,
) -> Servable:
    """A servable that is READY: every program has run, and no request compiles anything.

    Args:
      subject: a `servax.Model`, `MODEL.py:NAME`, a bundle's path, a model of a store (`STORE/NAME`: its latest
        version), or `http://host:port` (a client of the same type).
      checkpoint: for a model: an Orbax directory, safetensors or GGUF file. For a bundle: weights in place of its own.
      params: for a model: a live module or tree of arrays in place of a checkpoint.
      select: subtree of the checkpoint with the parameters.
      step: step of a CheckpointManager directory: `latest`, `best` or a number.
      item: item of a CheckpointManager checkpoint.
      dtype: what floating parameters are cast to, e.g. `bfloat16`.
      weights: of a language model: `float32`, `bfloat16` or `int8`, in place of `dtype`.
      buckets: for a model: sizes by dimension, `{"batch": [1, 8]}`, or texts as `--bucket` takes them.
      bucket_file: JSON with the buckets of each function.
      name: the name it is served under.
      require: the only wrapper that will do: `aot`, `export` or `jit`.
      platform: the device it must run on: `cpu`, `cuda`, `tpu`.
      executables: whether native code of a bundle may be loaded.
      model: `MODEL.py:NAME` to fall back to when nothing in a bundle runs here.
      cache_dir: persistent compilation cache, for a fast second start.
      warm: whether to run every program now; without it the servable stays LOADING until its `warm` is called.
      batching: how requests are joined, and how many may wait; `servax.runtime.Batching`.

    Raises:
      UsageError: the arguments contradict one another.
      ModelError, CheckpointError, BundleError, StartupError: what the model, the checkpoint, the bundle or this
        machine lacks.
    """
    if isinstance(subject, str) and "://" in subject and subject.partition("://")[0].lower() in {"http", "https"}:
        given = {
            "checkpoint": checkpoint,
            "params": params,
            "select": select,
            "step": step,
            "item": item,
            "dtype": dtype,
            "weights": weights,
            "buckets": buckets or None,
            "bucket_file": bucket_file,
            "require": require,
            "platform": platform,
            "model": model,
            "cache_dir": cache_dir,
            "batching": batching,
        }
        if wrong := [key for key, value in given.items() if value is not None]:
            raise UsageError(
                f"{', '.join(wrong)} cannot be given with a URL: the server has its model loaded",
                where=subject,
                remedy="leave them out, or give them to the server",
            )
        from servax.protocols.client import connect

        return connect(subject, model=name)
    from servax.runtime.batching import Batching
    from servax.runtime.directories import is_version, latest_bundle
    from servax.targets.bundle import is_bundle
    from servax.workflow.load import load_bundle, load_model
    from servax.workflow.source import CheckpointChoice, bucket_texts

    options = load_options(
        name=name,
        require=require,
        platform=platform,
        executables=executables,
        model=model,
        cache_dir=cache_dir,
        batching=batching or Batching(),
    )
    choice = CheckpointChoice(checkpoint, select, step, item, dtype, weights)
    stored = latest_bundle(subject) if isinstance(subject, (str, os.PathLike)) and not is_bundle(subject) else None
    if stored is not None:
        subject, options = stored, replace(options, name=name or stored.parent.name)
    if isinstance(subject, (str, os.PathLike)) and is_bundle(subject):
        if is_version(directory := os.path.basename(os.path.normpath(subject))):
            options = replace(options, version=directory)
        of_checkpoint = {"select": select, "step": step, "item": item}
        if checkpoint is None and (wrong := [key for key, value in of_checkpoint.items() if value is not None]):
            raise UsageError(
                f"{', '.join(wrong)} cannot be given with a bundle alone: it has one set of weights",
                where=str(subject),
                remedy="name the checkpoint that has the weights, too",
            )
        given = {
            "params": params,
            "dtype": dtype,
            "weights": weights,
            "bucket_file": bucket_file,
            "buckets": buckets or None,
        }
        if wrong := [key for key, value in given.items() if value is not None]:
            raise UsageError(
                f"{', '.join(wrong)} cannot be given with a bundle: its programs are compiled",
                where=str(subject),
                remedy="build another bundle, or load the model",
            )
        return _warm(load_bundle(subject, options, choice), warm)
    if isinstance(subject, os.PathLike):
        subject = os.fspath(subject)
    servable = load_model(
        subject, choice, options, params=params, buckets=bucket_texts(buckets), bucket_file=bucket_file
    )
    return _warm(servable, warm)


def load_options(**options: Any) -> LoadOptions:
    """Options of loading, with an application for each servable."""
    from servax.workflow.load import LoadOptions

    return LoadOptions(app_factory=_app, **options)


def _warm(servable: LocalServable, wanted: bool) -> LocalServable:
    return servable.warm() if wanted else servable


def _app(servable: Servable) -> Any:
    from servax.server.app import create_app

    return create_app(servable)
