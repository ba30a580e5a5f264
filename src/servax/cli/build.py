"""`servax build`: a checkpoint becomes a bundle, proved."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json, progress
from servax.core.errors import UsageError

NAME = "build"


def command(
    model: Annotated[
        str | None, typer.Argument(help="MODEL.py:NAME or package.module:NAME.", show_default=False)
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Directory of the bundle.", show_default=False)
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="aot, export, saved_model, jit; repeatable. Default: aot."),
    ] = None,
    platform: Annotated[
        list[str] | None,
        typer.Option("--platform", help="Platform the exports are for: cpu, cuda, tpu; repeatable. Default: this one."),
    ] = None,
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    dtype: options.DType = None,
    weights: options.Weights = None,
    bucket: options.Buckets = None,
    bucket_file: options.BucketFile = None,
    from_bundle: Annotated[
        str | None,
        typer.Option("--from", help="Add a target to this bundle, from its exports, without the model's source."),
    ] = None,
    tensorflow: Annotated[
        str | None,
        typer.Option("--tensorflow", help="TensorFlow that will read the SavedModel, e.g. 2.21. Default: installed."),
    ] = None,
    parity: Annotated[
        str, typer.Option("--parity", help="corners, or full: every bucket of every target.")
    ] = "corners",
    max_precision_error: Annotated[
        float | None, typer.Option(help="Largest difference to float32 that is accepted.", show_default=False)
    ] = None,
    no_fallback: Annotated[bool, typer.Option("--no-fallback", help="aot without the exports beside it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a bundle that is there.")] = False,
    json: options.Json = False,
) -> None:
    """Build a bundle from a model and a checkpoint, and prove every wrapper in it."""
    from servax.workflow.build import build
    from servax.workflow.extend import extend

    if parity not in ("corners", "full"):
        raise UsageError("--parity is neither corners nor full", seen=parity)
    if max_precision_error is not None and not 0 <= max_precision_error < math.inf:
        raise UsageError("--max-precision-error is not a positive number", seen=str(max_precision_error))
    with progress():
        if from_bundle is not None:
            bundle = extend(from_bundle, targets=target or [], tensorflow=tensorflow, parity=parity)
        elif model is None or output is None:
            raise UsageError(
                "build needs a model and --output, or --from BUNDLE",
                remedy="servax build net.py:model --checkpoint runs/gpt -o net.bundle",
            )
        else:
            bundle = build(
                model,
                output=output,
                checkpoint=checkpoint,
                select=select,
                step=options.parse_step(step),
                item=item,
                dtype=dtype,
                weights=weights,
                targets=target or ["aot"],
                platforms=platform,
                buckets=bucket or (),
                bucket_file=bucket_file,
                tensorflow=tensorflow,
                parity=parity,
                max_precision_error=max_precision_error,
                fallback=not no_fallback,
                overwrite=overwrite,
            )
    if json:
        print_json({"bundle": str(bundle.root), **bundle.parity.as_json()})
        return
    out.print(bundle.parity)
    out.print(f"bundle: {bundle.root}", soft_wrap=True)
    if bundle.manifest.saved_model is not None:
        from servax.targets.savedmodel import copy_command

        out.print(f"TensorFlow Serving: {copy_command(str(bundle.root), bundle.manifest.name)}", soft_wrap=True)
    out.print(f"next: servax serve {bundle.root}", soft_wrap=True)
