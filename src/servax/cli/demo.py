"""`servax demo`: the whole way on a real model, on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from servax.cli import options
from servax.cli.output import err, out, print_json, progress
from servax.core.table import Table, seconds_text

NAME = "demo"
_TEXTS = ["the first request", "should be as fast as the thousandth"]


def command(
    exit: Annotated[bool, typer.Option("--exit", help="End after the screen instead of serving on.")] = False,
    directory: Annotated[
        Path, typer.Option("--directory", help="Where the checkpoint and the bundle are written.")
    ] = Path(".servax/demo"),
    http: Annotated[int, typer.Option("--http", help="Port to keep serving on.")] = 8000,
    json: options.Json = False,
) -> None:
    """Convert MiniLM, build all four wrappers, serve, and compare a first request with plain jax.jit."""
    from servax.bench.server import ServerProcess
    from servax.workflow.build import build
    from servax.zoo import minilm

    directory.mkdir(parents=True, exist_ok=True)
    checkpoint, output = directory / "minilm.checkpoint", directory / "minilm.bundle"
    if not checkpoint.exists():
        err.print(f"converting all-MiniLM-L6-v2 to an Orbax checkpoint: {checkpoint}")
        minilm.convert(minilm.package_file("model.safetensors"), checkpoint)
    err.print(f"building four wrappers: {output}")
    with progress():
        bundle = build(
            "servax.zoo.minilm:model",
            checkpoint=str(checkpoint),
            targets=["jit", "aot", "export", "saved_model"],
            output=str(output),
            overwrite=True,
        )
    inputs = [{"name": "text", "shape": [len(_TEXTS)], "datatype": "BYTES", "data": _TEXTS}]
    err.print("the same first request to plain jax.jit and to servax, each in a fresh process")
    naive_command = ["-m", "servax.bench.naive", "servax.zoo.minilm:model", str(checkpoint), "--port", "{port}"]
    with ServerProcess(naive_command) as server:
        naive_ready = server.seconds_to_ready
        naive = [server.infer("minilm", inputs) for _ in range(2)]
    servax_command = ["-m", "servax", "serve", str(output), "--require", "aot", "--http", "{port}", "--grpc", "-1"]
    with ServerProcess(servax_command) as server:
        ready = server.seconds_to_ready
        warm = [server.infer("minilm", inputs) for _ in range(2)]
        compiles = server.compiles_after_ready()

    screen = Table.of(
        f"all-MiniLM-L6-v2, {len(_TEXTS)} sentences over HTTP",
        ("", ">plain jax.jit", ">servax"),
        [
            ("process start to ready", seconds_text(naive_ready), seconds_text(ready)),
            ("first request", seconds_text(naive[0].seconds), seconds_text(warm[0].seconds)),
            *(
                (f"  {stage}", seconds_text(naive[0].steps.get(step)), seconds_text(warm[0].steps.get(step)) or "0")
                for stage, step in (
                    ("trace    (JAX)", "trace"),
                    ("lower    (StableHLO)", "lower"),
                    ("compile  (XLA)", "compile"),
                    ("run      (device)", "execute"),
                )
            ),
            ("second request", seconds_text(naive[1].seconds), seconds_text(warm[1].seconds)),
            ("compiles after ready", "one for each new shape", compiles),
        ],
    )
    if json:
        print_json(
            {
                "naive": {"ready": naive_ready, "first": naive[0].seconds, "steps": dict(naive[0].steps)},
                "servax": {"ready": ready, "first": warm[0].seconds, "steps": dict(warm[0].steps)},
                "compiles_after_ready": compiles,
                **bundle.parity.as_json(),
            }
        )
    else:
        out.print(Group(screen, bundle.parity))
    if compiles or bundle.parity.failed:
        raise typer.Exit(1)
    if not exit:
        _serve_on(output, http)


def _serve_on(bundle: Path, port: int) -> None:
    from servax.api.serve import run

    err.print(
        "\nserving; try:\n"
        f"  curl http://127.0.0.1:{port}/v2/models/minilm/infer -d "
        '\'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}\'\n',
        soft_wrap=True,
        markup=False,
    )
    raise typer.Exit(run({"targets": (str(bundle),), "http": port, "grpc": -1, "require": "aot"}))
