"""`servax config`: which settings `servax serve` would run with, and where each comes from."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from servax.cli import options

NAME = "config"


class Action(enum.StrEnum):
    """What to do with the settings."""

    SHOW = "show"


def command(
    action: Annotated[Action, typer.Argument(help="show: every setting, its value, and where it comes from.")],
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Show the settings of serve: from a file, over SERVAX_* in the environment, over the defaults."""
    from rich.table import Table

    from servax.cli.output import out, print_json
    from servax.server.settings import resolve

    del action  # there is one
    rows = resolve({}, file=config).rows()
    if as_json:
        print_json({name: {"value": value, "from": origin} for name, value, origin in rows})
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    out.print(table)
