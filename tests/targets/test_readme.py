import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from bundle_toys import COUNT, PARAMS, STATIC, TOY, make_function, manifest_of, write_bundle
from servax.stages.buckets import Bucket
from servax.targets.manifest import SavedModelRecord
from servax.targets.readme import readme_text

BLOCK_SERVAX = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"servax", "flax"}:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Block())
"""


def snippets(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(code, directory):
    return subprocess.run(
        [sys.executable, "-c", BLOCK_SERVAX + code],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("readme") / "toy.bundle")


def test_the_python_snippet_runs_with_jax_alone_and_gives_the_numbers(bundle):
    (snippet,) = snippets(bundle.read("README.md").decode(), "python")
    child = run(snippet + "\nprint(outputs['y'].tolist(), 'servax' in sys.modules)", bundle.root)
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert "y float32 (2, 3, 4)" in lines
    # Zeros go in, so each row is the bias.
    assert lines[-1] == f"{np.broadcast_to(PARAMS['dense']['b'], (2, 3, 4)).tolist()} False"


def test_the_snippet_of_a_stateful_function_passes_its_state(tmp_path):
    bundle = write_bundle(tmp_path / "toy.bundle", {"count": (COUNT, (STATIC,))})
    (snippet,) = snippets(bundle.read("README.md").decode(), "python")
    child = run(snippet + "\nprint(state['seen'].tolist())", bundle.root)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["total float32 ()", "[0.0, 0.0, 0.0, 0.0]"]


def test_the_snippet_keeps_keys_that_look_like_numbers_and_narrow_dtypes(tmp_path):
    params = {
        "layers": {str(n): {"w": np.full((2,), n, ml_dtypes.bfloat16)} for n in range(11)},
        "scale": np.array(3, np.int32),
    }

    def call(params, state, inputs):
        total = sum(layer["w"].astype("float32") * int(n) for n, layer in params["layers"].items())
        return None, {"y": inputs["x"] + total * params["scale"]}

    function = make_function("embed", {"x": "float32[batch, 2]"}, {"y": "float32[batch, 2]"}, call)
    bundle = write_bundle(tmp_path / "toy.bundle", {"embed": (function, (Bucket.of(batch=1),))}, params)
    (snippet,) = snippets(bundle.read("README.md").decode(), "python")
    child = run(snippet + "\nprint(outputs['y'].tolist())", bundle.root)
    assert child.returncode == 0, child.stderr
    # 3 * (0 * 0 + 1 * 1 + ... + 10 * 10)
    assert child.stdout.splitlines()[-1] == "[[1155.0, 1155.0]]"


def test_functions_and_the_way_to_serve_are_named(bundle):
    text = bundle.read("README.md").decode()
    assert "`predict`: `x: float32[batch, length, 4]` gives `double.y: float32[batch, length, 4]`, `y:" in text
    assert "servax serve . --http 8000\n" in text
    assert "TensorFlow" not in text


def test_a_saved_model_is_copied_under_a_version():
    record = SavedModelRecord(tensorflow="2.21.0", stablehlo="1.13.7", signatures={"serving_default": "predict"})
    manifest = manifest_of(TOY, PARAMS, ["cpu"]).model_copy(
        update={"saved_model": record, "targets": ("export", "saved_model")}
    )
    text = readme_text(manifest)
    assert "cp -r saved_model/. models/toy/1/" in text
    assert "TensorFlow 2.21.0" in text


def test_the_copy_command_puts_the_saved_model_under_model_and_version(tmp_path):
    record = SavedModelRecord(tensorflow="2.21.0", stablehlo="1.13.7", signatures={})
    manifest = manifest_of(TOY, PARAMS, ["cpu"]).model_copy(update={"saved_model": record})
    (tmp_path / "saved_model").mkdir()
    (tmp_path / "saved_model" / "saved_model.pb").write_bytes(b"graph")
    command = snippets(readme_text(manifest), "sh")[-1].splitlines()[0]
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "models" / "toy" / "1" / "saved_model.pb").read_bytes() == b"graph"
