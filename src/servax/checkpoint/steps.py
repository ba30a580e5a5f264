"""The step of a run to take: the latest, the best by recorded metrics, or a number."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from etils import epath

from servax.core.errors import CheckpointError, UsageError

Step = int | Literal["latest", "best"]

_STEP = re.compile(r"^(?:[A-Za-z][A-Za-z0-9]*[_-])?(\d+)$")
_LOWER_IS_BETTER = {
    "loss",
    "error",
    "err",
    "perplexity",
    "ppl",
    "nll",
    "mse",
    "rmse",
    "mae",
    "bpb",
    "wer",
    "cer",
    "fid",
}
_HIGHER_IS_BETTER = {"accuracy", "acc", "score", "f1", "bleu", "auc", "reward", "precision", "recall", "map", "psnr"}


def parse_step(text: str) -> Step:
    """The step that `--step` names: `latest`, `best` or a number.

    Raises:
      UsageError: it is none of these.
    """
    if text in ("latest", "best"):
        return text
    if text.isdigit():
        return int(text)
    raise UsageError("the step cannot be read", seen=repr(text), expected="latest, best or a number such as 1000")


def step_number(name: str) -> int | None:
    """The step that a directory's name gives: `1000`, `step_1000`, `checkpoint-1000`, `00001000`; else None."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def steps_text(steps: Sequence[int]) -> str:
    """Steps as people read them, all of them, in order."""
    return ", ".join(map(str, sorted(steps))) or "none"


def best_step(root: epath.Path, steps: Mapping[int, epath.Path]) -> int:
    """The best step by the metrics that a CheckpointManager saved beside each.

    Orbax saves the metrics but not which way is better, so that comes from the metric's name (`val_loss` down,
    `accuracy` up), and nothing is guessed: where several metrics disagree, or no name says the way, that is an error.

    Raises:
      CheckpointError: no metrics were recorded, their names do not say which way is better, or they disagree.
    """
    metrics = {step: found for step, path in steps.items() if (found := _metrics(path))}
    known = f"steps: {steps_text(list(steps))}"
    if not metrics:
        raise CheckpointError(
            "there is no best step: the checkpoint has no metrics",
            where=str(root),
            seen=known,
            expected="STEP/metrics/metrics, as a CheckpointManager writes it for `save(..., metrics=...)`",
            remedy="name the step by its number, or take the latest",
        )
    choices: dict[str, int] = {}
    for name in sorted(set[str]().union(*metrics.values())):
        sign = _direction(name)
        if sign:
            scored = {step: values[name] for step, values in metrics.items() if name in values}
            choices[name] = max(scored, key=lambda step, s=scored, d=sign: (d * s[step], step))
    if len(set(choices.values())) == 1:
        return next(iter(choices.values()))
    listed = "; ".join(f"step {step}: {_metrics_text(metrics[step])}" for step in sorted(metrics))
    raise CheckpointError(
        "the metrics disagree on the best step"
        if choices
        else "the names of the metrics do not say which way is better",
        where=str(root),
        seen=listed,
        expected="metrics such as loss or accuracy that all point to one step",
        remedy="name the step by its number",
    )


def _metrics(step: epath.Path) -> dict[str, float]:
    file = step / "metrics" / "metrics"
    if not file.exists():
        return {}
    try:
        found: Any = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            "the metrics of a step cannot be read",
            where=str(file),
            seen=str(error),
            remedy="name the step by its number",
        ) from error
    if not isinstance(found, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124 (not NaN)
    }


def _direction(metric: str) -> int:
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    return (1 if words & _HIGHER_IS_BETTER else 0) - (1 if words & _LOWER_IS_BETTER else 0)


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(metrics.items()))
