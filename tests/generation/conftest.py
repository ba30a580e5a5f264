import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import language_toys as toys
from servax.generation.servable import LanguageServable


@pytest.fixture
def servable() -> Iterator[LanguageServable]:
    with toys.llama().servable() as servable:
        yield servable
