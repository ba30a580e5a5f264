"""What the KServe SDK's inference clients get: `python kserve_client.py HTTP_URL GRPC_ADDRESS`, answers as JSON.

It runs where the SDK is installed, and servax is not.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

URL, ADDRESS = sys.argv[1:]
ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def request(*, form: str, **rest) -> InferRequest:
    x = InferInput("x", list(ROWS.shape), "FP32")
    if form == "list":
        x = InferInput("x", list(ROWS.shape), "FP32", ROWS.ravel().tolist())
    else:
        x.set_data_from_numpy(ROWS, binary_data=form == "binary")
    return InferRequest("toy", [x], **rest)


def told(response) -> dict:
    (y,) = response.outputs
    array = y.as_numpy()
    return {
        "id": response.id,
        "model": response.model_name,
        "dtype": array.dtype.name,
        "y": array.tolist(),
    }


async def rest(answers: dict) -> None:
    async with InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=60)) as client:
        answers["rest ready"] = await client.is_server_ready(URL)
        answers["rest live"] = await client.is_server_live(URL)
        answers["rest model"] = await client.is_model_ready(URL, "toy")
        answers["rest no model"] = await client.is_model_ready(URL, "nope")
        for form in ("list", "json", "binary"):
            answers[f"rest {form}"] = told(await client.infer(URL, request(form=form, request_id="seven"), "toy"))
        # The SDK makes an id where there is none; what is sent by hand has none.
        answers["rest made id"] = told(await client.infer(URL, request(form="json"), "toy"))
        body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": ROWS.tolist()}]}
        answers["rest no id"] = await client.infer(f"{URL}/v2/models/toy/infer", body, is_graph_endpoint=True)
        try:
            await client.infer(URL, request(form="json"), "nope")
        except Exception as error:
            answers["rest error"] = str(error)
    async with InferenceRESTClient(RESTConfig(protocol="v1", retries=0, timeout=60)) as client:
        answers["v1"] = await client.infer(URL, {"instances": ROWS.tolist()}, "toy")


async def grpc(answers: dict) -> None:
    async with InferenceGRPCClient(ADDRESS, retries=0, timeout=60) as client:
        answers["grpc ready"] = await client.is_server_ready()
        answers["grpc live"] = await client.is_server_live()
        answers["grpc model"] = await client.is_model_ready("toy")
        for form in ("list", "json", "binary"):
            answers[f"grpc {form}"] = told(await client.infer(request(form=form, request_id="seven")))
        answers["grpc no id"] = told(await client.infer(request(form="binary")))
        try:
            await client.infer(InferRequest("nope", request(form="binary").inputs))
        except Exception as error:
            answers["grpc error"] = error.code().name


async def main() -> None:
    answers: dict = {}
    await rest(answers)
    await grpc(answers)
    print(json.dumps(answers))


asyncio.run(main())
