"""The benchmark's requests, answers and numbers, against other implementations of the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.http

from measure import models, page, wires
from measure.load import Outcome
from network import Jitted
from serving import Traffic, summary


@pytest.mark.parametrize("model", ["mlp", "encoder"])
def test_numpy_and_jax_agree(model: str, tmp_path: object) -> None:
    network = Jitted(model, str(models.parameters_file(model, tmp_path)))
    params = models.parameters(model)
    for given in models.requests(model, 3, rows=(1, 3)):
        np.testing.assert_allclose(getattr(network, model)(given), models.answer(model, params, given), atol=1e-4)


def test_requests_cover_the_lengths() -> None:
    lengths = [given.shape[1] for given in models.requests("encoder", 256)]
    assert (min(lengths), max(lengths)) == (5, 128)
    assert abs(np.mean(lengths) - (5 + 128) / 2) < 0.5


@pytest.mark.parametrize("binary", [False, True])
def test_requests_are_those_of_tritonclient(binary: bool) -> None:
    model, given = models.MODELS["encoder"], np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = tritonclient.http.InferInput("tokens", [2, 3], "INT32")
    tensor.set_data_from_numpy(given, binary_data=binary)
    outputs = None if binary else [tritonclient.http.InferRequestedOutput("output", binary_data=False)]
    theirs, size = tritonclient.http.InferenceServerClient.generate_request_body([tensor], outputs=outputs)
    wire = wires.V2_BINARY if binary else wires.V2_JSON
    ours = wire.encode(model, given)
    end = int(wire.headers(model, given).get("Inference-Header-Content-Length", len(ours)))
    their_end = len(theirs) if size is None else size
    assert json.loads(ours[:end])["inputs"] == json.loads(theirs[:their_end])["inputs"]
    assert ours[end:] == theirs[their_end:]


def test_binary_answers_are_read() -> None:
    header = {
        "outputs": [
            {"name": "output", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        ],
        "model_name": "mlp",
    }
    body = json.dumps(header).encode() + np.array([1.5, -2.0], np.float32).tobytes()
    assert wires.V2_BINARY.decode(body).tolist() == [[1.5, -2.0]]


def test_percentiles_and_wrong_answers() -> None:
    traffic = Traffic("mlp", [np.zeros((1, 2), np.float32)], [np.array([[1.0, 2.0]])])
    answers = [b'{"output": [[1.0, 2.0]]}', b'{"output": [[1.0, 2.1]]}', b'{"output": [1.0, 2.0]}', b"{}"]
    outcome = Outcome(
        latencies=[index / 100 for index in range(101)],  # 0.00 to 1.00: the percentile is the value
        errors={},
        seconds=2.0,
        client=0.5,
        server=1.01,
        others=0.0,
        kept=[(0, body) for body in answers],
    )
    numbers = summary(outcome, wires.ROWS, traffic)
    assert numbers["rate"] == 50.5
    assert numbers["p50"] == pytest.approx(0.5)
    assert numbers["p99"] == pytest.approx(0.99)
    assert numbers["cpu"] == pytest.approx(0.01)
    assert (numbers["checked"], numbers["wrong"]) == (4, 3)
    assert numbers["fault"] == "off by 1.0e-01"


def test_the_page_shows_the_newest_results() -> None:
    text = page.PAGE.read_text()
    assert text == page.written(text, json.loads(page.newest().read_text())), "PYTHONPATH=bench python -m measure.page"
