"""A service as a server takes it: its methods, and the files that describe it to reflection."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from servax.protocols.grpc.messages import Messages


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service.

    Attributes:
      name: its full name, e.g. `inference.GRPCInferenceService`.
      handler: finds its methods.
      messages: of its `.proto` file.
    """

    name: str
    handler: grpc.GenericRpcHandler
    messages: Messages
