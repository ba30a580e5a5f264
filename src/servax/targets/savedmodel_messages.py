"""What the child that makes a SavedModel is asked, and the lines that it answers with while it works."""

from __future__ import annotations

import msgspec

from servax.core import errors
from servax.core.errors import BuildError, ServaxError


class WriteJob(msgspec.Struct, frozen=True):
    """What to make.

    Attributes:
      bundle: directory of the bundle, which has a manifest, exports and parameters.
      directory: where the SavedModel goes; does not exist yet.
      left_out: functions that are no signatures, and why.
      tensorflow: the version that will read it; None: the installed one.
    """

    bundle: str
    directory: str
    left_out: dict[str, str] = {}
    tensorflow: str | None = None


class Told(msgspec.Struct, frozen=True, tag="told"):
    """A notice for people."""

    message: str
    level: str


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    """One function is done."""

    function: str
    seconds: float


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The SavedModel is written; `record` is its `SavedModelRecord` as JSON."""

    record: str


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """An error of servax, by the name of its class and its parts."""

    kind: str
    what: str
    where: str | None
    seen: str | None
    expected: str | None
    remedy: str | None

    @classmethod
    def of(cls, error: ServaxError) -> Raised:
        return cls(type(error).__name__, error.what, error.where, error.seen, error.expected, error.remedy)

    def error(self) -> ServaxError:
        """The error again."""
        kind: type[ServaxError] = getattr(errors, self.kind, BuildError)
        return kind(self.what, where=self.where, seen=self.seen, expected=self.expected, remedy=self.remedy)


Line = Told | Advanced | Written | Raised
