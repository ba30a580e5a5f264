"""Writes the tables of docs/guide/generation_performance.md from the results of `bench/generation.py`.

PYTHONPATH=bench python -m measure.generation_page
"""

from __future__ import annotations

import json

from measure.generation_report import Results, tables, targets
from measure.page import BEGIN, END, ROOT

PAGE = ROOT / "docs" / "guide" / "generation_performance.md"
RESULTS = ROOT / "bench" / "results" / "generation.json"


def written(page: str, results: Results) -> str:
    """The page with the tables of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [*tables(results), "", "| to its peer in the same run | |", "|---|---|"]
    lines += [f"| {what} | {verdict.strip()} |" for verdict, what in targets(results)]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULTS.read_text())))
    print(f"{PAGE.relative_to(ROOT)} from {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
