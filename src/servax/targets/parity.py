"""Parity: each wrapper, run in a child process, against the golden samples of the source function.

Nothing here imports JAX. The child opens the device itself, so the caller should hold no accelerator: on a GPU, one
whose backend was initialised with preallocation leaves the child no memory (run the caller with `JAX_PLATFORMS=cpu` or
`XLA_PYTHON_CLIENT_PREALLOCATE=false`); a TPU is opened by one process only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from servax.core.events import Notice, StepAdvanced, emit, step
from servax.stages.buckets import Bucket
from servax.targets import child_protocol as protocol
from servax.targets.bundle import Bundle
from servax.targets.child_protocol import Case, Job, Line, Setting
from servax.targets.comparison import Measurement, compare, judge
from servax.targets.manifest import TargetName, VerdictRecord
from servax.targets.samples import Golden, from_bytes

CHILD = "servax.targets.child"
"""The module that proves a target."""

TIMEOUT = 600.0
"""Seconds that a child may take over one bucket, on average."""

STDERR_TAIL = 1000
"""Characters of a dead child's output that its verdict keeps."""

_CRASH = "Fatal Python error:"
_PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "rocm": "rocm,cpu", "tpu": "tpu,cpu"}


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found of one target on one platform.

    Attributes:
      target: the wrapper.
      platform: where it ran.
      verdicts: one per function and bucket, in the order asked.
      measurements: every array that was compared.
      seconds: by `FUNCTION@BUCKET`: what the child took over it, the loading of its program included.
      device: the device the child ran on; None where it did not get that far.
      versions: of what the child used.
    """

    target: TargetName
    platform: str
    verdicts: tuple[VerdictRecord, ...]
    measurements: tuple[Measurement, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    device: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ChildRun:
    """What a child left behind: the lines of its report, and how it ended where it did not end well."""

    lines: tuple[Line, ...]
    ending: str | None = None
    tail: str = ""


def prove(
    bundle: Bundle,
    target: TargetName,
    platform: str,
    buckets: Mapping[str, Sequence[Bucket]],
    *,
    model: str | None = None,
    timeout: float = TIMEOUT,
    max_precision_error: float | None = None,
    unavailable: Literal["failed", "unproven"] = "failed",
) -> Proof:
    """One target of a bundle proved on one platform of this machine, in a child process.

    A child that dies, or does not end in time, is the verdict of the bucket it was at; those it had not come to are
    then tried one by one, each in a child of its own. What this machine cannot run is `unproven`.
    Emits the step `prove TARGET on PLATFORM`, one advance a bucket.

    Args:
      bundle: may be a draft; its manifest lists the golden samples.
      target: the wrapper.
      platform: `cpu`, `cuda` or `tpu`.
      buckets: which ones, by function.
      model: `MODEL.py:NAME`, for `jit`.
      timeout: seconds per bucket.
      max_precision_error: the largest difference to float32 that passes, relative to the output's scale.
      unavailable: the verdict of a bucket whose artifact is missing or of another machine: a failure while the bundle
        is built here, no more than `unproven` when it is verified elsewhere.

    Raises:
      BundleError: golden samples are missing or damaged.
    """
    cases = tuple(_case(bundle, name, bucket) for name, chosen in buckets.items() for bucket in chosen)
    golden = {case.name: from_bytes(bundle.read(_golden(bundle, case.name)), case.golden) for case in cases}
    outcomes = _Outcomes(target, platform, golden, max_precision_error, unavailable)
    with (
        step(outcomes.step, total=len(cases)),
        tempfile.TemporaryDirectory(prefix="servax-parity-") as scratch,
    ):
        waiting = cases
        alone = False
        while waiting:
            now = waiting[:1] if alone else waiting
            folder = Path(tempfile.mkdtemp(dir=scratch))
            job = Job(target, platform, str(bundle.root), str(folder), now, model, settings())
            run = run_child(job, timeout * len(now))
            outcomes.take(run, folder, now)
            waiting = tuple(case for case in waiting if case.name not in outcomes.verdicts)
            alone = True
    return outcomes.proof(cases)


def run_child(job: Job, timeout: float, module: str | None = None) -> ChildRun:
    """Runs a job in a child process to its end, or to `timeout` seconds.

    Args:
      job: its results folder exists.
      timeout: in seconds; a child that takes longer is killed.
      module: run by `python -m`; None: `CHILD`.
    """
    results = Path(job.results)
    protocol.write_job(job, results / "job.json")
    command = [
        sys.executable,
        "-m",
        module or CHILD,
        job.results + "/job.json",
    ]
    ending: str | None = None
    with (results / "output.txt").open("wb") as output:
        child = subprocess.Popen(
            command, env=environment(job), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            ending = f"child did not end within {timeout:.0f} s"
            status = 0
        finally:
            child.kill()
            child.wait()
    if status < 0:
        ending = f"child died with {_signal_name(-status)}"
    elif status > 0:
        ending = f"child ended with status {status}"
    return ChildRun(protocol.read_report(results), ending, _tail((results / "output.txt").read_text(errors="replace")))


def environment(job: Job) -> dict[str, str]:
    """A child's environment: this one's, without preallocation, on the job's platform."""
    values = dict(os.environ)
    values["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    values["JAX_PLATFORMS"] = _PLATFORMS.get(job.platform, job.platform)
    values["PYTHONFAULTHANDLER"] = "1"
    values["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if job.target == "jit":
        # The model may be importable here only because somebody added to sys.path.
        values["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and Path(path).is_dir())
    return values


def settings() -> dict[str, Setting]:
    """The settings of JAX that change code, as they hold on this thread; empty where JAX has not been imported."""
    if "jax" not in sys.modules:
        return {}
    from servax.stages.settings import settings_here

    # None is most settings' default; an enumeration is set through another setting, or not at all.
    return {name: value for name, value in settings_here().items() if isinstance(value, (bool, int, float, str))}


def report(proofs: Sequence[Proof]) -> bytes:
    """`parity.json`: every verdict with the numbers it rests on."""
    content = {
        "format": 1,
        "proofs": [
            {
                "target": proof.target,
                "platform": proof.platform,
                "device": proof.device,
                "versions": dict(proof.versions),
                "seconds": dict(proof.seconds),
                "verdicts": [verdict.model_dump() for verdict in proof.verdicts],
                "measurements": [measurement.as_json() for measurement in proof.measurements],
            }
            for proof in proofs
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"


class _Outcomes:
    """Verdicts as they come in from one child after another."""

    def __init__(
        self,
        target: TargetName,
        platform: str,
        golden: Mapping[str, Golden],
        max_precision_error: float | None,
        unavailable: Literal["failed", "unproven"],
    ) -> None:
        self.verdicts: dict[str, VerdictRecord] = {}
        self.step = f"prove {target} on {platform}"
        self._target: TargetName = target
        self._platform = platform
        self._golden = golden
        self._max_precision_error = max_precision_error
        self._unavailable: Literal["failed", "unproven"] = unavailable
        self._measurements: list[Measurement] = []
        self._seconds: dict[str, float] = {}
        self._finished: protocol.Finished | None = None

    def take(self, run: ChildRun, results: Path, cases: Sequence[Case]) -> None:
        """Adds what one child found of `cases`; at least one of them has a verdict afterwards."""
        started: str | None = None
        for line in run.lines:
            if isinstance(line, protocol.Finished):
                self._finished = line
                continue
            name = f"{line.function}@{line.bucket}"
            if isinstance(line, protocol.Started):
                started = name
                continue
            started = None
            if isinstance(line, protocol.Answered):
                self._seconds[name] = line.seconds
            self._add(name, self._verdict(line, name, results))
        ending = run.ending or "child ended without an answer"
        if started is not None:
            self._fail(started, f"{ending} in {started}", run.tail)
        elif all(case.name not in self.verdicts for case in cases):
            # It never came to a bucket: what stopped it stops it for all.
            for case in cases:
                self._fail(case.name, f"{ending} before {case.name}", run.tail)
        elif run.ending is not None and all(case.name in self.verdicts for case in cases):
            emit(Notice(f"{self._target}: {run.ending} after its last bucket was answered", level="warning"))

    def proof(self, cases: Sequence[Case]) -> Proof:
        """The proof of these cases, in their order."""
        finished = self._finished
        return Proof(
            self._target,
            self._platform,
            tuple(self.verdicts[case.name] for case in cases),
            tuple(self._measurements),
            self._seconds,
            finished.device if finished else None,
            finished.versions if finished else {},
        )

    def _verdict(
        self,
        line: protocol.Answered | protocol.Failed | protocol.Unproven | protocol.Unavailable,
        name: str,
        results: Path,
    ) -> VerdictRecord:
        golden = self._golden[name]
        if isinstance(line, protocol.Answered):
            found = compare(golden, protocol.read_answers(results / line.outputs), self._platform)
            self._measurements += found
            return judge(self._target, self._platform, golden, found, self._max_precision_error)
        if isinstance(line, protocol.Failed):
            return self._record(name, "failed", line.reason)
        if isinstance(line, protocol.Unavailable):
            return self._record(name, self._unavailable, line.reason)
        return self._record(name, "unproven", f"run servax verify there: {line.reason}")

    def _fail(self, name: str, reason: str, tail: str) -> None:
        self._add(name, self._record(name, "failed", f"{reason}; its output ends: {tail}" if tail else reason))

    def _record(self, name: str, verdict: Literal["failed", "unproven"], reason: str) -> VerdictRecord:
        golden = self._golden[name]
        return VerdictRecord(
            target=self._target,
            platform=self._platform,
            function=golden.function,
            bucket=golden.bucket,
            verdict=verdict,
            precision=golden.precision,
            reason=reason,
        )

    def _add(self, name: str, verdict: VerdictRecord) -> None:
        self.verdicts[name] = verdict
        emit(StepAdvanced(self.step, f"{name} {verdict.verdict}", self._seconds.get(name, 0.0)))


def _golden(bundle: Bundle, name: str) -> str:
    return bundle.manifest.golden.get(name, f"golden/{name.replace('@', '/', 1)}.safetensors")


def _case(bundle: Bundle, function: str, bucket: Bucket) -> Case:
    file = _golden(bundle, f"{function}@{bucket.label}")
    return Case(function, bucket.label, str(bundle.path(file)))


def _tail(output: str) -> str:
    """The last `STDERR_TAIL` characters; of a crash's stack, whose innermost call comes first, the beginning."""
    crash = output.rfind(_CRASH)
    if crash < 0:
        return output[-STDERR_TAIL:].strip()
    before = output[:crash][-STDERR_TAIL // 4 :]
    return (before + output[crash:])[:STDERR_TAIL].strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
