"""Plans by arithmetic: costs are given by hand, in seconds, and sums are written out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servax.runtime.planner import Ladder, Run, plan


def test_five_run_as_four_and_one_where_that_is_less_than_eight():
    ladder = Ladder([1, 4, 8], [1.0, 2.0, 4.0])
    assert ladder.total(5) == 2.0 + 1.0
    assert ladder.first(5) == 4
    assert ladder.first(1) == 1


def test_five_are_padded_to_eight_where_that_is_less_than_four_and_one():
    ladder = Ladder([1, 4, 8], [1.0, 2.0, 2.5])
    assert ladder.total(5) == 2.5
    assert ladder.first(5) == 8


def test_of_equal_plans_the_one_with_fewer_runs_is_taken():
    assert Ladder([1, 2], [1.0, 2.0]).first(2) == 2


def test_many_rows_run_in_the_size_that_costs_least_a_row():
    """16 rows for 2 s beat 32 for 5 s: 100 rows are 5 runs of 16 down to 20, then 16 and 4."""
    ladder = Ladder([4, 16, 32], [1.0, 2.0, 5.0])
    assert ladder.best == 16
    assert ladder.first(100) == 16
    assert ladder.total(100) == 5 * 2.0 + 2.0 + 1.0


def test_a_request_is_never_cut_by_the_plan():
    ladder = Ladder([1, 4, 8], [1.0, 2.0, 4.0])
    assert ladder.first(6, least=6) == 8
    assert ladder.first(5, least=3) == 4


def test_a_larger_bucket_is_taken_only_where_it_is_clearly_cheaper():
    assert Ladder([1, 4], [1.0, 0.9]).fitting(1) == 1
    assert Ladder([1, 4], [1.0, 0.7]).fitting(1) == 4
    assert Ladder([1, 4], [1.0, 0.7]).fitting(2) == 4


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 50)), min_size=1, max_size=4, unique_by=lambda each: each[0]),
    st.integers(1, 12),
)
def test_no_combination_of_runs_costs_less(options: list[tuple[int, int]], rows: int):
    """Against all combinations, tried one by one."""
    options.sort()
    rows = min(rows, options[-1][0])
    least = min(
        sum(seconds for _, seconds in chosen)
        for count in range(1, rows + 1)
        for chosen in itertools.combinations_with_replacement(options, count)
        if sum(capacity for capacity, _ in chosen) >= rows
    )
    ladder = Ladder(*zip(*options, strict=True))
    assert ladder.total(rows) == least
    assert ladder.first(rows) in ladder.capacities


SHORT, LONG = Ladder([1, 4, 8], [1.0, 2.0, 3.0]), Ladder([1, 4, 8], [4.0, 8.0, 12.0])
WITHIN = ((), (0,))


def test_lengths_run_apart_where_the_short_would_pay_for_the_long():
    """One long row is 4 s and four short ones 2 s; five rows at the long length are 12 s."""
    assert plan([SHORT, LONG], WITHIN, {0: 4, 1: 1}, head=1, least=1) == Run(1, 1, (1,))
    assert plan([SHORT, LONG], WITHIN, {0: 4, 1: 1}, head=0, least=1) == Run(0, 4, (0,))


def test_lengths_run_together_where_that_costs_less():
    """Three long rows pad to four, so that a short one rides along; apart it would be 1 s more."""
    assert plan([SHORT, LONG], WITHIN, {0: 1, 1: 3}, head=1, least=1) == Run(1, 4, (1, 0))
    assert plan([SHORT, LONG], WITHIN, {0: 1, 1: 3}, head=0, least=1) == Run(1, 4, (0, 1))


def test_free_places_are_filled_where_a_run_is_saved():
    """Of three short rows one fits beside the long ones: 1 + 1 + 1 s become 1 + 1."""
    dear = Ladder([1], [1.0])
    assert plan([dear, LONG], WITHIN, {0: 3, 1: 3}, head=1, least=1) == Run(1, 4, (1, 0))


def test_gains_that_are_noise_join_nothing():
    large = Ladder([8], [3.02])
    assert plan([Ladder([8], [3.0]), large], WITHIN, {0: 2, 1: 2}, head=0, least=1) == Run(1, 8, (0, 1))
    shape = plan([Ladder([8], [0.001]), Ladder([2, 8], [3.0, 2.99])], WITHIN, {0: 2, 1: 2}, head=0, least=1).shape
    assert shape == 0


def test_a_shape_without_room_for_the_head_is_not_joined():
    assert plan([SHORT, Ladder([2], [0.1])], WITHIN, {0: 6, 1: 1}, head=0, least=6) == Run(0, 8, (0,))


@pytest.mark.parametrize("rows", [9, 17, 1000])
def test_rows_beyond_the_largest_are_planned_too(rows):
    assert SHORT.first(rows) == 8
    assert SHORT.total(rows) >= rows * 3.0 / 8
