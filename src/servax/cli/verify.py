"""`servax verify`: parity again, here, on this device."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json, progress

NAME = "verify"


def command(
    bundle: Annotated[str, typer.Argument(help="The bundle to verify.")],
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Only this target; repeatable.", show_default=False)
    ] = None,
    platform: options.Platform = None,
    model: Annotated[
        str | None, typer.Option("--model", help="MODEL.py:NAME, to prove jit with.", show_default=False)
    ] = None,
    parity: Annotated[
        str, typer.Option("--parity", help="corners, or full: every bucket of every target.")
    ] = "corners",
    json: options.Json = False,
) -> None:
    """Prove a bundle's wrappers on this machine; `unproven` becomes `proved`. Exits 1 if one fails."""
    from servax.workflow.verify import verify

    with progress():
        checked = verify(bundle, targets=target, platform=platform, parity=parity, model=model)
    if json:
        print_json(checked.parity.as_json())
    else:
        out.print(checked.parity)
    if checked.parity.failed:
        raise typer.Exit(1)
