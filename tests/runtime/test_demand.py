from servax.runtime.demand import Demand


def test_one_client_after_another_is_alone_whatever_the_rate():
    demand, now = Demand(0.0), 0.0
    for _ in range(2000):
        demand.arrived(now)
        assert demand.expected(now) == 1
        now += 0.0005
        demand.answered(now, 1)
        now += 0.00001


def test_clients_that_ask_together_are_expected_together_until_they_stop():
    demand, now = Demand(0.0), 0.0
    for _ in range(50):
        for _ in range(16):
            demand.arrived(now)
            now += 0.0001
        assert demand.unanswered == 16
        now += 0.001
        demand.answered(now, 16)
    assert demand.expected(now) == 16
    assert 0.00009 < demand.gap < 0.01
    now += 1.0
    demand.arrived(now)
    assert demand.expected(now) == 1


def test_few_and_far_between_are_not_waited_for():
    """Arrivals at random, 200 a second, each answered after 1 ms: 0.2 unanswered on average."""
    demand, now = Demand(0.0), 0.0
    for index in range(200):
        demand.arrived(now)
        demand.answered(now + 0.001, 1)
        assert demand.expected(now + 0.001) == 1
        now += 0.005 + 0.001 * (index % 3)


def test_pauses_do_not_count_as_gaps():
    demand = Demand(0.0)
    demand.arrived(0.0)
    demand.arrived(3600.0)
    assert demand.gap <= 0.05
    assert demand.quiet(3600.5) == 0.5
