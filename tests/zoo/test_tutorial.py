import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"
NOTEBOOK = "from_notebook_to_production.ipynb"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that the notebook's cells print and show, after a short training, in a folder of its own."""
    folder = tmp_path_factory.mktemp("tutorial")
    for path in (*TUTORIAL.glob("*.py"), TUTORIAL / "text.txt"):
        shutil.copy(path, folder)
    notebook = nbformat.read(TUTORIAL / NOTEBOOK, as_version=4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source, found = re.subn(r"STEPS = \d+", "STEPS = 60", parameters.source)
    assert found == 1
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return "\n".join(_text(output) for cell in notebook.cells for output in cell.get("outputs", ()))


def _text(output: Any) -> str:
    """What a reader sees: a table's cells where the output has one."""
    data = output.get("data", {})
    rows = data.get("text/html", "").replace("</tr>", "\n")
    return output.get("text") or re.sub(r"(<[^>]*>)+", " ", rows) or data.get("text/plain", "")


def test_the_training_saved_four_steps(shown: str) -> None:
    assert "steps: [15, 30, 45, 60]" in shown
    sizes = {name: float(size) for name, size in re.findall(r"(model|ema|optimizer) +\d+ arrays +([\d.]+) MiB", shown)}
    assert sizes["model"] == sizes["ema"]
    assert sizes["optimizer"] == pytest.approx(2 * sizes["model"], abs=0.1)


def test_two_equal_candidates_are_an_error_that_names_both(shown: str) -> None:
    assert "2 subtrees of the checkpoint fit the model equally well" in shown
    assert re.search(r"seen: +model, ema", shown)
    assert "select='model'" in shown


def test_every_wrapper_is_proved(shown: str) -> None:
    for target in ("aot", "export", "saved_model"):
        assert re.search(rf"^ *{target} +cpu +predict +\d+ +proved\b", shown, re.MULTILINE), target


def test_no_request_compiled_but_those_of_plain_jit(shown: str) -> None:
    counts = {
        label: int(count)
        for label, count in re.findall(
            r"^(servax|plain jit|servax, aot|over HTTP) +median .* compilations (\d+)", shown, re.M
        )
    }
    assert counts.pop("plain jit") >= 8
    assert counts == {"servax": 0, "servax, aot": 0, "over HTTP": 0}


def test_loading_executables_and_swapping_weights_compile_nothing(shown: str) -> None:
    assert re.findall(r"compilations: (\d+)", shown) == ["0", "0"]
    assert "imports done to ready" in shown  # in a process that cannot import Flax


def test_the_export_was_called_without_servax(shown: str) -> None:
    assert "servax imported: False" in shown


def test_the_four_wrappers_agree(shown: str) -> None:
    differences = dict(re.findall(r"^(\w+) +\(1, 17, 256\) +largest difference to jit (\S+)", shown, re.MULTILINE))
    assert sorted(differences) == ["aot", "export", "jit", "saved_model"]
    assert max(map(float, differences.values())) < 1e-4


def test_the_server_answered(shown: str) -> None:
    assert re.search(r"http://127\.0\.0\.1:\d+ 200", shown)
    assert "output FP32 [1, 17, 256]" in shown


def test_the_notebook_is_committed_without_outputs() -> None:
    notebook = nbformat.read(TUTORIAL / NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
