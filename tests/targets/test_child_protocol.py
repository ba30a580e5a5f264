import subprocess
import sys

import numpy as np
import pytest

from servax.core.errors import ArtifactUnavailable, InvalidInput, PlatformError
from servax.targets import child_protocol as protocol
from servax.targets.child_protocol import Answer, Answered, Case, Failed, Finished, Job, Started, Unavailable, Unproven
from servax.targets.samples import Draw, Expected, Golden, Sample, Step, to_bytes


class Doubling:
    """Answers `y = 2 * x`; raises what it is told to for the bucket `batch=1`."""

    def __init__(self, error=None):
        self.error = error

    def load(self, function, bucket):
        if self.error is not None and bucket.label == "batch=1":
            raise self.error
        return lambda sample: [
            Answer({"y": 2 * step.inputs["x"]}, {"s": Expected.of(np.ones(1))}) for step in sample.steps
        ]

    def device(self):
        return "abacus"

    def versions(self):
        return {"numpy": "2"}


@pytest.fixture
def job(tmp_path):
    cases = []
    for size in (1, 2):
        draw = Draw(size, "normal", "float32", (size,))
        step = Step({"x": draw}, {"y": Expected.of(2 * draw.array())}, {}, {"x": draw.array()})
        file = tmp_path / f"{size}.safetensors"
        file.write_bytes(to_bytes(Golden("f", f"batch={size}", (Sample("full", {"batch": size}, (step, step)),))))
        cases.append(Case("f", f"batch={size}", str(file)))
    (tmp_path / "results").mkdir()
    job = Job("export", "cpu", "b", str(tmp_path / "results"), tuple(cases), settings={"jax_enable_x64": True})
    protocol.write_job(job, tmp_path / "job.json")
    return job


def run(job, tmp_path, part):
    assert protocol.main([str(tmp_path / "job.json")], part) == 0
    return protocol.read_report(tmp_path / "results")


def test_a_job_comes_back_from_its_file(job, tmp_path):
    assert protocol.read_job(tmp_path / "job.json") == job


def test_each_case_is_started_answered_and_its_outputs_written(job, tmp_path):
    lines = run(job, tmp_path, lambda _: Doubling())
    assert [type(line) for line in lines] == [Started, Answered, Started, Answered, Finished]
    assert lines[-1] == Finished("abacus", {"numpy": "2"})
    answered = lines[3]
    assert answered.seconds > 0
    arrays = protocol.read_answers(tmp_path / "results" / answered.outputs)
    assert sorted(arrays) == [f"full/{step}/{each}" for step in (0, 1) for each in ("outputs/y", "state/s")]
    np.testing.assert_array_equal(
        arrays["full/1/outputs/y"], 2 * np.random.RandomState(2).standard_normal(2).astype(np.float32)
    )


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ZeroDivisionError("by zero"), Failed, "ZeroDivisionError: by zero"),
        (InvalidInput("odd", seen="3"), Failed, "odd; seen 3."),
        (PlatformError("no cuda here"), Unproven, "no cuda here."),
        (ArtifactUnavailable("no executable"), Unavailable, "no executable."),
    ],
)
def test_an_error_is_a_line_and_the_next_case_goes_on(job, tmp_path, error, kind, reason):
    lines = run(job, tmp_path, lambda _: Doubling(error))
    assert [type(line) for line in lines] == [Started, kind, Started, Answered, Finished]
    assert lines[1].reason == reason


def test_a_part_that_does_not_open_is_a_line_for_every_case(job, tmp_path):
    def refuse(_):
        raise PlatformError("no cuda here")

    lines = run(job, tmp_path, refuse)
    assert [type(line) for line in lines] == [Started, Unproven, Started, Unproven]


def test_a_line_that_was_cut_short_is_left_out(job, tmp_path):
    protocol.append(job, Started("f", "batch=1"))
    with (tmp_path / "results" / protocol.REPORT).open("ab") as file:
        file.write(b'{"type":"answ')
    assert protocol.read_report(tmp_path / "results") == (Started("f", "batch=1"),)


def test_no_report_is_no_lines(tmp_path):
    assert protocol.read_report(tmp_path) == ()


def test_the_protocol_needs_no_jax():
    code = (
        "import sys\nsys.modules['jax'] = None\nimport servax.targets.child_protocol, servax.targets.parity\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('flax', 'orbax', 'tensorflow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
