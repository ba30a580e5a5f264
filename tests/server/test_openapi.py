import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.openapi import describe


def test_every_route_is_described():
    with toys.toy() as servable:
        document = describe(DataPlane([servable]), "1.2")
    assert document["info"] == {"title": "servax", "version": "1.2"}
    assert set(document["paths"]) == {
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/metrics",
        "/v2/models/toy",
        "/v2/models/toy/ready",
        "/v2/models/toy/infer",
    }
    answers = document["paths"]["/v2/models/toy/infer"]["post"]["responses"]
    assert set(answers) == {"200", "400", "404", "413", "500", "503", "504"}
