"""Wire <-> runtime: thin, independent of one another, all on the one data plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.protocols.client import RemoteServable, connect
    from servax.protocols.dataplane import DataPlane, ModelMetadata, ModelStatus

__all__ = ["DataPlane", "ModelMetadata", "ModelStatus", "RemoteServable", "connect"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "DataPlane": "dataplane",
        "ModelMetadata": "dataplane",
        "ModelStatus": "dataplane",
        "RemoteServable": "client",
        "connect": "client",
    },
)
