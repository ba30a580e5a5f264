"""Options that several verbs share, each defined once."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from servax.core.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="TOML with settings of serve, by the names of its options; options go before it, SERVAX_* after.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="Checkpoint: an Orbax directory (v0, v1, CheckpointManager), a safetensors or a GGUF file; "
        "local path or URL (gs://, s3://).",
        show_default=False,
    ),
]
Select = Annotated[
    str | None,
    typer.Option("--select", help="Subtree with the parameters, e.g. model or state/ema.", show_default=False),
]
Step = Annotated[
    str | None,
    typer.Option("--step", help="Step of a CheckpointManager directory: latest, best or a number.", show_default=False),
]
Item = Annotated[str | None, typer.Option("--item", help="Item of a CheckpointManager checkpoint.", show_default=False)]
DType = Annotated[
    str | None,
    typer.Option("--dtype", help="Cast floating parameters, e.g. bfloat16, while restoring.", show_default=False),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", help="Of a language model, in place of --dtype: float32, bfloat16 or int8.", show_default=False
    ),
]
Platform = Annotated[
    str | None,
    typer.Option("--platform", help="Device to run on: cpu, cuda or tpu; not started if it is absent."),
]
Buckets = Annotated[
    list[str] | None,
    typer.Option(
        "--bucket",
        help="Bucket sizes: batch=1,8 for every function, prefill:chunk=128,512 for one. Repeatable.",
        show_default=False,
    ),
]
BucketFile = Annotated[
    str | None,
    typer.Option("--bucket-file", help='JSON: {"predict": [{"batch": 1, "length": 32}, ...]}.', show_default=False),
]
Require = Annotated[
    str | None,
    typer.Option("--require", help="Start only with this wrapper (aot, export, jit), else exit 3.", show_default=False),
]


def parse_step(step: str | None) -> int | Literal["latest", "best"] | None:
    """`latest`, `best` or a number.

    Raises:
      UsageError: neither.
    """
    if step is None or step in {"latest", "best"}:
        return cast('Literal["latest", "best"] | None', step)
    if step.isdigit():
        return int(step)
    raise UsageError("--step is none of latest, best or a number", seen=step)
