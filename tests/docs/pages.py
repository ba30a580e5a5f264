"""Reads what pages of the documentation show, and runs it: `python pages.py RESULTS PAGE...`.

A Python block is run if `<!-- runnable -->` stands on the line before it; a block of any language is written to a file
if `<!-- file: NAME -->` does. The blocks of a page share one namespace and one fresh folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:<!-- *(?P<mark>[^>]*?) *-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)`(servax [^`\n]*)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      mark: of the comment on the line before it.
      line: of the page, on which its text begins.
    """

    language: str
    text: str
    mark: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    content = page.read_text()
    for match in _BLOCK.finditer(content):
        line = content.count("\n", 0, match.start("text")) + 1
        yield Block(match["language"], match["text"], match["mark"] or "", line)


def commands(page: Path) -> Iterator[str]:
    """The `servax ...` command lines in a page's shell blocks, continued lines joined."""
    for block in blocks(page):
        if block.language in ("sh", "console", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ")
                if text.startswith("servax "):
                    yield text


def inline_commands(page: Path) -> Iterator[str]:
    """The `servax ...` commands within sentences, which may leave arguments out."""
    yield from _INLINE.findall(_BLOCK.sub("", page.read_text()))


def runnable(page: Path) -> bool:
    """Whether a page has blocks to run."""
    return any(block.mark == "runnable" for block in blocks(page))


def run(page: Path) -> str | None:
    """Runs a page's blocks in the present folder; what went wrong, with the page's line, or None."""
    before = set(sys.modules)
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.path.insert(0, os.getcwd())
    try:
        for block in blocks(page):
            if block.mark.startswith("file: "):
                Path(block.mark.removeprefix("file: ")).write_text(block.text)
            elif block.mark == "runnable":
                code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
                exec(code, namespace)
    except BaseException:
        return traceback.format_exc()
    finally:
        sys.path.remove(os.getcwd())
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) and os.getcwd() in str(sys.modules[name].__file__):
                del sys.modules[name]
    return None


def main(results: str, pages: list[str]) -> None:
    outcomes: dict[str, dict[str, object]] = {}
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            began = time.perf_counter()
            fault = run(Path(page))
            outcomes[page] = {"fault": fault, "seconds": time.perf_counter() - began}
            os.chdir("/")
    Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
