"""`servax choose`: which wrapper for which deployment."""

from __future__ import annotations

from typing import Annotated

import typer

from servax.cli import options
from servax.cli.output import out, print_json

NAME = "choose"


def command(
    subject: Annotated[str, typer.Argument(help="A bundle, or MODEL.py:NAME.")],
    deployment: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="python (a Python service), startup (predictable start-up), platform (another platform), "
            "tensorflow (TensorFlow Serving). Default: all four.",
            show_default=False,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Say which wrapper serves which deployment, why, and what stands in its way on this machine."""
    from servax.workflow.choose import choose, text

    choices = choose(subject, deployment)
    if json:
        print_json([choice.as_json() for choice in choices])
    else:
        out.print(text(choices), soft_wrap=True, markup=False)
