import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.background import serve
from servax.server.openapi import describe


@pytest.fixture(scope="module")
def operations():
    """What the document of a running server describes."""
    with toys.toy().warm() as servable, serve(servable, port=0) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        yield [result.ok() for result in schema.get_all_operations()]


MODEL = ("", "/ready", "/config", "/stats", "/infer")


def test_every_route_is_described():
    with toys.toy() as servable:
        document = describe(DataPlane([servable]), "1.2", metrics=True)
    assert document["info"] == {"title": "servax", "version": "1.2"}
    assert set(document["paths"]) == {
        "/",
        "/metrics",
        "/openapi.json",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/stats",
        "/v2/repository/index",
        *(f"/v2/models/toy{path}" for path in MODEL),
        *(f"/v2/models/toy/versions/1{path}" for path in MODEL),
        "/health",
        "/v1/models",
        "/v1/models/toy",
        "/v1/models/toy/metadata",
        "/v1/models/toy:predict",
    }
    answers = document["paths"]["/v2/models/toy/infer"]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "500", "503", "504"} <= set(answers)


@settings(
    max_examples=250,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_schemathesis_finds_nothing(operations, data):
    operation = data.draw(st.sampled_from(operations))
    mode = data.draw(st.sampled_from([GenerationMode.POSITIVE, GenerationMode.NEGATIVE]))
    try:
        case = data.draw(operation.as_strategy(generation_mode=mode))
    except Unsatisfiable:  # an operation without anything that could be wrong
        return
    if mode is GenerationMode.POSITIVE and case.headers:  # nobody keeps a deadline of no time, and says so by 504
        case.headers.pop("Request-Timeout-Ms", None)
    # How many values `data` hold is a product of the sizes in `shape`: no JSON schema says that.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
