"""The KServe SDK's inference clients, unchanged, in an environment of their own."""

import json
import subprocess
from pathlib import Path

import pytest

import serving_toys as toys
from environments import environment
from servax.server.background import serve

Y = [[3.0, 5.0, 7.0], [9.0, 11.0, 13.0]]  # 2 x + 1


@pytest.fixture(scope="module")
def answers():
    python = environment("kserve", "kserve==0.21.0")
    with toys.toy().warm() as servable, serve(servable, port=0, grpc_port=0) as server:
        command = [str(python), str(Path(__file__).with_name("kserve_client.py")), server.url, server.grpc]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("wire", ["rest", "grpc"])
@pytest.mark.parametrize("form", ["list", "json", "binary"])
def test_numbers_over_every_wire_and_form(answers, wire, form):
    answer = answers[f"{wire} {form}"]
    assert answer == {"id": "seven", "model": "toy", "dtype": "float32", "y": Y}


def test_requests_need_no_id(answers):
    assert answers["rest made id"]["y"] == answers["grpc no id"]["y"] == Y
    assert answers["rest made id"]["id"]
    assert answers["rest no id"]["outputs"][0]["data"] == [value for row in Y for value in row]


def test_readiness(answers):
    for asked in ("rest ready", "rest live", "rest model", "grpc ready", "grpc live", "grpc model"):
        assert answers[asked] is True, asked
    assert answers["rest no model"] is False


def test_errors_are_told(answers):
    assert "404" in answers["rest error"]
    assert "'nope'" in answers["rest error"]
    assert answers["grpc error"] == "NOT_FOUND"


def test_its_first_protocol_is_tensorflow_servings(answers):
    assert answers["v1"] == {"predictions": Y}
