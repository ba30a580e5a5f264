import threading

import jax
import pytest

from servax.targets.compilation_cache import suspended_cache


def enabled() -> bool:
    return jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize("before", [True, False])
def test_the_cache_is_off_inside_and_as_before_afterwards(before):
    outside = enabled()
    jax.config.update("jax_enable_compilation_cache", before)
    try:
        with suspended_cache():
            assert not enabled()
            with suspended_cache():
                assert not enabled()
            assert not enabled()
        assert enabled() is before
    finally:
        jax.config.update("jax_enable_compilation_cache", outside)


def test_an_error_inside_switches_the_cache_on_again():
    def fail():
        with suspended_cache():
            return 1 / 0

    before = enabled()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert enabled() is before


def test_the_last_of_several_threads_switches_the_cache_on():
    before = enabled()
    first_in, second_done = threading.Event(), threading.Event()
    seen = []

    def hold():
        with suspended_cache():
            first_in.set()
            second_done.wait(timeout=60)
            seen.append(enabled())

    thread = threading.Thread(target=hold)
    thread.start()
    first_in.wait(timeout=60)
    with suspended_cache():
        pass
    seen.append(enabled())
    second_done.set()
    thread.join()
    assert seen == [False, False]
    assert enabled() is before
