"""`servax bench`: what buckets cost before any bundle exists, or what a server takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from servax.cli import options
from servax.cli.output import err, out, print_json, progress
from servax.core.errors import UsageError

if TYPE_CHECKING:
    from servax.runtime.servable import Servable

NAME = "bench"


def command(
    target: Annotated[str, typer.Argument(help="MODEL.py:NAME with --checkpoint, a bundle, or a server's URL.")],
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="Sizes to measure: batch=1,2,4,8,16,32. Repeatable.", show_default=False),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(
            "--fix", help="Size of another dimension: length=128. Default: the model's largest.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            help="Closed-loop load by so many callers: 1,16,64, the default for a URL.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.01,
            help="Duration for each bucket (1) or each concurrency (5).",
            show_default=False,
        ),
    ] = None,
    gain: Annotated[
        float, typer.Option("--gain", min=0, max=1, help="How much better a size has to be to be kept.")
    ] = 0.1,
    function: Annotated[
        str | None, typer.Option("--function", "-f", help="Function to measure. Default: predict, or the only one.")
    ] = None,
    require: options.Require = None,
    platform: options.Platform = None,
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    dtype: options.DType = None,
    json: options.Json = False,
) -> None:
    """Measure each bucket's time, throughput, compilation and memory, ending in a --bucket line; or load a server."""
    from servax.api.load import load
    from servax.bench.load import LoadReport, closed_loop
    from servax.bench.sweep import inputs_of, measure, only
    from servax.model.reference import load_model
    from servax.runtime.local import LocalServable
    from servax.runtime.servable import default_function
    from servax.stages.buckets import Bucket
    from servax.targets.bundle import is_bundle

    swept, fixed = _sizes("--sweep", sweep or []), _sizes("--fix", fix or [])
    if several := [dim for dim, sizes in fixed.items() if len(sizes) > 1 or dim in swept]:
        raise UsageError(f"--fix takes one size of a dimension that is not swept: {', '.join(several)}")
    remote = target.startswith(("http://", "https://"))
    callers = _numbers("--concurrency", concurrency or "1,16,64") if concurrency or remote else []
    if remote and swept:
        raise UsageError("a server's buckets are its own", seen=f"--sweep with {target}", remedy="use --concurrency")
    sizes = {**swept, **fixed}
    subject, buckets, functions = target, [], 1
    if not remote and not is_bundle(target):
        model = load_model(target)
        functions = len(model.functions)
        function = function or (next(iter(model.functions)) if functions == 1 else "predict")
        subject, buckets = only(model, function, sizes)
    with (
        progress(),
        load(
            subject,
            require=require,
            platform=platform,
            checkpoint=checkpoint,
            select=select,
            step=options.parse_step(step),
            item=item,
            dtype=dtype,
            buckets=buckets,
        ) as servable,
    ):
        name = default_function(function, servable.signatures)
        signature = servable.signatures.get(name)
        if signature is None:
            raise UsageError(f"no function {name!r}", expected=" or ".join(sorted(servable.signatures)))
        if callers:
            one = _request_sizes(servable, name, fixed)
            report = closed_loop(
                servable,
                name,
                inputs_of(signature, Bucket.of(**one)),
                concurrencies=callers,
                seconds=seconds or 5.0,
                remote=remote,
            )
        else:
            assert isinstance(servable, LocalServable), "a URL has callers"
            several_functions = max(functions, len(servable.signatures)) > 1
            report = measure(servable, name, seconds=seconds or 1.0, gain=gain, several=several_functions, sizes=sizes)
    if json:
        print_json(report.as_json())
    else:
        out.print(report.table())
    if isinstance(report, LoadReport):
        for callers in report.bound:
            err.print(f"at {callers} callers this client was busy all the time: the server may take more", markup=False)
        raise typer.Exit(1 if report.failed else 0)
    if not json:
        out.print(f"{report.rule}:", markup=False, soft_wrap=True)
        out.print(report.bucket_options, markup=False, soft_wrap=True)


def _sizes(option: str, texts: list[str]) -> dict[str, list[int]]:
    """Sizes by dimension of `batch=1,2,4`."""
    sizes: dict[str, list[int]] = {}
    for text in texts:
        dim, equals, values = text.partition("=")
        if not equals or not dim.strip().isidentifier():
            raise UsageError(f"{option} cannot be read", seen=text, expected="batch=1,2,4")
        sizes.setdefault(dim.strip(), []).extend(_numbers(option, values))
    return sizes


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 2**31 for part in parts):
        raise UsageError(f"{option} takes positive integers", seen=text, expected="1,2,4")
    return list(dict.fromkeys(map(int, parts)))


def _request_sizes(servable: Servable, function: str, fixed: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Sizes of a request: one row, and of other dimensions what is fixed, or the largest of a bucket."""
    from servax.runtime.local import LocalServable

    signature = servable.signatures[function]
    sizes = {dim: of_dim[0] for dim, of_dim in fixed.items()}
    for dim in signature.dims:
        if dim == signature.batch:
            sizes.setdefault(dim, 1)
        elif isinstance(servable, LocalServable):
            sizes.setdefault(dim, max(bucket[dim] for bucket in servable.grid[function]))
    if missing := [dim for dim in signature.dims if dim not in sizes]:
        raise UsageError(
            f"no size is given of {', '.join(missing)}", remedy=" ".join(f"--fix {dim}=SIZE" for dim in missing)
        )
    return {dim: sizes[dim] for dim in signature.dims}
