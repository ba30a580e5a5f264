from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from servax.core import events, monitoring
from servax.core.errors import BuildError, ModelError
from servax.core.tensors import Signature, TensorSpec
from servax.model.function import Function
from servax.stages import pipeline
from servax.stages.buckets import Bucket

DEVICE = jax.devices()[0]
BUCKET = Bucket.of(batch=2, length=3)
INPUTS = (TensorSpec.parse("mask", "float32[batch, length]"), TensorSpec.parse("x", "float32[batch, length]"))
KERNEL = np.full(3, 2, np.float32)
PARAMS = {"b": {"w": KERNEL}, "a": np.ones(3, np.float32)}
PATHS = (("a",), ("b", "w"))


def stateless_call(params: Any, state: Any, inputs: Any) -> Any:
    assert state is None
    return None, {"y": (inputs["x"] * inputs["mask"]) @ params["b"]["w"], "x": params["a"]}


def stateful_call(params: Any, state: Any, inputs: Any) -> Any:
    return {"total": state["total"] + inputs["x"].sum()}, {"y": inputs["x"] * state["total"][0]}


STATELESS = Function("embed", Signature(INPUTS), stateless_call)
STATEFUL = Function("count", Signature(INPUTS), stateful_call, state=(TensorSpec.parse("total", "float32[4]"),))

MASK = np.array([[1, 1, 0], [1, 0, 0]], np.float32)
X = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def put(*arrays: Any) -> tuple[Any, ...]:
    return tuple(jax.device_put(array, DEVICE) for array in arrays)


def test_the_nested_form_of_a_stateless_function() -> None:
    call = pipeline.nested_callable(STATELESS)
    assert call.__name__ == "embed"
    assert call(PARAMS, {"mask": MASK, "x": X})["y"].tolist() == [6, 8]


def test_the_nested_form_of_a_stateful_function() -> None:
    state, outputs = pipeline.nested_callable(STATEFUL)({}, {"total": np.ones(4, np.float32)}, {"x": X})
    assert state["total"].tolist() == [22] * 4
    assert outputs["y"].tolist() == X.tolist()


def test_the_flat_form_is_in_order_of_path_and_name() -> None:
    state, outputs = pipeline.flat_callable(STATELESS, PATHS)((PARAMS["a"], KERNEL), (), (MASK, X))
    assert state == ()
    assert [output.tolist() for output in outputs] == [[1, 1, 1], [6, 8]]
    state, outputs = pipeline.flat_callable(STATEFUL, ())((), (np.ones(4, np.float32),), (MASK, X))
    assert state[0].tolist() == [22] * 4


def test_the_flat_form_refuses_another_number_of_leaves() -> None:
    with pytest.raises(ValueError, match="zip"):
        pipeline.flat_callable(STATELESS, PATHS)((X,), (), (MASK, X))


def test_nested_avals_are_bound_to_no_device() -> None:
    params, inputs = pipeline.nested_avals(STATELESS, BUCKET, PARAMS)
    assert params["b"]["w"].shape == (3,)
    assert inputs["x"].shape == (2, 3)
    assert all(leaf.sharding is None for leaf in jax.tree.leaves((params, inputs)))
    assert len(pipeline.nested_avals(STATEFUL, BUCKET, PARAMS)) == 3


def test_flat_avals_are_committed() -> None:
    params, state, inputs = pipeline.flat_avals(STATEFUL, BUCKET, PARAMS, DEVICE)
    assert [leaf.shape for leaf in (*params, *state, *inputs)] == [(3,), (3,), (4,), (2, 3), (2, 3)]
    assert all(leaf.sharding == jax.sharding.SingleDeviceSharding(DEVICE) for leaf in (*params, *state, *inputs))


def test_64_bit_tensors_need_the_64_bit_mode() -> None:
    wide = Function("wide", Signature((TensorSpec.parse("x", "int64[batch]"),)), stateless_call)
    for make in (
        lambda: pipeline.nested_avals(wide, Bucket.of(batch=1), {}),
        lambda: pipeline.flat_avals(wide, Bucket.of(batch=1), {}, DEVICE),
    ):
        with pytest.raises(ModelError, match="64-bit mode is off") as caught:
            make()
        assert caught.value.where == "x"
        assert "int64[batch]" in str(caught.value.seen)
        assert "JAX_ENABLE_X64" in str(caught.value.remedy)
        with jax.enable_x64(True):
            assert jax.tree.leaves(make())[0].dtype == np.int64


def test_three_stages_each_timed_and_a_program_that_neither_traces_nor_compiles() -> None:
    traced = pipeline.trace_function(STATEFUL, BUCKET, PARAMS, DEVICE)
    assert traced.lowered is None
    assert set(traced.seconds) == {"trace"}
    lowered = pipeline.lower(traced)
    assert set(lowered.seconds) == {"trace", "lower"}
    stages = pipeline.compile(lowered)
    assert set(stages.seconds) == {"trace", "lower", "compile"}
    assert stages.where == "count@batch=2,length=3"
    assert stages.lowered is not None
    assert "@jit_count" in stages.lowered.as_text()

    arguments = put(PARAMS["a"], KERNEL), put(np.ones(4, np.float32)), put(MASK, X)
    assert stages.compiled is not None
    with jax.no_tracing(True), jax.transfer_guard("disallow"):
        (total,), (y,) = stages.compiled(*arguments)
    assert total.tolist() == [22] * 4
    assert y.tolist() == X.tolist()
    assert arguments[1][0].is_deleted()  # the state was donated


def test_arguments_that_the_program_does_not_read_are_kept() -> None:
    stages = pipeline.compile(pipeline.trace_function(STATEFUL, BUCKET, PARAMS, DEVICE))
    assert stages.report().memory["argument"] == 4 * (3 + 3 + 4 + 6 + 6)


def test_report() -> None:
    stages = pipeline.trace_function(STATEFUL, BUCKET, PARAMS, DEVICE)
    assert stages.report().operations == {}
    report = pipeline.compile(stages).report()
    assert (report.function, report.bucket) == ("count", BUCKET)
    assert report.donated == 1
    assert report.memory["alias"] == 16
    assert report.operations["stablehlo.reduce"] == 1
    assert report.constant_bytes == 0
    assert report.cost["flops"] > 0
    assert pipeline.trace_function(STATELESS, BUCKET, PARAMS, DEVICE).report().donated == 0


def test_a_function_that_does_not_trace() -> None:
    def call(params: Any, state: Any, inputs: Any) -> Any:
        if inputs["x"].sum() > 0:
            return None, {"y": inputs["x"]}
        return None, {}

    with pytest.raises(ModelError) as caught:
        pipeline.trace_function(Function("bad", Signature(INPUTS), call), BUCKET, {}, DEVICE)
    error = caught.value
    assert error.what == "the function 'bad' does not trace"
    assert error.where == "bad@batch=2,length=3"
    assert str(error.seen).startswith("TracerBoolConversionError")
    assert error.remedy
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    ("after", "seen", "expected"),
    [
        (lambda s: {"total": s["total"][:2]}, "total: float32[2]", "total: float32[4]"),
        (lambda s: {"total": s["total"].astype(jnp.int32)}, "total: int32[4]", "total: float32[4]"),
        (lambda s: {"sum": s["total"]}, "sum: float32[4]; total: nothing", "sum: nothing; total: float32[4]"),
        (lambda s: None, "total: nothing", "total: float32[4]"),
    ],
)
def test_a_function_that_returns_another_state(after: Any, seen: str, expected: str) -> None:
    function = Function("bad", Signature(INPUTS), lambda p, s, i: (after(s), {}), state=STATEFUL.state)
    for run in (
        lambda: pipeline.trace_function(function, BUCKET, {}, DEVICE),
        lambda: jax.eval_shape(pipeline.nested_callable(function), *pipeline.nested_avals(function, BUCKET, {})),
    ):
        with pytest.raises(ModelError, match="does not return the state") as caught:
            run()
        assert caught.value.seen == seen
        assert caught.value.expected == expected
        assert "(state, outputs)" in str(caught.value.remedy)


def test_an_operation_without_a_lowering() -> None:
    primitive = jax.extend.core.Primitive("unknown_operation")
    primitive.def_abstract_eval(lambda x: x)
    function = Function("bad", Signature(INPUTS), lambda p, s, i: (None, {"y": primitive.bind(i["x"])}))
    with pytest.raises(BuildError, match="cannot be lowered") as caught:
        pipeline.compile(pipeline.trace_function(function, BUCKET, {}, DEVICE))
    assert caught.value.where == "bad@batch=2,length=3"
    assert "unknown_operation" in str(caught.value.seen)


def test_a_program_that_xla_does_not_compile() -> None:
    target = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((2, 3), jnp.float32))
    function = Function("bad", Signature(INPUTS), lambda p, s, i: (None, {"y": target(i["x"])}))
    with pytest.raises(BuildError, match="XLA cannot compile") as caught:
        pipeline.compile(pipeline.trace_function(function, BUCKET, {}, DEVICE))
    assert caught.value.where == "bad@batch=2,length=3"
    assert "no_such_target" in str(caught.value.seen)


def test_results_come_in_the_order_of_the_jobs_and_events_as_they_end() -> None:
    second_is_done = threading.Event()
    seen: list[events.Event] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.StepStarted | events.StepAdvanced | events.StepFinished):
            seen.append(event)
        if isinstance(event, events.StepAdvanced):
            second_is_done.set()

    def first() -> str:
        assert second_is_done.wait(60)
        return "a"

    with events.listening(listen):
        results = pipeline.run_parallel({"f@x=1": first, "f@x=2": lambda: "b"}, "compile", workers=2)
    assert results == ["a", "b"]
    started, *advanced, finished = seen
    assert started == events.StepStarted("compile", 2)
    assert [event.detail for event in advanced if isinstance(event, events.StepAdvanced)] == ["f@x=2", "f@x=1"]
    assert isinstance(finished, events.StepFinished)


def test_no_jobs() -> None:
    assert pipeline.run_parallel({}, "compile") == []


def test_threads_of_jobs_are_loaders() -> None:
    monitoring.register()
    before = monitoring.counts(monitoring.LOADING)
    pipeline.run_parallel(
        {
            "f": lambda: pipeline.compile(
                pipeline.trace_function(STATELESS, Bucket.of(batch=5, length=3), PARAMS, DEVICE)
            )
        },
        "compile",
    )
    assert (monitoring.counts(monitoring.LOADING) - before).compiled >= 1


def test_contexts_of_the_caller_hold_in_the_jobs() -> None:
    def settings() -> tuple[Any, ...]:
        return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, jnp.arange(2).dtype

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        (found,) = pipeline.run_parallel({"f": settings}, "trace")
    assert found == (True, "highest", np.int64)
    assert settings() == (False, None, np.int32)


def test_the_first_error_drops_what_has_not_begun_and_says_where() -> None:
    begun: list[int] = []

    def job(index: int) -> Any:
        def run() -> None:
            begun.append(index)
            raise ModelError("no", where="x")

        return run

    seen: list[events.Event] = []
    with events.listening(seen.append), pytest.raises(ModelError) as caught:
        pipeline.run_parallel({f"f@batch={index}": job(index) for index in range(50)}, "compile", workers=1)
    assert caught.value.where == "f@batch=0: x"
    assert len(begun) < 50
    assert not any(isinstance(event, events.StepFinished) for event in seen)


@pytest.mark.parametrize(("where", "expected"), [(None, "f@batch=1"), ("f@batch=1", "f@batch=1")])
def test_an_error_is_labelled_once(where: str | None, expected: str) -> None:
    def job() -> None:
        raise ModelError("no", where=where)

    with pytest.raises(ModelError) as caught:
        pipeline.run_parallel({"f@batch=1": job}, "compile")
    assert caught.value.where == expected


def test_another_libraries_error_gets_a_note() -> None:
    def job() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        pipeline.run_parallel({"f@batch=1": job}, "compile")
    assert caught.value.__notes__ == ["at f@batch=1"]
