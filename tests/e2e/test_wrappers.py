"""Every wrapper of MiniLM against embeddings that transformers and torch computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import servax
from servax.targets.bundle import Bundle

TOLERANCE = 1e-4

Golden = Sequence[dict[str, Any]]

TENSORFLOW = """
import json, sys
for name in ("jax", "jaxlib", "flax", "servax"):
    sys.modules[name] = None
import numpy as np
import tensorflow as tf

signature = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
rows = json.load(open(sys.argv[2]))
answers = []
for case in rows:
    tokens = tf.constant(case["tokens"], tf.int32)
    answers.append(signature(tokens=tokens, n=tf.constant(case["n"], tf.int32))["embedding"].numpy().tolist())
json.dump({"answers": answers, "inputs": sorted(signature.structured_input_signature[1])}, open(sys.argv[3], "w"))
"""


@pytest.mark.parametrize("wrapper", ["jit", "aot", "export"])
def test_a_wrapper_gives_the_golden_embeddings(minilm_bundle: Bundle, minilm_golden: Golden, wrapper: str) -> None:
    texts = [row["text"] for row in minilm_golden]
    expected = np.array([row["embedding"] for row in minilm_golden])
    with servax.load(minilm_bundle.root, require=wrapper) as servable:
        together = servable.predict(text=texts)["embedding"]
        alone = np.concatenate([servable.predict(text=[text])["embedding"] for text in texts])
    np.testing.assert_allclose(together, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=TOLERANCE)


def test_the_saved_model_runs_where_jax_cannot_be_imported(
    minilm_bundle: Bundle, minilm_golden: Golden, tmp_path: Path
) -> None:
    """Batch sizes 1, 3 and 8, lengths 5 and 128; what is not in the golden file is compared with the aot wrapper."""
    random = np.random.default_rng(0)
    golden = [{"tokens": [row["ids"]], "n": [len(row["ids"])]} for row in minilm_golden]
    mixed = [
        {
            "tokens": random.integers(1000, 30000, (batch, length)).tolist(),
            "n": random.integers(1, length, batch).tolist(),
        }
        for batch in (1, 3, 8)
        for length in (5, 128)
    ]
    (tmp_path / "rows.json").write_text(json.dumps([*golden, *mixed]))
    command = [
        sys.executable,
        "-c",
        TENSORFLOW,
        str(minilm_bundle.root / "saved_model"),
        str(tmp_path / "rows.json"),
        str(tmp_path / "answers.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "answers.json").read_text())
    assert result["inputs"] == ["n", "tokens"]
    answers = [np.array(answer) for answer in result["answers"]]
    expected = np.array([row["embedding"] for row in minilm_golden])
    np.testing.assert_allclose(np.concatenate(answers[: len(golden)]), expected, rtol=0, atol=TOLERANCE)
    with servax.load(minilm_bundle.root, require="aot") as servable:
        for case, answer in zip(mixed, answers[len(golden) :], strict=True):
            ours = servable.predict(tokens=np.array(case["tokens"], np.int32), n=np.array(case["n"], np.int32))
            np.testing.assert_allclose(answer, ours["embedding"], rtol=0, atol=TOLERANCE)


def test_parity_is_proved_here_and_unproven_elsewhere(minilm_bundle: Bundle) -> None:
    verdicts = {(v.target, v.platform): set[str]() for v in minilm_bundle.parity.verdicts}
    for verdict in minilm_bundle.parity.verdicts:
        verdicts[verdict.target, verdict.platform].add(verdict.verdict)
    assert verdicts == {
        ("jit", "cpu"): {"proved"},
        ("aot", "cpu"): {"proved"},
        ("export", "cpu"): {"proved"},
        ("export", "cuda"): {"unproven"},
        ("export", "tpu"): {"unproven"},
        ("saved_model", "cpu"): {"proved"},
    }
    unproven = next(verdict for verdict in minilm_bundle.parity.verdicts if verdict.verdict == "unproven")
    assert unproven.reason == "unproven on cuda: run servax verify there"


def test_every_bucket_of_aot_is_proved(minilm_bundle: Bundle) -> None:
    aot = [verdict for verdict in minilm_bundle.parity.verdicts if verdict.target == "aot"]
    assert {verdict.bucket for verdict in aot} == set(minilm_bundle.manifest.functions["predict"].buckets)
    assert len(aot) == 12
