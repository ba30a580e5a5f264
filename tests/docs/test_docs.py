import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from servax.cli.app import app
from servax.core import errors
from servax.core.errors import RequestError, ServaxError, ServiceError

sys.path.insert(0, str(Path(__file__).parent))
import pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([ROOT / "README.md", *(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)])
RUNNABLE = [page for page in PAGES if pages.runnable(page)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each page's runnable blocks, run one page after the other in one fresh process."""
    results = tmp_path_factory.mktemp("docs") / "results.json"
    command = [sys.executable, str(Path(pages.__file__)), str(results), *map(str, RUNNABLE)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(results.read_text())


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_what_a_page_shows_runs(page: Path, outcomes: dict[str, Any]) -> None:
    fault = outcomes[str(page)]["fault"]
    assert fault is None, fault


def test_the_pages_that_teach_by_code_are_run() -> None:
    guide = {"models", "checkpoints", "buckets", "build", "serving"}
    assert {"README.md", *(f"docs/guide/{name}.md" for name in guide)} <= set(map(name_of, RUNNABLE))


def commands() -> list[Any]:
    return [
        pytest.param(command, id=f"{name_of(page)}: {command}") for page in PAGES for command in pages.commands(page)
    ]


@pytest.mark.parametrize("command", commands())
def test_a_command_line_parses(command: str) -> None:
    verb, *arguments = shlex.split(command, comments=True)[1:]
    group: Any = typer.main.get_command(app)
    assert verb in group.commands
    group.commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_verbs_and_options_within_sentences_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for command in pages.inline_commands(page):
        verb, *arguments = shlex.split(command)[1:]
        if verb == "VERB":
            continue
        assert verb in group.commands, command
        known = {option for parameter in group.commands[verb].params for option in parameter.opts} | {"--help"}
        assert {each for each in arguments if each.startswith("-")} <= known, command


def test_the_page_of_the_command_line_is_current() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "import generate_cli; print(generate_cli.page(), end='')"],
        cwd=DOCS,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert (REFERENCE / "cli.md").read_text() == made, "run `python docs/generate_cli.py`"


def rows(page: Path) -> list[list[str]]:
    """The cells of a page's table rows, code marks taken off."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_every_error_has_a_row_with_its_status_and_exit_code() -> None:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, ServaxError)]
    expected = {
        each.__name__: (
            each.__mro__[1].__name__,
            str(each.status) if issubclass(each, RequestError | ServiceError) else "500",
            str(each.exit_code),
        )
        for each in classes
    }
    seen = {name: (base, status, code) for name, base, _, status, code in rows(REFERENCE / "errors.md")}
    assert seen == expected


def test_every_metric_has_a_row() -> None:
    from servax.protocols.dataplane import DataPlane
    from servax.server.metrics import Metrics

    text = Metrics(DataPlane(), triton=True).text().decode()
    registered = set(re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.M))
    assert {(name, kind) for name, kind, *_ in rows(REFERENCE / "metrics.md")} == registered


def test_every_field_of_the_manifest_is_described() -> None:
    from servax.targets.manifest import Manifest

    text = (REFERENCE / "bundle.md").read_text().partition("## Manifest")[2].partition("\n## ")[0]
    assert set(Manifest.model_fields) <= set(re.findall(r"`(\w+)`", text))


def test_the_eleven_contracts_name_tests_that_exist() -> None:
    sections = re.split(r"^## (\d+)\. ", (DOCS / "contracts.md").read_text(), flags=re.M)[1:]
    contracts = dict(zip(map(int, sections[::2]), sections[1::2], strict=True))
    assert sorted(contracts) == list(range(1, 12))
    for number, text in contracts.items():
        named = re.findall(r"`(tests/[\w/]+\.py)`", text)
        assert named, f"contract {number} names no test"
        assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_readme_names_the_test_command() -> None:
    blocks = [block.text for block in pages.blocks(ROOT / "README.md") if block.language == "sh"]
    assert "make test" in blocks[0]
    assert "make demo" in blocks[0]


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
