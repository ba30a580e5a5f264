"""`servax predict`: one call, or a file of rows; in process or against a server."""

from __future__ import annotations

import contextlib
import hashlib
import json as jsonlib
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from servax.cli import options
from servax.cli.output import err, out, print_json, progress
from servax.core.errors import UsageError
from servax.core.events import Event, StepAdvanced, listening

NAME = "predict"

_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


def command(
    target: Annotated[str, typer.Argument(help="A bundle, a server's URL, or MODEL.py:NAME with --checkpoint.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="One call: NAME=JSON (text='[\"hello\"]'), NAME=@FILE.npy or @FILE.json, or FILE.npz with all. "
            "FILE.npz or FILE.parquet with -o: a call for each row.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Write outputs to this file, .npz or .parquet.", show_default=False),
    ] = None,
    function: Annotated[
        str | None, typer.Option("--function", "-f", help="Function to call. Default: predict, or the only one.")
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--outputs", help="Of a file of rows, keep this output only. Repeatable.", show_default=False),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            min=1,
            help="Rows that are read, computed and stored at a time; default: 32 MiB, at most 1024.",
            show_default=False,
        ),
    ] = None,
    rows_per_request: Annotated[
        int | None,
        typer.Option(
            "--rows-per-request",
            min=1,
            help="Default: what the bucket takes that costs least a row; 32 against a server.",
            show_default=False,
        ),
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option("--in-flight", min=1, help="Requests on their way at a time; default: 8.", show_default=False),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever is done already.")] = False,
    require: options.Require = None,
    platform: options.Platform = None,
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    dtype: options.DType = None,
    bucket: options.Buckets = None,
    json: options.Json = False,
) -> None:
    """Call a function once and print or write its outputs, or with every row of a file; resumable, errors by row."""
    from servax.api.load import load
    from servax.workflow.offline import predict_rows
    from servax.workflow.offline_plan import OfflineOptions

    rows = _file_of_rows(inputs or [], output)
    tensors = {} if rows else read_inputs(inputs or [])
    load_options: dict[str, Any] = {
        "require": require,
        "platform": platform,
        "checkpoint": checkpoint,
        "select": select,
        "step": options.parse_step(step),
        "item": item,
        "dtype": dtype,
        "buckets": bucket or (),
    }
    with progress(), load(target, **load_options) as servable:
        if rows is not None and output is not None:
            with _lines():
                report = predict_rows(
                    servable,
                    rows,
                    output,
                    function=function,
                    identity=_identity(target, load_options),
                    options=OfflineOptions(outputs or (), chunk, rows_per_request, in_flight, restart),
                )
            if json:
                print_json(asdict(report))
            else:
                computed = report.rows - report.resumed
                resumed = f", {report.resumed} of them before" if report.resumed else ""
                speed = f", {computed / report.seconds:,.0f} rows/s" if computed else ""
                err.print(f"{report.rows} rows{resumed}{speed}: {output}", markup=False, soft_wrap=True)
            if report.failed:
                err.print(f"{report.failed} rows have no answer; {report.first_error}", markup=False, soft_wrap=True)
                raise typer.Exit(1)
            return
        answers = servable.predict(function, **tensors) if function else servable.predict(**tensors)
    if output is not None:
        np.savez(output, allow_pickle=False, **answers)
    if json:
        print_json({name: array.tolist() for name, array in answers.items()})
    elif output is None:
        for name, array in answers.items():
            out.print(f"{name}: {array.dtype}{list(array.shape)}", markup=False)
            out.print(np.array2string(array, threshold=32, precision=6), markup=False)


def read_inputs(texts: list[str]) -> dict[str, Any]:
    """Tensors by name from `NAME=JSON`, `NAME=@FILE.npy`, `NAME=@FILE.json` and `FILE.npz`.

    Raises:
      UsageError: a text has none of these forms, or its file cannot be read.
    """
    tensors: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            if not equals:
                with np.load(text, allow_pickle=False) as archive:
                    tensors.update(archive)
            elif value.startswith("@"):
                path = Path(value[1:])
                tensors[name] = (
                    np.load(path, allow_pickle=False) if path.suffix == ".npy" else jsonlib.loads(path.read_text())
                )
            else:
                tensors[name] = jsonlib.loads(value)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"input {text!r} cannot be read",
                seen=str(error),
                expected="NAME=JSON, NAME=@FILE.npy, NAME=@FILE.json or FILE.npz",
            ) from error
    return tensors


def _file_of_rows(inputs: list[str], output: str | None) -> str | None:
    """The one file whose rows are called one by one; None where this is a single call."""
    parquet = [text for text in inputs if text.endswith(".parquet") and "=" not in text]
    if output is None or len(inputs) != 1 or not (parquet or (inputs[0].endswith(".npz") and "=" not in inputs[0])):
        if parquet:
            raise UsageError(
                "a Parquet file is worked through by rows, alone and into a file",
                seen=", ".join(inputs),
                expected="-i rows.parquet -o out.parquet",
            )
        return None
    return inputs[0]


def _identity(target: str, load_options: dict[str, Any]) -> str:
    """Names the programs and weights, so that half of an output is not completed with those of another model."""
    parts: list[str] = [target if "://" in target else str(Path(target).absolute())]
    with contextlib.suppress(OSError):
        parts.append(hashlib.sha256((Path(target) / "bundle.json").read_bytes()).hexdigest())
    given = {name: str(value) for name, value in load_options.items() if value and name not in ("require", "platform")}
    parts.append(jsonlib.dumps(given, sort_keys=True))
    if (checkpoint := load_options["checkpoint"]) is not None:
        with contextlib.suppress(OSError):
            parts.append(str(Path(checkpoint).stat().st_mtime_ns))
    return " ".join(parts)


@contextlib.contextmanager
def _lines() -> Generator[None]:
    """A line of progress now and then, where no bar shows it."""
    last = time.monotonic()

    def tell(event: Event) -> None:
        nonlocal last
        if isinstance(event, StepAdvanced) and time.monotonic() - last > _EVERY:
            last = time.monotonic()
            print(f"{event.step}: {event.detail}", file=sys.stderr)

    with contextlib.nullcontext() if err.is_terminal else listening(tell):
        yield
