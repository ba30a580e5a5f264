from __future__ import annotations

import pytest

from servax.stages.buckets import Bucket
from servax.stages.cost_model import CostModel


def grid(cost, batches=(1, 4, 16), lengths=(8, 32, 128)) -> dict[Bucket, float]:
    return {Bucket.of(batch=b, length=n): cost(b, n) for b in batches for n in lengths}


@pytest.mark.parametrize(
    "cost",
    [
        lambda b, n: 2e-3 + 1e-4 * b * n,
        lambda b, n: 1e-3 + 1e-5 * b * n + 1e-6 * b * n * n,
        lambda b, n: 5e-3,
        lambda b, n: 1e-4 * b * n,
        lambda b, n: 1e-3 * n,
    ],
)
def test_a_cost_of_its_own_form_is_found_and_extended(cost) -> None:
    model = CostModel.fit(grid(cost), "batch")
    assert model.error < 1e-9
    for batch, length in ((2, 64), (64, 256), (3, 5)):
        assert model(Bucket.of(batch=batch, length=length)) == pytest.approx(cost(batch, length))


def test_noise_does_not_make_a_larger_bucket_cheaper() -> None:
    measured = {
        Bucket.of(batch=1): 1.0e-3,
        Bucket.of(batch=2): 1.4e-3,
        Bucket.of(batch=4): 1.2e-3,
        Bucket.of(batch=8): 2.1e-3,
    }
    model = CostModel.fit(measured, "batch")
    costs = [model(Bucket.of(batch=size)) for size in range(1, 100)]
    assert costs == sorted(costs)
    assert 0.05 < model.error < 0.3
    assert model.error == pytest.approx(max(abs(model(bucket) / cost - 1) for bucket, cost in measured.items()))


def test_one_measurement_grows_with_the_volume() -> None:
    model = CostModel.fit({Bucket.of(batch=4, length=8): 3.2e-3}, "batch")
    assert model(Bucket.of(batch=1, length=16)) == pytest.approx(1.6e-3)
    assert model.text() == "0.1 ms x batch x length"


def test_a_function_without_dimensions_costs_what_it_costs() -> None:
    assert CostModel.fit({Bucket(()): 7e-3}, None)(Bucket(())) == pytest.approx(7e-3)


def test_the_sum_reads_as_one() -> None:
    model = CostModel({(): 1.2e-4, (("batch", 1), ("length", 2)): 3e-8}, 0.0)
    assert model.text() == "0.12 ms + 3e-05 ms x batch x length^2"
