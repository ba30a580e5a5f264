"""The arithmetic of the benchmark of generation, on numbers made up by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from generation import poisson, span
from measure import generation_page
from measure import generation_report as report
from measure.quality import compared
from measure.streams import Stream, steady_rate


def generator(one: float, whole: float, rates: dict[str, float]) -> dict[str, Any]:
    """Numbers of one generator in one run, at a context of 128."""
    measured = {batch: {"rate": rate, "others": 0.0} for batch, rate in rates.items()}
    return {"first": {"1": one, "128": whole}, "decode": {"128": measured}}


@pytest.fixture
def results() -> dict[str, Any]:
    """Three runs, of which the median is the second."""

    def run(factor: float) -> dict[str, Any]:
        return {
            "bfloat16": generator(0.02, 0.02 + 0.127 / factor, {"1": 40 * factor, "16": 300 * factor}),
            "int8": generator(0.02, 0.02 + 0.0635 / factor, {"1": 40 * factor, "2": 70, "16": 500 * factor}),
            "q4_1": generator(0.01, 0.01 + 0.508 / factor, {"1": 50 * factor, "16": 190 * factor}),
            "f16": generator(0.01, 0.01 + 0.254 / factor, {"1": 40 * factor, "16": 200 * factor}),
        }

    return {
        "machine": {
            "date": "2026-01-01",
            "cpu": "a processor",
            "cores": 2,
            "jax": "0.12",
            "load average at start": 0.1,
        },
        "options": {"contexts": [128]},
        "unavailable": {"torch-float32": "no room"},
        "runs": [run(0.5), run(1.0), run(3.0)],
        "wrappers": {"aot": {"ready": 3.0, "first": [0.1, 0.3], "1": [40.0], "16": [500.0]}},
        "windows": {"512": {"128": 0.02, "256": 0.03}, "2048": {"128": 0.021, "1024": 0.05}},
        "quality": {
            "tokens": 2000,
            "bfloat16": {
                "agreement": 0.99,
                "divergence": 0.001,
                "surprise": math.log(20),
                "surprise exact": math.log(20),
            },
            "int8": {"agreement": 0.95, "divergence": 0.01, "surprise": math.log(21), "surprise exact": math.log(20)},
        },
        "api": {"streams": [400.0, 440.0, 450.0], "engine": [500.0, 500.0, 490.0]},
        "poisson": None,
        "aiperf": None,
    }


def test_medians_and_prefill(results: dict[str, Any]) -> None:
    assert report.decode(results, "int8", 128, 16) == 500
    assert report.decode(results, "float32", 128, 16) is None
    assert report.prefill(results, "bfloat16", 128) == pytest.approx(1000)  # 127 tokens in 127 ms
    assert report.prefill(results, "f16", 128) == pytest.approx(500)


def test_targets(results: dict[str, Any]) -> None:
    assert [(verdict.strip(), what) for verdict, what in report.targets(results)] == [
        ("missed", "prefill of 128, bfloat16 to llama.cpp's better: 2.00 (at least 3)"),
        ("met", "prefill of 128, int8 to llama.cpp's better: 4.00 (at least 3)"),
        ("met", "decode of 16 at context 128, bfloat16 to llama.cpp's better: 1.50 (at least 1.5)"),
        ("met", "decode of 16 at context 128, int8 to llama.cpp's better: 2.50 (at least 2)"),
        ("missed", "decode of 1 at context 128, int8 to llama.cpp Q4_1: 0.80 (at least 0.95)"),
        ("met", "decode of 1 at context 128, bfloat16 to llama.cpp F16: 1.00 (at least 0.9)"),
        ("met", "16 streams through the API, to the engine alone: 0.88 (at least 0.85)"),
    ]


def test_longer_contexts_are_printed_without_a_verdict(results: dict[str, Any]) -> None:
    results["options"]["contexts"] = [128, 512]
    for run in results["runs"]:
        for name, measured in run.items():
            measured["decode"]["512"] = {"16": {"rate": 100.0 if name == "int8" else 50.0, "others": 0.0}}
    assert ("      ", "decode of 16 at context 512, int8 to llama.cpp's better: 2.00") in list(report.targets(results))


def test_tables(results: dict[str, Any]) -> None:
    text = report.text(results)
    assert "- not measured: transformers float32: no room" in text
    assert "| servax int8 | 2,000 | 84 | 40 |  | 500 |" in text
    assert "| int8, 2 | 70 | 28.6 | `██████` |" in text
    assert f"| int8, 16 | 500 | 32.0 | `{'█' * 40}` |" in text
    assert "| aot | 3.0 | 200 | 40 | 500 |" in text
    assert "| window of 512 allocated | 20.0 | 30.0 |  |" in text
    assert "| window of 2048 allocated | 21.0 |  | 50.0 |" in text
    assert "| int8 | 95.0% | 0.0100 | 21.00 (20.00 in float32) |" in text


def test_contexts_are_never_exceeded() -> None:
    assert [span(context) for context in (128, 512, 1024)] == [(64, 64), (448, 64), (960, 64)]
    assert span(32) == (16, 16)


def test_steady_rate_leaves_out_how_streams_begin_and_end() -> None:
    early = Stream(sent=0.0, arrivals=[(1.0, 4), (2.0, 8), (3.0, 12)])
    late = Stream(sent=0.0, arrivals=[(2.0, 1), (3.0, 9), (4.0, 12)])
    # From 2 s to 3 s: the first went from 8 to 12, the second from 1 to 9.
    assert steady_rate([early, late]) == (12, 1.0)


def test_poisson_counts_from_when_a_request_was_due() -> None:
    good = Stream(sent=1.0, arrivals=[(1.5, 1), (2.5, 5)])
    bad = Stream(sent=1.0, arrivals=[], error="429")
    found = poisson([good, bad], 2.0)
    assert (found["requests"], found["errors"]) == (2, 1)
    assert found["first"] == [0.5, 0.5]
    assert found["gap"] == [1.0, 1.0]
    assert found["token"] == [0.25, 0.25]
    assert found["tokens/s"] == pytest.approx(5 / 1.5)


def test_divergence_by_hand() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])) + 3.0  # a constant changes nothing
    found = compared(exact, other, np.array([0, 0]))
    assert found["agreement"] == 0.5
    assert found["divergence"] == pytest.approx(0.25 * math.log(2) / 2)
    assert found["surprise exact"] == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert found["surprise"] == pytest.approx(-(math.log(0.25) + math.log(0.8)) / 2)


def test_the_page_holds_the_results() -> None:
    text = generation_page.PAGE.read_text()
    results = json.loads(generation_page.RESULTS.read_text())
    assert text == generation_page.written(text, results), "PYTHONPATH=bench python -m measure.generation_page"
