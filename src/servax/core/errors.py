"""Errors of servax, each saying what happened, where, what was seen, what was expected and what to change.

```
ServaxError
├── UsageError              the call itself is wrong (exit 2)
├── ModelError              the model's definition does not fit servax
├── CheckpointError         a checkpoint cannot be read, or does not match the model
├── BuildError              a bundle could not be built
│   └── ParityError         a wrapper does not give the source's numbers
├── BundleError             a bundle is damaged, incomplete or of another version
├── StartupError            a servable cannot become ready (exit 3)
│   ├── ArtifactUnavailable a required wrapper cannot be used on this machine
│   ├── PlatformError       the device asked for is not there
│   └── MemoryShortage      parameters do not fit beside what is there
├── RequestError            a request is wrong; carries an HTTP status
│   ├── InvalidInput        400
│   ├── Unauthorized        401
│   ├── Forbidden           403
│   ├── NotFound            404
│   └── TooLarge            413
└── ServiceError            the request is fine, the service is not
    ├── NotReady            503
    ├── Overloaded          429
    ├── DeadlineExceeded    504
    └── ExecutionError      500, the device failed
        └── RecompileError  500, a call would have compiled after ready (contract 1)
```
"""

from __future__ import annotations

from typing import ClassVar


class ServaxError(Exception):
    """An error with its parts kept apart, so that a CLI, a log and a wire format can each show them.

    Attributes:
      what: one sentence that says what went wrong.
      where: the tensor, leaf path, file or bucket it went wrong at, if there is one.
      seen: what was found there.
      expected: what should have been there.
      remedy: what to change, as an instruction.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        seen: str | None = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.seen = seen
        self.expected = expected
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (
            ("where", self.where),
            ("seen", self.seen),
            ("expected", self.expected),
            ("remedy", self.remedy),
        ):
            if text is not None:
                lines.append(f"  {label + ':':<9} {text}")
        return "\n".join(lines)

    def sentence(self) -> str:
        """The same on one line, for wire formats whose error is a single string."""
        parts = [self.what.rstrip(".")]
        for label, text in (("at", self.where), ("seen", self.seen), ("expected", self.expected)):
            if text is not None:
                parts.append(f"{label} {text}")
        line = "; ".join(parts) + "."
        return f"{line} {self.remedy}" if self.remedy else line


class UsageError(ServaxError):
    """The call itself is wrong: an unknown option, a missing argument, a contradiction."""

    exit_code = 2


class ModelError(ServaxError):
    """The model's definition does not fit: a signature, a constant, a dependence on padding."""


class CheckpointError(ServaxError):
    """A checkpoint cannot be read, or its leaves do not match the model's parameters."""


class BuildError(ServaxError):
    """A bundle could not be built; nothing is left behind."""


class ParityError(BuildError):
    """A wrapper does not give the numbers of the function it wraps."""


class BundleError(ServaxError):
    """A bundle is damaged, incomplete, or written by a version that this one does not read."""


class StartupError(ServaxError):
    """A servable cannot become ready."""

    exit_code = 3


class ArtifactUnavailable(StartupError):
    """A required wrapper cannot be used on this machine."""


class PlatformError(StartupError):
    """The device asked for is not there."""


class MemoryShortage(StartupError):
    """Parameters do not fit beside what the device already holds."""


class RequestError(ServaxError):
    """A request that cannot be answered as it stands; `status` is its HTTP status."""

    status: ClassVar[int] = 400


class InvalidInput(RequestError):
    """A tensor is missing, unknown, or has the wrong dtype, shape or values."""


class Unauthorized(RequestError):
    """The request carries no key, or one that this server does not know."""

    status = 401


class Forbidden(RequestError):
    """The key is known, and not good for this: an administrator's is needed."""

    status = 403


class NotFound(RequestError):
    """No such model, version or function."""

    status = 404


class TooLarge(RequestError):
    """A request exceeds the largest bucket or a size limit."""

    status = 413


class ServiceError(ServaxError):
    """The request is fine but cannot be answered now; `status` is its HTTP status.

    Attributes:
      retry_after: seconds after which another try is worth it; None where it is not.
    """

    status: ClassVar[int] = 503
    retry_after: float | None = None


class NotReady(ServiceError):
    """The servable is loading, warming, draining or gone."""

    retry_after = 1.0


class Overloaded(ServiceError):
    """A queue is full; `retry_after` is when what waits will be done, by measured costs."""

    status = 429
    retry_after = 1.0


class DeadlineExceeded(ServiceError):
    """The deadline passed before the request reached the device."""

    status = 504


class ExecutionError(ServiceError):
    """The device failed while it ran the request."""

    status = 500


class RecompileError(ExecutionError):
    """A call after ready would have traced, lowered, compiled, or moved data implicitly (contract 1)."""


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message: what one of our own says it has seen of a library's."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
