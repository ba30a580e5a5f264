"""`servax serve`: the server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from servax.cli import options

NAME = "serve"


def command(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Bundles, or a store (STORE/NAME/VERSION/), or MODEL.py:NAME with --checkpoint.", show_default=False
        ),
    ] = None,
    config: options.Config = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    http: Annotated[int, typer.Option("--http", min=0, max=65535, help="Port of HTTP; 0 picks a free one.")] = 8000,
    grpc: Annotated[
        int, typer.Option("--grpc", min=-1, max=65535, help="Port of gRPC; 0 picks a free one, -1: no gRPC.")
    ] = 8001,
    metrics: Annotated[
        int | None,
        typer.Option("--metrics", min=0, max=65535, help="Port of /metrics alone; else it is on HTTP's."),
    ] = None,
    tfserving_http: Annotated[
        int | None, typer.Option("--tfserving-http", min=0, max=65535, help="One more port of HTTP, e.g. 8501.")
    ] = None,
    tfserving_grpc: Annotated[
        int | None, typer.Option("--tfserving-grpc", min=0, max=65535, help="One more port of gRPC, e.g. 8500.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name it is served under; of one bundle only.", show_default=False)
    ] = None,
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
    weights: options.Weights = None,
    bucket: options.Buckets = None,
    bucket_file: options.BucketFile = None,
    cache_dir: Annotated[
        str,
        typer.Option(
            "--cache-dir",
            help="Persistent compilation cache, which makes a second start of jit and export fast; none: without.",
        ),
    ] = "~/.cache/servax",
    policy: Annotated[
        str, typer.Option("--policy", help="Versions of a store's models: latest:N, all, specific:1,2.")
    ] = "latest:1",
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="Label of a version: stable=3, canary=latest. Repeatable.", show_default=False),
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Shares of requests that name no version: stable=0.9,canary=0.1.")
    ] = None,
    poll: Annotated[
        str | None, typer.Option("--poll", help="How often to look for new versions in the store, e.g. 10s.")
    ] = None,
    swap: Annotated[
        str,
        typer.Option(
            "--swap",
            help="keep-both: old and new version in memory until the new one answers; unload-first: never both.",
        ),
    ] = "keep-both",
    control: Annotated[
        str, typer.Option("--control", help="explicit: models are loaded and unloaded by the repository extension.")
    ] = "none",
    load: Annotated[
        list[str] | None,
        typer.Option("--load", help="Model to begin with under --control explicit. Repeatable.", show_default=False),
    ] = None,
    max_delay: Annotated[
        str, typer.Option("--max-delay", help="How long a request is held back for others: 5ms, 0, or adaptive.")
    ] = "adaptive",
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Requests that may wait, by model.")] = 4096,
    max_queue_bytes: Annotated[str, typer.Option("--max-queue-bytes", help="Size of their tensors.")] = "1GiB",
    max_body: Annotated[str, typer.Option("--max-body", help="Largest request body, as sent and unpacked.")] = "64MiB",
    body_timeout: Annotated[
        str, typer.Option("--body-timeout", help="Time in which a request body must arrive.")
    ] = "30s",
    max_connections: Annotated[
        int | None, typer.Option("--max-connections", min=1, help="Connections over HTTP that may be open.")
    ] = None,
    idle_timeout: Annotated[
        str, typer.Option("--idle-timeout", help="Time that a connection over HTTP may be open between requests.")
    ] = "75s",
    drain_timeout: Annotated[
        str, typer.Option("--drain-timeout", help="Time that requests in flight have after SIGTERM.")
    ] = "30s",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads of XLA.", show_default=False)
    ] = None,
    record_shapes: Annotated[
        str | None, typer.Option("--record-shapes", help="File that the shapes of requests are counted in, for tune.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option("--api-key-file", help="API keys, one a line, or name:key. No route without one.")
    ] = None,
    admin_key_file: Annotated[
        str | None, typer.Option("--admin-key-file", help="Keys for what changes the server: load and unload.")
    ] = None,
    open_health: Annotated[
        bool, typer.Option("--open-health", help="Answer liveness and readiness without a key, for probes.")
    ] = False,
    tls_cert: Annotated[str | None, typer.Option("--tls-cert", help="Certificate with its chain, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", help="Its private key, PEM.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option("--tls-client-ca", help="Authorities whose certificate a client must show, PEM.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="Origin whose pages may call. Repeatable.", show_default=False),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line for each request on standard error.")
    ] = True,
    log_format: Annotated[str, typer.Option("--log-format", help="Of the log: logfmt or json.")] = "logfmt",
    timings: Annotated[
        bool, typer.Option("--timings/--no-timings", help="The header Server-Timing: where the time of a request went.")
    ] = True,
    triton_metrics: Annotated[
        bool, typer.Option("--triton-metrics", help="The nv_inference_* metrics besides our own.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line on standard output: listening, ready, failed, ended.")
    ] = False,
) -> None:
    """Serve bundles; ready once every bucket has run. Loopback unless --host says otherwise."""
    from servax.api.serve import run

    raise typer.Exit(run(given(context), config=config, as_json=as_json))


def given(context: typer.Context) -> dict[str, Any]:
    """The settings that the command line names; those it does not may come from the file or the environment."""
    return {
        name: value
        for name, value in context.params.items()
        if name not in ("config", "as_json") and _said(context, name)
    }


def _said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
