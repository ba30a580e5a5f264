"""The `servax` command: registers the verbs and turns errors into exit codes."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import typer

import servax
from servax.cli import bench, build, chat, choose, compile, config, demo, inspect, predict, refresh, serve, tune, verify
from servax.cli.output import fail
from servax.core.errors import ServaxError

app = typer.Typer(
    name="servax",
    help="Serve a JAX model from its Orbax checkpoint, with no compilation left for a request.\n\n"
    "Exit codes: 0 done, 1 not so, 2 usage, 3 start-up failed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (build, compile, inspect, verify, choose, serve, config, predict, chat, refresh, bench, tune, demo):
    app.command(verb.NAME)(verb.command)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Prints the version when asked; otherwise leaves the stage to a verb."""
    if version:
        print(servax.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the `servax` command."""
    # A build's and a verification's children need the accelerator's memory too; JAX reads these when it opens one.
    if len(sys.argv) > 1 and sys.argv[1] in {build.NAME, verify.NAME}:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    signal.signal(signal.SIGTERM, _terminate)
    as_json = "--json" in sys.argv
    try:
        app()
    except ServaxError as error:
        sys.exit(fail(error, as_json=as_json))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to flush has no reader
        sys.exit(1)
    except OSError as error:
        sys.exit(fail(_storage_error(error), as_json=as_json))
    except KeyboardInterrupt:
        sys.exit(130)


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like an error, so that temporary files go and children end."""
    del frame
    sys.exit(128 + number)


def _storage_error(error: OSError) -> ServaxError:
    return ServaxError(
        "reading or writing a file failed",
        where=str(error.filename) if error.filename else None,
        seen=error.strerror or str(error),
        remedy="check the path, its permissions and the free space",
    )
