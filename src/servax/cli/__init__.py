"""The command line: one verb a file, each a thin shell around the same function in Python."""

from servax.cli.app import main

__all__ = ["main"]
