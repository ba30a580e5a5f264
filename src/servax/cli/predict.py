"""`servax predict`: one call, in process or against a server."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from servax.cli import options
from servax.cli.output import out, print_json, progress
from servax.core.errors import UsageError

NAME = "predict"


def command(
    target: Annotated[str, typer.Argument(help="A bundle, a server's URL, or MODEL.py:NAME with --checkpoint.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            help="NAME=JSON (text='[\"hello\"]'), NAME=@FILE.npy or @FILE.json, or FILE.npz with all of them.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write outputs to this .npz file.", show_default=False)
    ] = None,
    function: Annotated[
        str | None, typer.Option("--function", "-f", help="Function to call. Default: predict, or the only one.")
    ] = None,
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
    """Call a function once and print or write its outputs."""
    from servax.api.load import load

    tensors = read_inputs(inputs or [])
    with (
        progress(),
        load(
            target,
            require=require,
            platform=platform,
            checkpoint=checkpoint,
            select=select,
            step=options.parse_step(step),
            item=item,
            dtype=dtype,
            buckets=bucket or (),
        ) as servable,
    ):
        outputs = servable.predict(function, **tensors) if function else servable.predict(**tensors)
    if output is not None:
        np.savez(output, allow_pickle=False, **outputs)
    if json:
        print_json({name: array.tolist() for name, array in outputs.items()})
    elif output is None:
        for name, array in outputs.items():
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
