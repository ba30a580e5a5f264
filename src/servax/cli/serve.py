"""`servax serve`: the server."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options

NAME = "serve"


def command(
    bundle: Annotated[str, typer.Argument(help="A bundle, or MODEL.py:NAME with --checkpoint.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    http: Annotated[int, typer.Option("--http", min=0, max=65535, help="Port of HTTP; 0 picks a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Name it is served under.", show_default=False)] = None,
    require: options.Require = None,
    platform: options.Platform = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="MODEL.py:NAME to fall back to when nothing in the bundle runs here."),
    ] = None,
    no_executables: Annotated[
        bool, typer.Option("--no-executables", help="Load no native code from the bundle; compile its exports.")
    ] = False,
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    dtype: options.DType = None,
    bucket: options.Buckets = None,
    bucket_file: options.BucketFile = None,
    cache_dir: Annotated[
        str,
        typer.Option(
            "--cache-dir",
            help="Persistent compilation cache, which makes a second start of jit and export fast; none: without.",
        ),
    ] = "~/.cache/servax",
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", min=0, help="Seconds that requests in flight have after SIGTERM.")
    ] = 30.0,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Largest request body, in bytes.")] = 64
    * 1024
    * 1024,
) -> None:
    """Serve a bundle; ready once every bucket has run. Loopback unless --host says otherwise."""
    from servax.api.serve import run

    raise typer.Exit(
        run(
            bundle,
            host=host,
            port=http,
            drain_timeout=drain_timeout,
            max_body=max_body,
            load_options={
                "name": name,
                "require": require,
                "platform": platform,
                "model": model,
                "executables": not no_executables,
                "checkpoint": checkpoint,
                "select": select,
                "step": options.parse_step(step),
                "item": item,
                "dtype": dtype,
                "buckets": bucket or (),
                "bucket_file": bucket_file,
                "cache_dir": None if cache_dir == "none" else cache_dir,
            },
        )
    )
