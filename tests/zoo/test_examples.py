from pathlib import Path

import pytest

from servax.model.reference import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("file", "name", "inputs"),
    [("minilm.py", "minilm", ["n", "tokens"]), ("tutorial/net.py", "gpt", ["tokens"])],
)
def test_an_example_is_a_model_as_the_verbs_take_it(file: str, name: str, inputs: list[str]) -> None:
    model = load_model(f"{EXAMPLES / file}:model")
    assert model.name == name
    assert [spec.name for spec in model.functions["predict"].signature.inputs] == inputs
