"""`servax refresh`: the next version of a stored model, with new weights."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json, progress
from servax.core.errors import UsageError
from servax.core.table import bytes_text

NAME = "refresh"


def command(
    model: Annotated[str, typer.Argument(help="STORE/NAME: the model's directory, with its versions.")],
    checkpoint: options.Checkpoint = None,
    select: options.Select = None,
    step: options.Step = None,
    item: options.Item = None,
    base: Annotated[
        int | None,
        typer.Option("--base", min=0, help="Version whose programs are taken; the newest.", show_default=False),
    ] = None,
    platform: options.Platform = None,
    no_executables: Annotated[
        bool, typer.Option("--no-executables", help="Load no native code: no drift, and no golden samples.")
    ] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Take weights with NaN or infinity where the old ones are finite.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Make the next version from the same programs and new weights, without source or a compilation."""
    from servax.workflow.refresh import refresh

    if checkpoint is None:
        raise UsageError("refresh needs the new weights", remedy="servax refresh STORE/NAME --checkpoint runs/gpt")
    with progress():
        made = refresh(
            model,
            checkpoint=checkpoint,
            select=select,
            step=options.parse_step(step),
            item=item,
            base=base,
            platform=platform,
            executables=not no_executables,
            allow_nonfinite=allow_nonfinite,
        )
    if json:
        print_json(
            {
                "bundle": str(made.bundle.root),
                "version": made.version,
                "leaves": made.leaves,
                "bytes": made.bytes,
                **made.record.model_dump(mode="json", exclude={"version"}),
                "programs_of": made.record.version,
            }
        )
        return
    finite = "all finite" if made.record.finite else "not all finite"
    out.print(f"version {made.version}: {made.leaves} leaves, {bytes_text(made.bytes)}, {finite}", soft_wrap=True)
    for function, drift in made.record.drift.items():
        moved = "are not finite any more, or are again" if drift is None else f"moved by {drift:.3g} of their scale"
        out.print(f"answers of {function} {moved}", soft_wrap=True)
    out.print(f"bundle: {made.bundle.root}", soft_wrap=True)
