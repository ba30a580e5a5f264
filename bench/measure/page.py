"""Writes the tables of docs/guide/performance.md from the newest results of `bench/serving.py`.

PYTHONPATH=bench python -m measure.page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from measure.peers import PEERS
from measure.report import Results, faults, lane, lanes, memory, targets

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "performance.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def newest() -> Path:
    """The file of the latest run."""
    return max((ROOT / "bench" / "results").glob("serving-*.json"))


def tables(results: Results) -> str:
    """The tables, in Markdown."""
    host = results["machine"]
    count = len(results["runs"])
    runs = "one run" if count == 1 else f"medians of {count} runs"
    lines = [
        f"{host['date']}, {host['cpu']}, one core for the server and one for the client, jax {host['jax']}, {runs};"
        f" load average when it began {host['load average at start']:.1f}. Latencies in milliseconds.",
        "",
    ]
    for model in results["options"]["models"]:
        lines += [*_model(results, model), ""]
    if results["cold"]:
        lines += ["| cold mixed traffic, 30 s from ready | over 100 ms | median | slowest |", "|---|---|---|---|"]
        for name, cold in results["cold"].items():
            lines.append(
                f"| {PEERS[name].title} | {cold['slow']} of {cold['requests']} | {cold['p50'] * 1e3:,.0f}"
                f" | {(cold['worst'] or 0) * 1e3:,.0f} |"
            )
        lines.append("")
    lines += [f"- {name}: not measured ({why.splitlines()[0]})" for name, why in results["unavailable"].items()]
    lines += ["| target | |", "|---|---|"]
    for line in targets(results):
        verdict, _, what = line.partition("  ")
        lines.append(f"| {what.strip()} | {verdict.strip().replace('MISS', 'missed')} |")
    return "\n".join([*lines, ""])


def _model(results: Results, model: str) -> Iterator[str]:
    loads = [str(number) for number in results["options"]["concurrency"]]
    most, least = loads[-1], loads[0]
    yield f"| {model} | requests/s, {most} callers | p50 | p99 | p50 alone | CPU ms a request | peak MiB |"
    yield "|---|---|---|---|---|---|---|"
    for name, protocol in lanes(results, model):
        title = f"{PEERS[name].title}, {protocol}"
        if fault := faults(results, model, name, protocol):
            yield f"| {title} | {fault} | | | | | |"
            continue

        def value(load: str, field: str, scale: float, lane_of: tuple[str, str] = (name, protocol)) -> float:
            found = lane(results, model, *lane_of, load=load, field=field)
            return float("nan") if found is None else found * scale

        size = memory(results, model, name)
        yield (
            f"| {title} | {value(most, 'rate', 1):,.0f} | {value(most, 'p50', 1e3):.2f} | {value(most, 'p99', 1e3):.2f}"
            f" | {value(least, 'p50', 1e3):.2f} | {value(most, 'cpu', 1e3):.2f}"
            f" | {float('nan') if size is None else size / 2**20:.0f} |"
        )


def written(page: str, results: Results) -> str:
    """The page with the tables of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(results)}\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), json.loads(newest().read_text())))
    print(f"{PAGE.relative_to(ROOT)} from {newest().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
