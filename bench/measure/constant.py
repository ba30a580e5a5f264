"""A server that answers every request with the same bytes: what is left to measure is the load generator.

Over HTTP it is a bare protocol on uvloop. Over gRPC it is a generic handler of `grpc.aio`, so there the limit is that
library's, not the load generator's.

    python -m measure.constant http|grpc PORT
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

_BODY = (
    b'{"model_name":"mlp","outputs":[{"name":"output","shape":[1,10],"datatype":"FP32","data":['
    + b"0.5," * 9
    + b"0.5]}]}"
)
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Constant(asyncio.Protocol):
    """Counts bytes of requests and answers each."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if not self._left:
            end = data.index(b"\r\n\r\n")
            found = _LENGTH.search(data, 0, end)
            assert found is not None
            self._left = end + 4 + int(found[1])
        self._left -= len(data)
        if not self._left:
            self._transport.write(_ANSWER)


async def http(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Constant, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


async def grpc(port: int) -> None:
    import grpc

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(answer)

    async def answer(request: bytes, context: object) -> bytes:
        return b"\x0a\x03mlp" * 12

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    kind, port = sys.argv[1:]
    uvloop.run({"http": http, "grpc": grpc}[kind](int(port)))


if __name__ == "__main__":
    main()
