"""The server as clients see it: Triton's unmodified, the health service's and reflection's own stubs."""

import asyncio
import contextlib
import queue
import socket

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.utils import InferenceServerException

import serving_toys as toys
from echo_servable import EchoServable
from servax.core.errors import StartupError, Unauthorized
from servax.protocols.dataplane import DataPlane
from servax.protocols.open_inference.grpc import schema
from servax.server.grpc import GrpcServer

STATUS = health_pb2.HealthCheckResponse
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


@contextlib.asynccontextmanager
async def serving(source, *, host="127.0.0.1", grace=0.0, **options):
    plane = source if isinstance(source, DataPlane) else DataPlane([source])
    server = GrpcServer(plane, host=host, port=0, **options)
    port = await server.start()
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await server.stop(grace)


def x(*rows, datatype="FP32", dtype=np.float32):
    array = np.array(rows, dtype)
    tensor = triton.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def raw_request(**changes):
    messages = schema()
    fields = {"model_name": "toy", "raw_input_contents": [np.float32([1, 2]).tobytes()]} | changes
    fields.setdefault("inputs", [{"name": "x", "datatype": "FP32", "shape": [1, 2]}])
    return messages["inference.ModelInferRequest"](**fields)


async def infer(address, request, **options):
    """One ModelInfer, by a channel that knows nothing of ours but the bytes."""
    response = schema()["inference.ModelInferResponse"]
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER, type(request).SerializeToString, response.FromString)
        return await call(request, **options)


async def refused(address, request, **options):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await infer(address, request, **options)
    return caught.value


def test_tritons_client_infers_and_asks(servable):
    def client(address):
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("toy", "1")
            metadata = client.get_model_metadata("toy", as_json=True)
            assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "-1"]}]
            assert client.get_server_metadata().name == "servax"
            config = client.get_model_config("toy").config
            assert (config.max_batch_size, [tensor.name for tensor in config.output]) == (4, ["y"])
            assert [model.name for model in client.get_model_repository_index().models] == ["toy"]
            result = client.infer("toy", [x([1, 2, 3])], request_id="seven", outputs=[triton.InferRequestedOutput("y")])
            assert result.as_numpy("y").tolist() == [[3, 5, 7]]
            assert result.get_response().id == "seven"
            packed = client.infer("toy", [x([1, 2, 3])], compression_algorithm="gzip")
            assert packed.as_numpy("y").tolist() == [[3, 5, 7]]
            total = client.infer(
                "toy", [x([1, 2, 3])], parameters={"function": "total"}, priority=2, timeout=10_000_000
            )
            assert total.as_numpy("sum").tolist() == [6]
            return client.get_inference_statistics("toy", "1").model_stats[0]

    async def main():
        async with serving(servable) as address:
            return await asyncio.to_thread(client, address)

    statistics = asyncio.run(main())
    assert statistics.inference_count == statistics.inference_stats.success.count == 3
    assert statistics.inference_stats.compute_infer.ns > 0


def test_the_configuration_of_dtypes_that_triton_has_not():
    servable = EchoServable("odd")
    servable.signatures["predict"] = servable.signatures["odd"]

    def client(address):
        with triton.InferenceServerClient(address) as client:
            return client.get_model_config("odd").config

    async def main():
        async with serving(servable) as address:
            return await asyncio.to_thread(client, address)

    config = asyncio.run(main())
    assert [triton.model_config_pb2.DataType.Name(tensor.data_type) for tensor in (*config.input, *config.output)] == [
        "TYPE_FP32",
        "TYPE_INVALID",
    ]


def test_tritons_aio_client_and_many_at_once(servable):
    async def main():
        async with serving(servable) as address, triton_aio.InferenceServerClient(address) as client:
            results = await asyncio.gather(*(client.infer("toy", [x([k, k])]) for k in range(40)))
            return [result.as_numpy("y")[0, 0] for result in results]

    assert asyncio.run(main()) == [2 * k + 1 for k in range(40)]


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        (lambda client: client.infer("nothing", [x([1])]), "NOT_FOUND", "no model 'nothing'"),
        (lambda client: client.infer("toy", [x([1])], model_version="9"), "NOT_FOUND", "no version '9'"),
        (lambda client: client.get_model_metadata("nothing"), "NOT_FOUND", "no model 'nothing'"),
        (lambda client: client.infer("toy", []), "INVALID_ARGUMENT", "at x; seen missing"),
        (
            lambda client: client.infer("toy", [x([1], datatype="INT32", dtype=np.int32)]),
            "INVALID_ARGUMENT",
            "at x; seen int32[1, 1]; expected float32[batch, length]",
        ),
        (
            lambda client: client.infer("toy", [x([1])], outputs=[triton.InferRequestedOutput("q")]),
            "INVALID_ARGUMENT",
            "no such outputs; at outputs; seen q; expected y",
        ),
        (
            lambda client: client.infer("toy", [x([1])], outputs=[triton.InferRequestedOutput("y", class_count=2)]),
            "INVALID_ARGUMENT",
            "classification",
        ),
        (lambda client: client.infer("toy", [x(list(range(99)))]), "OUT_OF_RANGE", "length"),
        (lambda client: client.infer("toy", [x([1])], parameters={"function": 3}), "INVALID_ARGUMENT", "not a name"),
        (lambda client: client.load_model("toy"), "INVALID_ARGUMENT", "--control explicit"),
        (lambda client: client.get_system_shared_memory_status(), "UNIMPLEMENTED", "no shared memory extension"),
        (lambda client: client.get_trace_settings(), "UNIMPLEMENTED", "no trace extension"),
        (lambda client: client.get_log_settings(), "UNIMPLEMENTED", "no logging extension"),
    ],
)
def test_errors_have_the_status_and_say_what_was_seen(servable, call, status, message):
    def client(address):
        with triton.InferenceServerClient(address) as client, pytest.raises(InferenceServerException) as caught:
            call(client)
        return caught.value

    async def main():
        async with serving(servable) as address:
            return await asyncio.to_thread(client, address)

    error = asyncio.run(main())
    assert error.status() == f"StatusCode.{status}"
    assert message in error.message()


def test_a_stream_answers_each_request_with_its_id(servable):
    def client(address):
        answers = queue.Queue()
        with triton.InferenceServerClient(address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for name in ("a", "b", "c", "d"):
                client.async_stream_infer("toy" if name != "c" else "nothing", [x([1])], request_id=name)
            return [answers.get(timeout=30) for _ in range(4)]

    async def main():
        async with serving(servable) as address:
            return await asyncio.to_thread(client, address)

    answers = asyncio.run(main())
    results = {result.get_response().id: result for result, error in answers if error is None}
    assert sorted(results) == ["a", "b", "d"]
    assert results["a"].as_numpy("y").tolist() == [[3]]
    assert results["a"].get_response().parameters["triton_final_response"].bool_param
    (error,) = [error for _, error in answers if error is not None]
    assert "no model 'nothing'" in error.message()


def test_a_streams_answers_come_in_order_of_completion():
    async def main():
        servable, held = toys.held_toy()
        messages = schema()
        request, answer = messages.methods("inference.GRPCInferenceService")["ModelStreamInfer"]
        with servable:
            async with serving(servable, grace=5) as address, grpc.aio.insecure_channel(address) as channel:
                stream = channel.stream_stream(
                    "/inference.GRPCInferenceService/ModelStreamInfer", request.SerializeToString, answer.FromString
                )()
                await stream.write(raw_request(id="held"))
                await asyncio.to_thread(held.entered.wait)
                await stream.write(raw_request(id="wrong", model_name="nothing"))
                first = await stream.read()
                held.release.set()
                second = await stream.read()
                await stream.done_writing()
                assert await stream.read() is grpc.aio.EOF
                assert await stream.code() is grpc.StatusCode.OK
        return first, second

    first, second = asyncio.run(main())
    assert (first.infer_response.id, first.infer_response.model_name) == ("wrong", "nothing")
    assert "no model 'nothing'" in first.error_message
    assert (second.infer_response.id, second.error_message) == ("held", "")


def test_a_stream_may_ask_for_errors_as_its_status(servable):
    async def main():
        request, answer = schema().methods("inference.GRPCInferenceService")["ModelStreamInfer"]
        async with serving(servable) as address, grpc.aio.insecure_channel(address) as channel:
            stream = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer", request.SerializeToString, answer.FromString
            )(metadata=(("triton_grpc_error", "true"),))
            await stream.write(raw_request(model_name="nothing"))
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
            return await stream.code()

    assert asyncio.run(main()) is grpc.StatusCode.NOT_FOUND


def test_a_deadline_passes_in_the_queue_and_a_client_that_cancels_takes_its_request_out():
    async def main():
        servable, held = toys.held_toy()
        with servable:
            async with serving(servable, grace=5) as address:
                running = asyncio.create_task(infer(address, raw_request()))
                await asyncio.to_thread(held.entered.wait)
                late = await refused(address, raw_request(), timeout=0.2)
                own = await refused(address, raw_request(parameters={"timeout": {"int64_param": 1000}}))
                gone = asyncio.create_task(infer(address, raw_request()))
                while servable.in_flight < 2:
                    await asyncio.sleep(0)
                gone.cancel()
                while servable.in_flight > 1:
                    await asyncio.sleep(0)
                held.release.set()
                answer = await running
        return late, own, answer

    late, own, answer = asyncio.run(main())
    assert late.code() is own.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the deadline passed while the request waited" in own.details()
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw_input_contents": [b"1234567"]}, "at x; seen 7 bytes; expected 8 for FP32 of shape [1, 2]"),
        ({"raw_input_contents": [b"", b""]}, "seen 2 for 1 inputs"),
        ({"raw_input_contents": []}, "at x; seen 0 values; expected 2 for shape [1, 2]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -2]}]}, "seen shape [-1, -2]"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2**62, 2**62]}]}, "wrong number of bytes"),
        ({"inputs": [{"name": "x", "datatype": "FP99", "shape": [1, 2]}]}, "unknown datatype; at x; seen FP99"),
        (
            {"inputs": [{"name": "n" * 5000, "datatype": "FP32", "shape": [1, 2]}]},
            "seen x: missing; " + "n" * 97 + "...: unknown",
        ),
        ({"model_name": "\u2603" * 5000}, "there is no model"),
        (
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "contents": {"fp32_contents": [1, 2]}}]},
            "typed contents beside raw ones",
        ),
        (
            {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2]}] * 2,
                "raw_input_contents": [b"12345678"] * 2,
            },
            "was sent twice",
        ),
    ],
)
def test_hostile_messages_are_refused_by_name(servable, changes, message):
    async def main():
        async with serving(servable) as address:
            error = await refused(address, raw_request(**changes))
            assert (await infer(address, raw_request())).raw_output_contents  # unharmed
            return error

    error = asyncio.run(main())
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert message in error.details()


def test_bytes_that_are_no_message_are_refused(servable):
    async def main():
        async with serving(servable) as address, grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(INFER)(b"\xff" * 100)
            assert (await infer(address, raw_request())).raw_output_contents
            return caught.value

    assert asyncio.run(main()).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_over_the_limit_is_refused_whether_packed_or_not(servable):
    async def main():
        async with serving(servable, max_body=1 << 20) as address:
            large = raw_request(raw_input_contents=[bytes(1 << 22)])
            plain = await refused(address, large)
            packed = await refused(address, large, compression=grpc.Compression.Gzip)
            assert (await infer(address, raw_request())).raw_output_contents
            return plain, packed

    for error in asyncio.run(main()):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in error.details()


def test_health_names_the_server_a_service_or_a_model(servable):
    async def main():
        async with serving(servable) as address, grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            names = ("", "inference.GRPCInferenceService", "toy")
            known = [(await check(health_pb2.HealthCheckRequest(service=name))).status for name in names]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(health_pb2.HealthCheckRequest(service="nothing"))
            return known, caught.value.code()

    assert asyncio.run(main()) == ([STATUS.SERVING] * 3, grpc.StatusCode.NOT_FOUND)


def test_who_watches_is_told_of_each_change_and_of_the_end():
    async def main():
        plane = DataPlane()
        server = GrpcServer(plane, host="127.0.0.1", port=0)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="toy"))
            seen = [(await watching.read()).status]
            with toys.toy() as servable:
                plane.add(servable)
                seen.append((await watching.read()).status)
                servable.warm()
                seen.append((await watching.read()).status)
                stopping = asyncio.create_task(server.stop(30))
                seen.append((await watching.read()).status)
                assert await watching.read() is grpc.aio.EOF
                await stopping
        return seen

    assert asyncio.run(main()) == [STATUS.SERVICE_UNKNOWN, STATUS.NOT_SERVING, STATUS.SERVING, STATUS.NOT_SERVING]


def test_reflection_lists_and_describes_the_services(servable):
    def client(address):
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
            return set(database.get_services()), [method.name for method in file.service[0].method]

    async def main():
        async with serving(servable) as address:
            return await asyncio.to_thread(client, address)

    services, methods = asyncio.run(main())
    assert services >= {
        "inference.GRPCInferenceService",
        "tensorflow.serving.PredictionService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert {"ModelInfer", "ModelStreamInfer"} <= set(methods)


def test_a_method_that_there_is_not(servable):
    async def main():
        async with serving(servable) as address, grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"")
            return caught.value

    error = asyncio.run(main())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "/inference.GRPCInferenceService/Nothing" in error.details()


def test_every_kind_of_call_is_authorized_before_its_message_is_read(servable):
    def authorize(method, metadata):
        if metadata.get("authorization") != "Bearer right":
            raise Unauthorized("the key is missing", where=method)

    async def main():
        async with serving(servable, authorize=authorize) as address, grpc.aio.insecure_channel(address) as channel:
            unary = await refused(address, raw_request())
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
            answer = await infer(address, raw_request(), metadata=(("authorization", "Bearer right"),))
            return unary, await stream.code(), answer

    unary, stream, answer = asyncio.run(main())
    assert unary.code() is stream is grpc.StatusCode.UNAUTHENTICATED
    assert f"the key is missing; at {INFER}" in unary.details()
    assert answer.raw_output_contents


def test_tls_and_client_certificates(servable):
    authority = trustme.CA()
    server = authority.issue_cert("localhost", "127.0.0.1")
    client = authority.issue_cert("client@example.org")
    root = authority.cert_pem.bytes()
    chain = b"".join(pem.bytes() for pem in server.cert_chain_pems)
    pair = ((server.private_key_pem.bytes(), chain),)
    known = grpc.ssl_channel_credentials(
        root, client.private_key_pem.bytes(), b"".join(pem.bytes() for pem in client.cert_chain_pems)
    )
    anonymous = grpc.ssl_channel_credentials(root)

    async def ask(address, credentials):
        async with grpc.aio.secure_channel(address, credentials) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            return await live(b"")

    async def main():
        async with serving(servable, credentials=grpc.ssl_server_credentials(pair)) as address:
            assert await ask(address, anonymous) == b"\x08\x01"
            assert (await refused(address, raw_request())).code() is grpc.StatusCode.UNAVAILABLE  # plain text
        mutual = grpc.ssl_server_credentials(pair, root, require_client_auth=True)
        async with serving(servable, credentials=mutual) as address:
            assert await ask(address, known) == b"\x08\x01"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(address, anonymous)
            return caught.value.code()

    assert asyncio.run(main()) is grpc.StatusCode.UNAVAILABLE


def test_it_listens_at_an_address_of_ipv6(servable):
    async def main():
        async with serving(servable, host="::1") as address:
            return await infer(address, raw_request())

    assert asyncio.run(main()).model_name == "toy"


def test_a_port_that_is_taken_is_an_error(servable):
    async def main():
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(StartupError, match="the port is taken"):
                await GrpcServer(DataPlane([servable]), host="127.0.0.1", port=other.getsockname()[1]).start()

    asyncio.run(main())


@pytest.mark.parametrize("abort_before", [False, True])
def test_stopping_waits_for_calls_in_progress_and_does_not_hang(abort_before):
    """An abort before the stop: grpc#37239."""

    async def main():
        servable, held = toys.held_toy()
        with servable:
            server = GrpcServer(DataPlane([servable]), host="127.0.0.1", port=0)
            address = f"127.0.0.1:{await server.start()}"
            if abort_before:
                await refused(address, raw_request(model_name="nothing"))
            running = asyncio.create_task(infer(address, raw_request()))
            await asyncio.to_thread(held.entered.wait)
            stopping = asyncio.create_task(server.stop(60))
            refusal = await refused(address, raw_request())
            assert not stopping.done()
            held.release.set()
            answer = await running
            await asyncio.wait_for(stopping, 60)
        return answer, refusal

    answer, refusal = asyncio.run(main())
    assert answer.raw_output_contents
    assert refusal.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # by where it was


def test_stopping_ends_a_stream_that_is_open_and_a_call_that_outlives_the_grace():
    async def main():
        servable, held = toys.held_toy()
        request, answer = schema().methods("inference.GRPCInferenceService")["ModelStreamInfer"]
        with servable:
            server = GrpcServer(DataPlane([servable]), host="127.0.0.1", port=0)
            address = f"127.0.0.1:{await server.start()}"
            async with grpc.aio.insecure_channel(address) as channel:
                stream = channel.stream_stream(
                    "/inference.GRPCInferenceService/ModelStreamInfer", request.SerializeToString, answer.FromString
                )()
                await stream.write(raw_request(model_name="nothing"))
                await stream.read()  # it is open
                running = asyncio.create_task(refused(address, raw_request()))
                await asyncio.to_thread(held.entered.wait)
                await asyncio.wait_for(server.stop(0.1), 60)
                held.release.set()
                return await stream.code(), (await running).code()

    stream, outlived = asyncio.run(main())
    assert stream is grpc.StatusCode.UNAVAILABLE
    assert outlived in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
