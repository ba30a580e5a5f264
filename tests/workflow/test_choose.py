from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bundle_toys import write_bundle
from servax.core.errors import UsageError
from servax.targets.bundle import Bundle
from servax.targets.manifest import SavedModelRecord
from servax.workflow import inspect
from servax.workflow.choose import choose, text

MODEL = """
import servax
model = servax.Model(lambda params, x: x * params["two"], inputs={"x": "float32[batch]"}, name="double")
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("choose") / "toy.bundle", executables=True)


def changed(bundle: Bundle, folder: Path, **update: object) -> Bundle:
    """Another bundle with the same manifest but for these fields, and no files."""
    root = folder / "changed.bundle"
    root.mkdir()
    manifest = bundle.manifest.model_copy(update={"files": {}, **update})
    (root / "bundle.json").write_text(manifest.model_dump_json())
    return Bundle.open(root)


def test_each_deployment_has_its_wrapper_and_the_reason(bundle: Bundle) -> None:
    choices = choose(str(bundle.root))
    assert [(each.deployment, each.target) for each in choices] == [
        ("python", "jit"),
        ("startup", "aot"),
        ("platform", "export"),
        ("tensorflow", "saved_model"),
    ]
    shown = text(choices)
    assert all(f"{each.use}: {each.target}\n  why:         {each.reason}" in shown for each in choices)


def test_executables_of_this_machine_have_nothing_in_their_way(bundle: Bundle) -> None:
    (choice,) = choose(str(bundle.root), "startup")
    assert choice.obstacles == ()
    assert choice.command == f"servax serve {bundle.root} --require aot"
    assert "in the way:  nothing on this machine" in text([choice])


def test_executables_of_another_machine_name_the_field(bundle: Bundle, tmp_path: Path) -> None:
    (mark,) = bundle.manifest.fingerprints
    other = mark.model_copy(update={"fields": {**mark.fields, "jaxlib": "0.1.2"}})
    (choice,) = choose(str(changed(bundle, tmp_path, fingerprints=(other,)).root), "startup")
    (obstacle,) = choice.obstacles
    assert "jaxlib: 0.1.2 in the bundle" in obstacle
    assert "servax compile" in obstacle


@pytest.mark.parametrize(
    ("deployment", "update", "obstacle"),
    [
        ("startup", {"executables": ()}, "no executables; run `servax compile"),
        ("platform", {"programs": ()}, "no exports"),
        ("platform", {"platforms": ("tpu",)}, "exported for tpu, not for cpu; build with --platform cpu"),
        ("python", {}, "defined in a notebook"),
    ],
)
def test_what_is_missing_is_in_the_way(
    bundle: Bundle, tmp_path: Path, deployment: str, update: dict[str, object], obstacle: str
) -> None:
    (choice,) = choose(str(changed(bundle, tmp_path, **update).root), deployment)
    assert len(choice.obstacles) == 1
    assert obstacle in choice.obstacles[0]


def test_a_saved_model_says_what_it_leaves_out_and_how_it_is_copied(bundle: Bundle, tmp_path: Path) -> None:
    record = SavedModelRecord(
        tensorflow="2.20.0",
        stablehlo="1.12.1",
        signatures={"serving_default": "predict"},
        left_out={"inverse": "it calls lapack_sgetrf_ffi"},
    )
    other = changed(bundle, tmp_path, saved_model=record)
    (choice,) = choose(str(other.root), "tensorflow")
    assert "it leaves out inverse: it calls lapack_sgetrf_ffi" in choice.obstacles
    # TensorFlow Serving looks for MODEL/VERSION/saved_model.pb: the folder's content is copied, not the folder.
    assert choice.command.startswith("mkdir -p ")
    assert choice.command.endswith(f"cp -r {other.root}/saved_model/. models/{other.manifest.name}/1/")
    (table,) = [each for each in inspect.report(str(other.root)) if "TensorFlow 2.20.0" in str(each)]
    assert "left out: it calls lapack_sgetrf_ffi" in str(table)


def test_stateful_functions_stay_out_of_a_saved_model_to_be_made(bundle: Bundle) -> None:
    (choice,) = choose(str(bundle.root), "tensorflow")
    assert any("it leaves out count: it keeps state" in each for each in choice.obstacles)
    assert choice.command == f"servax build --from {bundle.root} -t saved_model"


def test_a_model_is_told_how_to_build(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(MODEL)
    python, startup, *_, tensorflow = choose(f"{file}:model")
    assert python.command == f"servax serve {file}:model --checkpoint CHECKPOINT"
    assert startup.command == f"servax build {file}:model --checkpoint CHECKPOINT -t aot -o double.bundle"
    assert bool(tensorflow.obstacles) == (importlib.util.find_spec("tensorflow") is None)


def test_a_deployment_that_is_none(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="no such deployment") as caught:
        choose(str(bundle.root), "moon")
    assert caught.value.seen == "moon"
