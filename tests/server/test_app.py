import asyncio

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import serving_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.app import below, create_app, plane_of


@pytest.fixture(scope="module")
def servable():
    with toys.toy().warm() as ready:
        yield ready


def get(app, *paths: str) -> list[httpx2.Response]:
    async def scene():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://host") as http:
            return [await http.get(path) for path in paths]

    return asyncio.run(scene())


def test_the_first_page_lists_models_with_their_functions_and_links(servable):
    (page,) = get(create_app(servable), "/")
    (model,) = page.json()["models"]
    assert (model["name"], model["state"]) == ("toy", "READY")
    assert model["functions"]["total"] == {
        "inputs": {"n": "int32[batch]", "x": "float32[batch, length]"},
        "outputs": {"sum": "float32[batch]"},
    }
    assert model["infer"] == "http://host/v2/models/toy/infer"
    links = get(create_app(servable), *(page.json()[name] for name in ("ready", "metrics", "openapi")))
    assert [each.status_code for each in links] == [200, 200, 200]


def test_the_openapi_document_describes_each_function_s_tensors(servable):
    (page,) = get(create_app(servable), "/openapi.json")
    document = page.json()
    assert document["openapi"].startswith("3.")
    schemas = document["paths"]["/v2/models/toy/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    predict = next(each for each in schemas["anyOf"] if each["title"] == "predict")
    (x,) = predict["properties"]["inputs"]["items"]["anyOf"]
    assert x["properties"]["datatype"] == {"const": "FP32"}
    assert x["properties"]["shape"]["minItems"] == 2


@pytest.mark.parametrize(("path", "mount"), [("/v1/models/toy", None), ("/v1/models/toy", "/v1")])
def test_tensorflow_servings_api_stands_below_v1(servable, path, mount):
    app = create_app(servable)
    if mount is not None:
        app = Starlette(routes=[Mount(mount, app)])
    (answer,) = get(app, path)
    assert answer.json()["model_version_status"][0]["state"] == "AVAILABLE"


def test_several_servables_or_a_plane_make_an_application(servable):
    plane = DataPlane([servable])
    assert plane_of(plane) is plane
    assert "toy" in plane_of([servable])
    assert "toy" in plane_of(servable)


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/v2/models", "", ("/v2/models", "")),
        ("/v2/models", "/v2", ("/models", "/v2")),
        ("/v2", "/v2", ("", "/v2")),
        ("/v22", "/v2", ("/v22", "/v2")),
        ("/models", "/v2", ("/models", "/v2")),
    ],
)
def test_the_path_below_the_mount(path, root, expected):
    assert below({"path": path, "root_path": root}) == expected


def test_unknown_pages_are_not_found(servable):
    answers = get(create_app(servable), "/nope", "/v2/nope")
    assert [each.status_code for each in answers] == [404, 404]
    assert all(each.json()["error"] for each in answers)
