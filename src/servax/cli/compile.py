"""`servax compile`: this machine's executables, from the exports."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json, progress

NAME = "compile"


def command(
    bundle: Annotated[str, typer.Argument(help="The bundle to add executables to.")],
    platform: options.Platform = None,
    json: options.Json = False,
) -> None:
    """Compile a bundle's exports for this machine, in an init container for example."""
    from servax.workflow.compile import compile_bundle

    with progress():
        added = compile_bundle(bundle, platform=platform)
    if json:
        print_json({"bundle": bundle, "fingerprint": added.fingerprint, "added": added.added, "present": added.present})
        return
    out.print(f"fingerprint {added.fingerprint}: {added.added} executables added, {added.present} already there")
