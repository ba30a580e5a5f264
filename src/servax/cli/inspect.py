"""`servax inspect`: what is in a bundle."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json

NAME = "inspect"


def command(
    bundle: Annotated[str, typer.Argument(help="The bundle to look into.")],
    stablehlo: Annotated[
        str | None,
        typer.Option(
            "--stablehlo",
            help="Print the StableHLO of FUNCTION@BUCKET, e.g. predict@batch=1,length=32.",
            show_default=False,
        ),
    ] = None,
    diff: Annotated[
        str | None, typer.Option("--diff", help="Show what differs from this other bundle.", show_default=False)
    ] = None,
    json: options.Json = False,
) -> None:
    """Show signatures, buckets, stages, cost, memory, versions and expiry of a bundle."""
    from servax.workflow import inspect as workflow

    if stablehlo is not None:
        sys.stdout.write(workflow.stablehlo(bundle, stablehlo) + "\n")
    elif diff is not None:
        differences = workflow.diff(bundle, diff)
        if json:
            print_json([{"what": each.what, "here": each.here, "other": each.other} for each in differences])
        elif not differences:
            out.print("no difference")
        else:
            out.print(workflow.difference_table(differences))
    elif json:
        print_json(workflow.manifest_json(bundle))
    else:
        for part in workflow.report(bundle):
            out.print(part)
