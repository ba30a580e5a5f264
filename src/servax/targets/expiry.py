"""How long each part of a bundle lives (contract 10).

- An export is read by every jaxlib that was built within 6 months of the one that wrote it (`jax.export`,
  compatibility guarantees); the jaxlib that wrote it reads it for ever.
- An executable runs where its fingerprint is met, and nowhere else.
- A SavedModel is for the TensorFlow that it was made for, and later ones.
"""

from __future__ import annotations

import calendar
import datetime
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from servax.targets.manifest import ExpiryRecord

GUARANTEE_MONTHS = 6
"""Months that `jax.export` keeps reading what an older build wrote."""

_NIGHTLY = re.compile(r"dev(\d{4})(\d{2})(\d{2})")
_FIRST_EXPORT = datetime.date(2024, 6, 1)
"""`jax.export` became public in June 2024 (jax 0.4.30); an earlier file time is a constant that an archiver wrote."""


@dataclass(frozen=True, slots=True)
class BuildDate:
    """When jaxlib was built, as far as this machine can tell.

    Attributes:
      date: the day, UTC.
      exact: whether it is the day of the build, or the day the files came here, which is later.
      source: where the day was read.
    """

    date: datetime.date
    exact: bool
    source: str


def build_date(distribution: importlib.metadata.Distribution | None = None) -> BuildDate:
    """The day jaxlib was built.

    A nightly's version names its day (`0.12.0.dev20261105`). A release carries no build date, neither in its metadata
    nor in its libraries, and pip and uv set every file's time to the moment of installation. The earliest file time
    of the installed distribution is thus the build's where an installer kept the archive's times (a Debian or conda
    package), and otherwise the day of installation, an upper bound: `exact` is false for both.

    Args:
      distribution: jaxlib's installed distribution, unless another one is meant.
    """
    found = distribution or importlib.metadata.distribution("jaxlib")
    if nightly := _NIGHTLY.search(found.version):
        year, month, day = map(int, nightly.groups())
        return BuildDate(datetime.date(year, month, day), True, f"version {found.version}")
    dates = [date for date in _file_dates(found.files or ()) if date >= _FIRST_EXPORT]
    today = datetime.datetime.now(datetime.UTC).date()
    return BuildDate(min(dates, default=today), False, "file times of the installed jaxlib" if dates else "today")


def months_later(date: datetime.date, months: int) -> datetime.date:
    """The same day of the month `months` later, or that month's last day."""
    year, month = divmod(date.year * 12 + date.month - 1 + months, 12)
    return datetime.date(year, month + 1, min(date.day, calendar.monthrange(year, month + 1)[1]))


def export_expiry(built: BuildDate | None = None) -> ExpiryRecord:
    """The last build day of a jaxlib that is guaranteed to read exports written by the one installed here."""
    built = built or build_date()
    version = importlib.metadata.version("jaxlib")
    how = "" if built.exact else f", counted from {built.date.isoformat()}, the latest day it can have been built"
    return ExpiryRecord(
        target="export",
        until=months_later(built.date, GUARANTEE_MONTHS).isoformat(),
        bound_to=f"jaxlib {version}{how}",
    )


def executable_expiry(fingerprint: str) -> ExpiryRecord:
    """An executable: as long as its fingerprint, named by id, is that of the machine and its settings."""
    return ExpiryRecord(target="aot", bound_to=fingerprint)


def saved_model_expiry(tensorflow: str) -> ExpiryRecord:
    """A SavedModel: for this version of TensorFlow, and later ones."""
    return ExpiryRecord(target="saved_model", bound_to=f"tensorflow {tensorflow}")


def _file_dates(files: Iterable[importlib.metadata.PackagePath]) -> Iterator[datetime.date]:
    for file in files:
        try:
            seconds = file.locate().stat().st_mtime  # pyright: ignore[reportAttributeAccessIssue]  # a pathlib.Path
        except FileNotFoundError:
            continue
        yield datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
