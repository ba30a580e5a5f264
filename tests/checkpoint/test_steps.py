import json
from pathlib import Path

import pytest
from etils import epath

from servax.checkpoint.steps import best_step, parse_step, step_number
from servax.core.errors import CheckpointError, UsageError


@pytest.mark.parametrize(("text", "step"), [("latest", "latest"), ("best", "best"), ("1000", 1000)])
def test_a_step_is_parsed(text, step):
    assert parse_step(text) == step


def test_another_text_is_a_usage_error():
    with pytest.raises(UsageError) as caught:
        parse_step("newest")
    assert caught.value.seen == "'newest'"
    assert "latest, best or a number" in caught.value.expected


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("1000", 1000),
        ("step_1000", 1000),
        ("checkpoint-500", 500),
        ("00000012", 12),
        ("state", None),
        ("10.orbax-checkpoint-tmp-9", None),
        ("v1.5", None),
    ],
)
def test_the_number_of_a_step_is_read_off_its_directory(name, number):
    assert step_number(name) == number


def steps_with(tmp_path: Path, **metrics: dict[str, float]) -> dict[int, epath.Path]:
    found = {}
    for name, values in metrics.items():
        step = tmp_path / name.removeprefix("s")
        (step / "metrics").mkdir(parents=True)
        (step / "metrics" / "metrics").write_text(json.dumps(values))
        found[int(step.name)] = epath.Path(step)
    return found


@pytest.mark.parametrize(
    ("metrics", "best"),
    [
        ({"s1": {"loss": 3.0}, "s2": {"loss": 1.0}, "s3": {"loss": 2.0}}, 2),
        ({"s1": {"eval/accuracy": 0.5}, "s2": {"eval/accuracy": 0.9}}, 2),
        ({"s1": {"val_loss": 1.0, "acc": 0.9}, "s2": {"val_loss": 2.0, "acc": 0.5}}, 1),
        ({"s1": {"loss": 1.0, "seconds": 9.0}, "s2": {"loss": 0.5, "seconds": 8.0}}, 2),
        ({"s1": {"loss": 1.0}, "s2": {"loss": 1.0}}, 2),
        ({"s1": {"loss": 1.0}, "s2": {"loss": float("nan")}}, 1),
    ],
)
def test_the_best_step_is_the_one_its_metrics_name(tmp_path, metrics, best):
    assert best_step(epath.Path(tmp_path), steps_with(tmp_path, **metrics)) == best


def test_metrics_that_disagree_are_listed(tmp_path):
    steps = steps_with(tmp_path, s1={"loss": 1.0, "accuracy": 0.1}, s2={"loss": 2.0, "accuracy": 0.9})
    with pytest.raises(CheckpointError) as caught:
        best_step(epath.Path(tmp_path), steps)
    assert "disagree" in caught.value.what
    assert caught.value.seen == "step 1: accuracy 0.1, loss 1; step 2: accuracy 0.9, loss 2"
    assert caught.value.remedy == "name the step by its number"


def test_a_metric_whose_name_says_nothing_is_not_guessed(tmp_path):
    with pytest.raises(CheckpointError, match="do not say which way is better"):
        best_step(epath.Path(tmp_path), steps_with(tmp_path, s1={"q": 1.0}, s2={"q": 2.0}))


def test_damaged_metrics_are_named(tmp_path):
    steps = steps_with(tmp_path, s1={"loss": 1.0})
    (tmp_path / "1" / "metrics" / "metrics").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        best_step(epath.Path(tmp_path), steps)
    assert caught.value.where == str(tmp_path / "1" / "metrics" / "metrics")
