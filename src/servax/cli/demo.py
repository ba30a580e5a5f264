"""`servax demo`: the whole way on a real model, on one screen."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from servax.cli import options
from servax.cli.output import err, out, print_json, progress
from servax.core.table import Table, seconds_text

NAME = "demo"
QUESTION = "What is the capital of France, and what is it known for?"
_TEXTS = ["the first request", "should be as fast as the thousandth"]


class DemoModel(StrEnum):
    """A model that the demo can show."""

    SMOLLM2 = "smollm2"
    MINILM = "minilm"


def command(
    model: Annotated[
        DemoModel,
        typer.Option("--model", help="smollm2: a language model that answers; minilm: a sentence in, a vector out."),
    ] = DemoModel.SMOLLM2,
    exit: Annotated[bool, typer.Option("--exit", help="End after the screen instead of serving on.")] = False,
    directory: Annotated[
        Path, typer.Option("--directory", help="Where the checkpoint and the bundle are written.")
    ] = Path(".servax/demo"),
    http: Annotated[int, typer.Option("--http", help="Port to keep serving on.")] = 8000,
    json: options.Json = False,
) -> None:
    """Convert a real model, build it into a bundle, serve it, and ask it: the whole way on one screen."""
    directory.mkdir(parents=True, exist_ok=True)
    show = _smollm2 if model is DemoModel.SMOLLM2 else _minilm
    output, failed = show(directory, as_json=json)
    if failed:
        raise typer.Exit(1)
    if not exit:
        _serve_on(output, http, model)


def _smollm2(directory: Path, *, as_json: bool) -> tuple[Path, bool]:
    """SmolLM2-135M-Instruct, from 4 bits to an answer that streams; its bundle, and whether something was not so."""
    from servax.bench.server import ServerProcess
    from servax.protocols.chat import RemoteChat
    from servax.protocols.connection import Credentials
    from servax.workflow.build import build
    from servax.zoo import smollm2

    checkpoint, output = directory / "smollm2" / "checkpoint", directory / "smollm2.bundle"
    if not checkpoint.exists():
        err.print(f"converting SmolLM2-135M-Instruct, GGUF, to an Orbax checkpoint: {checkpoint}")
        checkpoint.parent.mkdir(exist_ok=True)
        smollm2.convert(smollm2.package_file(), checkpoint)
    err.print(f"building every program of it in bfloat16: {output}")
    began = time.perf_counter()
    with progress():
        bundle = build(
            "servax.zoo.smollm2:model",
            checkpoint=str(checkpoint),
            weights="bfloat16",
            targets=["aot"],
            output=str(output),
            overwrite=True,
        )
    built = time.perf_counter() - began
    err.print("serving it in a fresh process, and asking over the OpenAI API\n")
    command = ["-m", "servax", "serve", str(output), "--require", "aot", "--http", "{port}", "--grpc", "-1"]
    with ServerProcess(command) as server:
        remote = RemoteChat(server.url, model="smollm2", credentials=Credentials(), timeout=60)
        if not as_json:
            out.print(f"> {QUESTION}", markup=False)
        asked, times, parts = time.perf_counter(), list[float](), list[str]()
        for part in remote.say([{"role": "user", "content": QUESTION}], {"temperature": 0, "max_tokens": 128}):
            times.append(time.perf_counter())
            parts.append(part)
            if not as_json:
                out.print(part, end="", markup=False, highlight=False)
                out.file.flush()
        remote.close()
        compiles = server.compiles_after_ready()
    answer = "".join(parts)
    from servax.generation.tokenizer import Tokenizer

    tokens = len(Tokenizer(bundle.read("processors/tokenizer.json").decode()).encode(answer))
    rate = (tokens - 1) / (times[-1] - times[0]) if times[-1:] != times[:1] else None
    found: dict[str, Any] = {
        "build": built,
        "ready": server.seconds_to_ready,
        "first": times[0] - asked if times else None,
        "tokens": tokens,
        "rate": rate,
        "compiles_after_ready": compiles,
    }
    if as_json:
        print_json({**found, "question": QUESTION, "answer": answer, **bundle.parity.as_json()})
        return output, bool(compiles or bundle.parity.failed)
    screen = Table.of(
        "SmolLM2-135M-Instruct, one question over the OpenAI API",
        ("", ">servax"),
        [
            ("build, proved", seconds_text(built)),
            ("process start to ready", seconds_text(server.seconds_to_ready)),
            ("time to first token", seconds_text(found["first"])),
            ("tokens per second", f"{rate:.1f}" if rate else ""),
            ("compiles after ready", compiles),
        ],
    )
    out.print("\n")
    out.print(Group(screen, bundle.parity))
    return output, bool(compiles or bundle.parity.failed)


def _minilm(directory: Path, *, as_json: bool) -> tuple[Path, bool]:
    """all-MiniLM-L6-v2 beside plain jax.jit; its bundle, and whether something was not so."""
    from servax.bench.server import ServerProcess
    from servax.workflow.build import build
    from servax.zoo import minilm

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
    if as_json:
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
    return output, bool(compiles or bundle.parity.failed)


def _serve_on(bundle: Path, port: int, model: DemoModel) -> None:
    from servax.api.serve import run

    if model is DemoModel.SMOLLM2:
        body = '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "stream": true}'
        tries = f"  servax chat http://127.0.0.1:{port}\n  curl http://127.0.0.1:{port}/v1/chat/completions -d '{body}'"
    else:
        body = '{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}'
        tries = f"  curl http://127.0.0.1:{port}/v2/models/minilm/infer -d '{body}'"
    err.print(f"\nserving; try:\n{tries}\n", soft_wrap=True, markup=False)
    raise typer.Exit(run({"targets": (str(bundle),), "http": port, "grpc": -1, "require": "aot"}))
