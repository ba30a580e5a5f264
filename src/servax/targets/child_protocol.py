"""What parity and its child processes say to one another: a job in a file, a report of one line a fact, and outputs.

A child is `python -m servax.targets.child JOB.json`. It reads the job, answers the golden samples of one bucket
after another, and appends to `report.jsonl` in the job's results folder as it goes, so that what it did before it died
is known. Needs no JAX: the child that proves a SavedModel must not be able to import it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from etils import epath

from servax.core.errors import ArtifactUnavailable, PlatformError, ServaxError
from servax.stages.buckets import Bucket
from servax.targets.manifest import TargetName
from servax.targets.samples import Expected, Sample, from_bytes
from servax.targets.tensorfile import tensors_from_bytes, tensors_to_bytes

REPORT = "report.jsonl"

Array = np.ndarray[Any, Any]


Setting = bool | int | float | str | None


class Case(msgspec.Struct, frozen=True):
    """One bucket of one function to answer.

    Attributes:
      function: name of the function.
      bucket: the bucket's label.
      golden: path of the file with the samples.
    """

    function: str
    bucket: str
    golden: str

    @property
    def name(self) -> str:
        """`FUNCTION@BUCKET`."""
        return f"{self.function}@{self.bucket}"


class Job(msgspec.Struct, frozen=True):
    """What a child is asked to do.

    Attributes:
      target: the wrapper: `jit`, `aot`, `export` or `saved_model`.
      platform: where to run: `cpu`, `cuda`, `tpu`.
      bundle: directory of the bundle; while it is built, its temporary sibling, with a manifest.
      results: folder to write into; exists.
      cases: the buckets.
      model: `MODEL.py:NAME`, for `jit` only.
      settings: of `jax.config`, as they hold in the parent.
    """

    target: TargetName
    platform: str
    bundle: str
    results: str
    cases: tuple[Case, ...]
    model: str | None = None
    settings: dict[str, Setting] = {}


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The child begins a case; when nothing about it follows, it died there."""

    function: str
    bucket: str


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """A case ran: `outputs` is the name of the file in the results folder, `seconds` includes the program's loading."""

    function: str
    bucket: str
    outputs: str
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A case raised."""

    function: str
    bucket: str
    reason: str


class Unproven(msgspec.Struct, frozen=True, tag="unproven"):
    """A case cannot run on this machine: it lacks the platform."""

    function: str
    bucket: str
    reason: str


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    """A case cannot run from this bundle: its artifact is missing, damaged, or made for another machine."""

    function: str
    bucket: str
    reason: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The child has come to its end: the device it ran on, and versions of what it used."""

    device: str
    versions: dict[str, str]


Line = Started | Answered | Failed | Unproven | Unavailable | Finished


@dataclass(frozen=True, slots=True)
class Answer:
    """What a wrapper gave for one step of a sample: outputs cut to the sample's true sizes, and the new state, of which
    it keeps what the sample keeps.
    """

    outputs: Mapping[str, Array]
    state: Mapping[str, Expected] = field(default_factory=dict[str, Expected])


Answering = Callable[[Sample], Sequence[Answer]]
"""Runs the steps of a sample, one after another, from a state of zeros: an `Answer` a step."""


class Part(Protocol):
    """One wrapper of a bundle, as a child sees it."""

    def load(self, function: str, bucket: Bucket) -> Answering:
        """The program of a bucket, ready to run.

        Raises:
          PlatformError: this machine lacks the job's platform; the case is unproven.
          ArtifactUnavailable: the bundle has nothing for this case that this machine can use.
        """
        ...

    def device(self) -> str:
        """The device it runs on, for people."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the packages that ran."""
        ...


def main(arguments: Sequence[str], open_part: Callable[[Job], Part]) -> int:
    """Runs the job that `arguments` names, through the part that `open_part` opens, and returns the exit status.

    An error of one case is a line of the report, and the next case goes on; an error while the part is opened is a
    line for every case.
    """
    job = read_job(Path(arguments[0]))
    part: Part | None = None
    for case in job.cases:
        append(job, Started(case.function, case.bucket))
        try:
            part = part or open_part(job)
            start = time.perf_counter()
            answering = part.load(case.function, Bucket.parse(case.bucket))
            golden = from_bytes(epath.Path(case.golden).read_bytes(), case.golden)
            tensors: dict[str, Array] = {}
            for sample in golden.samples:
                tensors |= answer_tensors(sample.name, answering(sample))
        except PlatformError as error:
            append(job, Unproven(case.function, case.bucket, error.sentence()))
            continue
        except ArtifactUnavailable as error:
            append(job, Unavailable(case.function, case.bucket, error.sentence()))
            continue
        except Exception as error:  # each becomes a verdict; the child must live on for the other cases
            traceback.print_exc()
            append(job, Failed(case.function, case.bucket, _sentence(error)))
            continue
        name = f"{case.name}.safetensors"
        (Path(job.results) / name).write_bytes(tensors_to_bytes(tensors))
        append(job, Answered(case.function, case.bucket, name, time.perf_counter() - start))
    if part is not None:
        append(job, Finished(part.device(), part.versions()))
    return 0


def write_job(job: Job, path: Path) -> None:
    """Writes the job's file."""
    path.write_bytes(msgspec.json.encode(job))


def read_job(path: Path) -> Job:
    """The job of a file."""
    return msgspec.json.decode(path.read_bytes(), type=Job)


def append(job: Job, line: Line) -> None:
    """Adds a line to the report; it is on disk when this returns, whatever happens to the process next."""
    with (Path(job.results) / REPORT).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def read_report(results: Path) -> tuple[Line, ...]:
    """The lines of a report so far; a last line that was cut short is left out."""
    path = results / REPORT
    if not path.exists():
        return ()
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return tuple(msgspec.json.decode(line, type=Line) for line in whole.splitlines())


def answer_tensors(sample: str, answers: Sequence[Answer]) -> dict[str, Array]:
    """Answers as a file keeps them: `SAMPLE/STEP/outputs/NAME` and `SAMPLE/STEP/state/NAME`.

    Of a state of which elements were kept, `SAMPLE/STEP/state.shape/NAME` and `.norm` beside them.
    """
    tensors: dict[str, Array] = {}
    for number, answer in enumerate(answers):
        tensors |= {f"{sample}/{number}/outputs/{name}": array for name, array in answer.outputs.items()}
        for name, each in answer.state.items():
            tensors[f"{sample}/{number}/state/{name}"] = each.values
            if each.indices is not None:
                tensors[f"{sample}/{number}/state.shape/{name}"] = np.array(each.shape, np.int64)
                tensors[f"{sample}/{number}/state.norm/{name}"] = np.array(each.norm, np.float64)
    return tensors


def answer_to(expected: Expected, answers: Mapping[str, Array], place: str, name: str) -> Expected | None:
    """What a file of answers has for `PLACE/NAME`; None where it has nothing."""
    values = answers.get(f"{place}/{name}")
    if values is None:
        return None
    shape = answers.get(f"{place}.shape/{name}")
    if shape is None:
        return Expected.of(values)
    norm = float(answers[f"{place}.norm/{name}"])
    return Expected(tuple(shape.tolist()), values, expected.indices, norm)


def read_answers(path: Path) -> dict[str, Array]:
    """The tensors of an answers file, under the keys of `answer_tensors`."""
    return tensors_from_bytes(path.read_bytes())[0]


def _sentence(error: Exception) -> str:
    return error.sentence() if isinstance(error, ServaxError) else f"{type(error).__name__}: {error}"
