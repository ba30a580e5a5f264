"""The verbs, each a list of named steps: build, load, verify, compile, swap, choose, inspect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.workflow.build import build as build
    from servax.workflow.choose import choose as choose
    from servax.workflow.compile import compile_bundle as compile_bundle
    from servax.workflow.extend import extend as extend
    from servax.workflow.load import load_bundle as load_bundle
    from servax.workflow.load import load_model as load_model
    from servax.workflow.refresh import refresh as refresh
    from servax.workflow.store import open_store as open_store
    from servax.workflow.verify import verify as verify

__getattr__, __dir__ = exports(
    __name__,
    {
        "build": "build",
        "choose": "choose",
        "compile_bundle": "compile",
        "extend": "extend",
        "load_bundle": "load",
        "load_model": "load",
        "open_store": "store",
        "refresh": "refresh",
        "verify": "verify",
    },
)
