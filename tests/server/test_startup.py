from servax.core.events import StepAdvanced, emit, step
from servax.protocols.dataplane import LoadingStep
from servax.server.startup import Startup


def test_steps_are_kept_in_order_with_what_is_done():
    startup = Startup()
    with startup:
        with step("restore"):
            assert startup.steps() == (LoadingStep("restore", 0, 0, None),)
        with step("load executables", 3):
            emit(StepAdvanced("load executables", "predict@batch=1"))
            emit(StepAdvanced("elsewhere", "x"))
            restored, loading = startup.steps()
            assert (restored.step, restored.seconds is not None) == ("restore", True)
            assert loading == LoadingStep("load executables", 1, 3, None)
    with step("later"):
        assert [each.step for each in startup.steps()] == ["restore", "load executables"]
    assert startup.steps()[1].done == 3
