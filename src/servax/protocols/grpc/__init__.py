"""What every gRPC service of ours shares: messages of a private pool, calls, errors as statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servax.core.lazy import exports

if TYPE_CHECKING:
    from servax.protocols.grpc.calls import absent, answering, time_limit
    from servax.protocols.grpc.messages import Messages
    from servax.protocols.grpc.service import Service
    from servax.protocols.grpc.status import abort, code_of

__all__ = ["Messages", "Service", "abort", "absent", "answering", "code_of", "time_limit"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "Messages": "messages",
        "Service": "service",
        "abort": "status",
        "absent": "calls",
        "answering": "calls",
        "code_of": "status",
        "time_limit": "calls",
    },
)
