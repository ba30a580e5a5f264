import asyncio
import contextlib

import grpc
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc

import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.grpc import GrpcServer


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


@contextlib.asynccontextmanager
async def serving(plane, **options):
    server = GrpcServer(plane, host="127.0.0.1", port=0, **options)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def test_it_lives_at_a_free_port(servable):
    async def main():
        async with serving(DataPlane([servable])) as address:
            return await asyncio.to_thread(lambda: triton.InferenceServerClient(address).is_server_live())

    assert asyncio.run(main())


def test_health_names_the_server_a_service_or_a_model(servable):
    async def main():
        async with serving(DataPlane([servable])) as address, grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            return [
                (await check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("", "inference.GRPCInferenceService", "toy")
            ]

    assert asyncio.run(main()) == [health_pb2.HealthCheckResponse.SERVING] * 3
