"""The digest over a model's sources: what changes it, and what does not."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from servax.model import Model, load_model, source_digest

NET = """
import servax.model
import first_part
from packed_part import inner

model = servax.model.Model(lambda params, x: x, inputs={"x": "float32[batch]"})
"""


def write(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET)
    (folder / "first_part.py").write_text("import second_part\n")
    (folder / "second_part.py").write_text("import first_part\nimport json\n")
    (folder / "unrelated.py").write_text("")
    (folder / "packed_part").mkdir(exist_ok=True)
    (folder / "packed_part" / "__init__.py").write_text("")
    (folder / "packed_part" / "inner.py").write_text("")
    return folder


def digest(folder: Path) -> str:
    for name in ("first_part", "second_part", "packed_part", "packed_part.inner"):
        sys.modules.pop(name, None)
    value = source_digest(load_model(f"{folder}/net.py:model"))
    assert value is not None
    return value


def test_a_file_and_the_files_beside_it_that_it_imports(tmp_path: Path):
    folder = write(tmp_path / "one")
    before = digest(folder)
    assert digest(folder) == before
    assert digest(write(tmp_path / "two")) == before
    (folder / "unrelated.py").write_text("x = 1\n")
    assert digest(folder) == before
    for changed in ("net.py", "first_part.py", "second_part.py", "packed_part/inner.py"):
        write(folder)
        with (folder / changed).open("a") as file:
            file.write("# changed\n")
        assert digest(folder) != before, changed


def test_the_digest_is_sha256_over_names_lengths_and_contents(tmp_path: Path):
    (tmp_path / "net.py").write_text(source := NET.replace("import first_part\nfrom packed_part import inner\n", ""))
    expected = hashlib.sha256(f"net.py\0{len(source)}\0{source}".encode()).hexdigest()
    assert digest(tmp_path) == expected


def test_all_sources_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "whole_package"
    (package / "nets").mkdir(parents=True)
    for name in ("__init__.py", "nets/__init__.py", "other.py"):
        (package / name).write_text("")
    (package / "nets" / "net.py").write_text(NET.replace("import first_part\nfrom packed_part import inner\n", ""))
    monkeypatch.chdir(tmp_path)
    model = load_model("whole_package.nets.net:model")
    before = source_digest(model)
    (package / "other.py").write_text("x = 1\n")
    assert source_digest(model) != before


def test_a_model_without_a_file_has_none():
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec("from servax.model import Model\nmodel = Model(lambda params, x: x, inputs={'x': 'float32[b]'})", namespace)
    model = namespace["model"]
    assert isinstance(model, Model)
    assert model.source_file is None
    assert source_digest(model) is None
