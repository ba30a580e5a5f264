"""Re-exports that are imported when they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servax.core import lazy


def test_names_come_from_their_modules():
    getattribute, directory = lazy.exports("json", {"JSONDecoder": "decoder", "JSONEncoder": "encoder"})
    import json

    assert getattribute("JSONDecoder") is json.JSONDecoder
    assert directory() == ["JSONDecoder", "JSONEncoder"]
    with pytest.raises(AttributeError, match=r"module 'json' has no attribute 'dumps_nothing'"):
        getattribute("dumps_nothing")


def test_a_package_imports_nothing_until_a_name_is_used(tmp_path: Path):
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from servax.core import lazy\n__getattr__, __dir__ = lazy.exports(__name__, {'value': 'inner'})\n"
    )
    (package / "inner.py").write_text("value = 3\n")
    code = (
        "import sys, lazy_package\n"
        "assert 'lazy_package.inner' not in sys.modules\n"
        "from lazy_package import value\n"
        "assert value == 3 and dir(lazy_package) == ['value']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
