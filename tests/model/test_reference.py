"""References: models out of files and modules, and what goes wrong on the way."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from servax.core.errors import ModelError, UsageError
from servax.model import find_reference, load_model

NET = """
import servax.model
from sibling_of_net import SCALE

def double(params, x):
    return x * SCALE

model = servax.model.Model(double, inputs={"x": "float32[batch]"})

def make():
    return servax.model.Model(double, inputs={"y" if False else "x": "float32[batch]"}, name="made")

def broken():
    return servax.model.Model(double, inputs={"y": "float32[batch]"})

def fails():
    raise RuntimeError("no weights here")

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "sibling_of_net.py").write_text("SCALE = 2\n")
    yield tmp_path
    sys.modules.pop("sibling_of_net", None)


def test_a_model_out_of_a_file(folder: Path):
    path = list(sys.path)
    model = load_model(f"{folder}/net.py:model")
    assert model.reference == f"{folder}/net.py:model"
    assert model.source_file == folder / "net.py"
    assert model.name == "double"
    assert sys.path == path
    assert model.module in sys.modules
    assert find_reference(model) == model.reference


def test_the_name_in_sys_modules_is_stable_and_one_a_file(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "net.py").write_text(NET)
    names = [load_model(f"{place}/net.py:model").module for place in (folder, folder, other)]
    assert names[0] == names[1] != names[2]
    assert "net" not in sys.modules


def test_a_file_is_read_again(folder: Path):
    load_model(f"{folder}/net.py:model")
    (folder / "net.py").write_text(NET.replace('name="made"', 'name="remade"'))
    assert load_model(f"{folder}/net.py:make").name == "remade"


def test_a_relative_path(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    model = load_model("net.py:make")
    assert (model.reference, model.name, model.source_file) == ("net.py:make", "made", folder / "net.py")


def test_a_model_out_of_a_package(folder: Path, monkeypatch: pytest.MonkeyPatch):
    package = folder / "package_of_nets"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(NET)
    monkeypatch.chdir(folder)
    model = load_model("package_of_nets.net:model")
    assert model.source_file == package / "net.py"
    assert model.module == "package_of_nets.net"
    model.reference = None
    assert find_reference(model) == "package_of_nets.net:model"


def test_a_model_of_an_imported_file_has_a_reference(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(folder)
    import net

    assert find_reference(net.model) == f"{folder}/net.py:model"
    assert find_reference(net.make()) is None
    sys.modules.pop("net")


def test_a_model_in_main_has_none(folder: Path):
    script = NET + textwrap.dedent("""
        assert model.reference is None
        assert servax.model.find_reference(model) is None
        assert model.source_file.name == "net.py"
    """)
    (folder / "net.py").write_text(script)
    done = subprocess.run([sys.executable, "net.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("net.py:", "does not name a model"),
        (":model", "does not name a model"),
        ("net.py:not a name", "does not name a model"),
        ("missing.py:model", "there is no such model file"),
        ("net.py:modle", "there is no 'modle' in the module"),
        ("net.py:number", "'number' is no model"),
        ("net.py:double", "double() raised TypeError"),
        ("net.py:fails", "fails() raised RuntimeError: no weights here"),
        ("net.py:broken", "the function takes no argument 'y'"),
        ("no_such_package.net:model", "raised ModuleNotFoundError"),
    ],
)
def test_references_that_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, reference: str, part: str):
    monkeypatch.chdir(folder)
    with pytest.raises(ModelError) as raised:
        load_model(reference)
    assert part in str(raised.value)


def test_what_is_there_is_named(folder: Path):
    with pytest.raises(ModelError) as raised:
        load_model(f"{folder}/nte.py:model")
    assert "net.py, sibling_of_net.py" in raised.value.remedy
    with pytest.raises(ModelError) as raised:
        load_model(f"{folder}/net.py:modle")
    assert raised.value.seen == "models in it: model"
    assert raised.value.remedy.endswith("net.py:model.")
    with pytest.raises(ModelError, match=r"There is no folder"):
        load_model(f"{folder}/nowhere/net.py:model")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("import a_module_that_is_not_there", "raised ModuleNotFoundError"),
        ("value = 1 / 0", "raised ZeroDivisionError"),
        ("def broken(:", "raised SyntaxError"),
    ],
)
def test_an_import_that_raises_shows_the_line(folder: Path, line: str, part: str):
    (folder / "net.py").write_text(f"\n\n{line}\n")
    before = set(sys.modules)
    with pytest.raises(ModelError) as raised:
        load_model(f"{folder}/net.py:model")
    assert part in raised.value.what
    assert raised.value.where == f"{folder}/net.py:3: {line}"
    assert raised.value.__cause__ is not None
    assert not [name for name in set(sys.modules) - before if name.startswith("servax_model_")]


def test_an_import_that_raises_in_a_sibling_shows_the_line_of_the_model(folder: Path):
    (folder / "sibling_of_net.py").write_text("1 / 0\n")
    with pytest.raises(ModelError) as raised:
        load_model(f"{folder}/net.py:model")
    assert raised.value.where == f"{folder}/net.py:3: from sibling_of_net import SCALE"


def test_a_name_without_a_colon_is_neither_a_bundle_nor_a_model(tmp_path):
    with pytest.raises(UsageError) as caught:
        load_model(str(tmp_path))
    assert caught.value.what == "there is neither a bundle nor a model of this name"
    assert caught.value.where == str(tmp_path)
    assert caught.value.seen == "a directory without bundle.json"
    assert caught.value.remedy
