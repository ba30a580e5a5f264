import numpy as np
import pytest

from servax.targets.comparison import compare, judge
from servax.targets.samples import Expected, Golden, Rounding, Sample, Step

F32 = 2.0**-24
Y = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
STATE = np.array([5.0], np.float32)


def golden(precision=None):
    step = Step({}, {"y": Expected.of(Y), "n": Expected.of(np.array([3, 4]))}, {"s": Expected.of(STATE)})
    rounding = {name: {"cpu": Rounding(F32, F32), "cuda": Rounding(2.0**-11, 2.0**-11)} for name in ("y", "state/s")}
    return Golden("predict", "batch=2", (Sample("full", {"batch": 2}, (step, step)),), rounding, precision)


def answers(**changes):
    arrays = {"full/0/outputs/y": Y, "full/0/outputs/n": np.array([3, 4]), "full/0/state/s": STATE}
    arrays |= {key.replace("full/0", "full/1"): array for key, array in arrays.items()}
    return {key: array for key, array in (arrays | changes).items() if array is not None}


def verdict(given, platform="cpu", **options):
    measured = compare(golden(options.pop("precision", None)), given, platform)
    return judge("aot", platform, golden(), measured, **options)


def test_equal_answers_are_proved_with_numbers():
    measured = compare(golden(), answers(), "cpu")
    assert [(each.step, each.array) for each in measured] == [
        (0, "y"),
        (0, "n"),
        (0, "state/s"),
        (1, "y"),
        (1, "n"),
        (1, "state/s"),
    ]
    found = judge("aot", "cpu", golden(), measured)
    assert (found.target, found.platform, found.function, found.bucket) == ("aot", "cpu", "predict", "batch=2")
    assert found.verdict == "proved"
    assert found.error == 0
    assert found.reason is None


def test_a_last_bit_is_proved_and_measured():
    found = verdict(answers(**{"full/1/outputs/y": Y + np.float32(1e-6)}))
    assert found.verdict == "proved"
    assert found.error == pytest.approx(1e-6, rel=0.5)
    # the scale of y is 4, and its largest element allows no more
    assert found.tolerance == pytest.approx(4 * 2**11 * F32)


def test_a_thousandth_fails_and_is_named():
    found = verdict(answers(**{"full/1/outputs/y": Y * np.float32(1.001)}))
    assert found.verdict == "failed"
    assert found.error == pytest.approx(4e-3, rel=1e-3)
    assert "y of sample full, step 2: off by 0.004" in str(found.reason)
    assert "[1, 1] is 4.004, expected 4.0" in str(found.reason)


def test_tolerances_follow_the_platform():
    given = answers(**{"full/0/outputs/y": Y * np.float32(1.001)})
    assert verdict(given, "cuda").verdict == "proved"


def test_a_wrong_state_fails():
    found = verdict(answers(**{"full/1/state/s": STATE + 1}))
    assert found.verdict == "failed"
    assert "state/s of sample full, step 2" in str(found.reason)


def test_a_wrong_integer_fails():
    found = verdict(answers(**{"full/0/outputs/n": np.array([3, 5])}))
    assert found.verdict == "failed"
    assert found.error == 1
    assert found.tolerance == 0


TOKENS = np.arange(100).reshape(4, 25)


def tokens(sizes, rounding):
    samples = tuple(
        Sample(name, {}, (Step({}, {"t": Expected.of(TOKENS.reshape(-1)[:size])}),)) for name, size in sizes.items()
    )
    return Golden("predict", "batch=4", samples, {"t": {"cpu": rounding}})


def judged(made, wrong):
    """The verdict where the first elements of each sample, as many as `wrong` says, are wrong."""
    given = {}
    for sample in made.samples:
        values = sample.steps[0].outputs["t"].values.copy()
        values[: wrong.get(sample.name, 0)] += 1
        given[f"{sample.name}/0/outputs/t"] = values
    return judge("aot", "cpu", made, compare(made, given, "cpu"))


DECIDED = Rounding(F32, F32 * 8)


def test_a_few_integers_that_rounding_decides_are_accepted_and_counted():
    made = tokens({"full": 100, "alone": 1, "padded": 50}, DECIDED)
    found = judged(made, {"full": 2, "alone": 1})
    assert found.verdict == "proved"
    assert found.error == 0
    assert found.reason == "3 of t's integers decided otherwise by rounding"
    assert judged(made, {}).reason is None


def test_more_of_them_over_all_samples_fail():
    made = tokens({"full": 100, "alone": 1, "padded": 50}, DECIDED)
    found = judged(made, {"full": 3, "alone": 1})
    assert found.verdict == "failed"
    assert "3 of 100 elements" in str(found.reason)
    assert judged(made, {"full": 100, "alone": 1, "padded": 50}).verdict == "failed"


def test_a_single_integer_must_be_right():
    assert judged(tokens({"full": 1}, DECIDED), {"full": 1}).verdict == "failed"
    assert judged(tokens({"full": 1, "padded": 1}, DECIDED), {"full": 1, "padded": 1}).verdict == "failed"


def test_integers_of_integers_are_exact():
    assert judged(tokens({"full": 100}, Rounding(0.0, 0.0)), {"full": 1}).verdict == "failed"


def test_a_missing_array_fails():
    found = verdict(answers(**{"full/0/outputs/y": None}))
    assert found.verdict == "failed"
    assert found.error is None
    assert "y of sample full: the wrapper gave no such array" in str(found.reason)


def test_a_wrong_shape_fails_without_a_number():
    measured = compare(golden(), answers(**{"full/0/outputs/y": Y[:1]}), "cpu")
    found = judge("aot", "cpu", golden(), measured)
    assert found.verdict == "failed"
    assert "shape [1, 2], expected [2, 2]" in str(found.reason)
    assert measured[0].as_json()["error"] is None


def test_the_worst_come_first_and_the_rest_are_counted():
    wrong = {f"full/{step}/outputs/y": Y + 1 for step in (0, 1)}
    wrong |= {f"full/{step}/state/s": STATE + 9 for step in (0, 1)}
    found = verdict(answers(**wrong))
    assert str(found.reason).startswith("state/s of sample full: off by 9")
    assert "and 1 more arrays, see parity.json" in str(found.reason)


def test_precision_is_reported_and_gates_only_when_asked():
    measured = compare(golden(0.02), answers(), "cpu")
    reported = judge("aot", "cpu", golden(0.02), measured)
    assert reported.verdict == "proved"
    assert reported.precision == 0.02
    assert judge("aot", "cpu", golden(0.02), measured, 0.05).verdict == "proved"
    refused = judge("aot", "cpu", golden(0.02), measured, 0.01)
    assert refused.verdict == "failed"
    assert "differs from float32 by 0.02" in str(refused.reason)
    assert "--max-precision-error" in str(refused.reason)
