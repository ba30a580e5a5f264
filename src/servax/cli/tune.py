"""`servax tune`: a grid of buckets fitted to recorded shapes."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import err, out, print_json, progress
from servax.core.errors import StartupError, UsageError
from servax.core.events import Notice, emit

NAME = "tune"


def command(
    subject: Annotated[str, typer.Argument(help="A bundle, or MODEL.py:NAME.")],
    traffic: Annotated[
        str, typer.Option("--traffic", help="Shapes recorded by servax serve --record-shapes FILE.", show_default=False)
    ],
    executables: Annotated[
        int | None,
        typer.Option(
            "--executables", min=1, help="At most this many buckets; default: as many as now.", show_default=False
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the grid as --bucket-file takes it.", show_default=False)
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="run: fit to requests as they were joined; request: to each one alone.")
    ] = "run",
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Serve no larger size than was recorded, though the present grid does.")
    ] = False,
    volume: Annotated[
        bool, typer.Option("--volume", help="Load and measure nothing: a bucket costs its padded elements.")
    ] = False,
    require: options.Require = None,
    platform: options.Platform = None,
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    dtype: options.DType = None,
    bucket: options.Buckets = None,
    bucket_file: options.BucketFile = None,
    json: options.Json = False,
) -> None:
    """Fit the grid of buckets to recorded traffic: the least expected device time for a number of executables."""
    from servax.targets.bundle import is_bundle
    from servax.workflow.traffic import read
    from servax.workflow.tune import Subject, describe, tune

    if by not in ("run", "request"):
        raise UsageError("--by is none of run, request", seen=by)
    shapes = read(traffic)
    bundled = is_bundle(subject)
    if bundled and (bucket or bucket_file):
        raise UsageError("a bundle's present grid is its own", remedy="leave --bucket and --bucket-file out")
    with progress():
        measured: Subject | None = None
        if not volume and (bundled or checkpoint is not None):
            from servax.api.load import load
            from servax.runtime.local import LocalServable

            try:
                servable = load(
                    subject,
                    require=require,
                    platform=platform,
                    checkpoint=checkpoint,
                    select=select,
                    step=options.parse_step(step),
                    item=item,
                    dtype=dtype,
                    buckets=bucket or (),
                    bucket_file=bucket_file,
                )
            except StartupError as error:
                if require is not None or platform is not None:
                    raise
                emit(Notice(f"nothing is measured, since it does not run here: {error.sentence()}", "warning"))
            else:
                assert isinstance(servable, LocalServable), "a URL is neither a bundle nor has it a checkpoint"
                with servable:
                    measured = Subject(servable.name, servable.signatures, servable.grid, servable.costs)
        tuning = tune(
            measured or describe(subject, bucket or (), bucket_file),
            shapes,
            executables=executables,
            by=by,
            shrink=shrink,
        )
    if output is not None:
        tuning.write(output)
    if json:
        print_json(tuning.as_json())
        return
    out.print(tuning.table())
    for name, tuned in tuning.functions.items():
        if tuned.model is not None:
            out.print(
                f"{name}: a run costs {tuned.model.text()}, off by at most {tuned.model.error:.0%} where measured; "
                f"fitted to {tuned.observed} recorded {tuned.kind}s",
                markup=False,
                soft_wrap=True,
            )
    if output is not None:
        err.print(f"written to {output}: servax build ... --bucket-file {output}", markup=False, soft_wrap=True)
