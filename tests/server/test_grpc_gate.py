import asyncio
import io

import grpc
import pytest

import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.access_log import AccessLog
from servax.server.auth import Access, Keys, KeySources
from servax.server.grpc import GrpcServer
from servax.server.grpc_gate import GrpcGate

KEY = "k" * 16
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


def lines_of(servable, *calls: tuple[str, str, tuple[tuple[str, str], ...]]) -> tuple[list[str], dict[str, int]]:
    """The access log after calls: a kind, a method and metadata each."""
    stream, responses = io.StringIO(), dict[str, int]()

    async def scene() -> None:
        log = AccessLog(stream)
        gate = GrpcGate(access=Access(Keys(KeySources(key=KEY))), log=log, responses=responses)
        server = GrpcServer(DataPlane([servable]), host="127.0.0.1", port=0, authorize=gate.authorize, wrap=gate.wrap)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for kind, method, metadata in calls:
                try:
                    if kind == "unary":
                        await channel.unary_unary(method)(b"", metadata=metadata, timeout=60)
                    else:
                        stream_call = channel.stream_stream(method)(iter([]), metadata=metadata, timeout=60)
                        async for _ in stream_call:
                            pass
                except grpc.RpcError:
                    pass
        await server.stop(5)
        log.flush()

    asyncio.run(scene())
    return stream.getvalue().splitlines(), responses


KEYED = (("authorization", f"Bearer {KEY}"), ("x-request-id", "r1"))


def test_a_call_has_a_line_with_its_code_and_without_its_key(servable):
    (line,), responses = lines_of(servable, ("unary", f"{SERVICE}/ServerMetadata", KEYED))
    assert " event=request id=r1 client=127.0.0.1 key=api method=gRPC " in line
    assert f" path={SERVICE}/ServerMetadata status=OK ms=" in line
    assert KEY not in line
    assert responses == {"OK": 1}


@pytest.mark.parametrize(("given", "back"), [("r1", ["r1"]), ("r 1", []), (None, [])])
def test_an_id_comes_back_with_the_status(servable, given, back):
    async def scene() -> list[list[str]]:
        gate = GrpcGate(access=None, log=None, responses={})
        server = GrpcServer(DataPlane([servable]), host="127.0.0.1", port=0, wrap=gate.wrap)
        port = await server.start()
        found = list[list[str]]()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            metadata = () if given is None else (("x-request-id", given),)
            for method in ("ServerMetadata", "ModelInfer"):  # one is answered, one refused
                call = channel.unary_unary(f"{SERVICE}/{method}")(b"", metadata=metadata, timeout=60)
                await call.code()
                found.append([value for key, value in await call.trailing_metadata() if key == "x-request-id"])
        await server.stop(5)
        return found

    assert asyncio.run(scene()) == [back, back]


def test_errors_and_refusals_have_theirs(servable):
    (failed, refused), responses = lines_of(
        servable,
        ("unary", f"{SERVICE}/ModelInfer", KEYED),
        ("unary", f"{SERVICE}/ServerLive", (("x-api-key", "nope" * 4),)),
    )
    assert " status=NOT_FOUND " in failed or " status=INVALID_ARGUMENT " in failed
    assert " status=UNAUTHENTICATED " in refused
    assert "nope" not in refused
    assert responses["UNAUTHENTICATED"] == 1


def test_probes_have_none(servable):
    lines, responses = lines_of(
        servable, *(("unary", each, KEYED) for each in (f"{SERVICE}/ServerReady", "/grpc.health.v1.Health/Check"))
    )
    assert lines == []
    assert responses == {"OK": 2}


def test_a_stream_has_one_when_it_ends(servable):
    (line,), _ = lines_of(servable, ("stream", f"{SERVICE}/ModelStreamInfer", KEYED))
    assert "ModelStreamInfer status=OK " in line
    refused, _ = lines_of(servable, ("stream", f"{SERVICE}/ModelStreamInfer", ()))
    assert " status=UNAUTHENTICATED " in refused[0]
