import datetime
import os
from importlib.metadata import PathDistribution

import pytest

from servax.targets import expiry

DAY = datetime.date(2026, 11, 30)


def distribution(tmp_path, version, times):
    """An installed distribution whose files have these times."""
    info = tmp_path / f"jaxlib-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: jaxlib\nVersion: {version}\n")
    names = []
    for number, day in enumerate(times):
        file = tmp_path / f"library{number}.so"
        file.write_bytes(b"")
        seconds = datetime.datetime.combine(day, datetime.time(12), datetime.UTC).timestamp()
        os.utime(file, (seconds, seconds))
        names.append(f"{file.name},,")
    (info / "RECORD").write_text("\n".join(names) + "\n")
    return PathDistribution(info)


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        ((2026, 11, 30), (2027, 5, 30)),
        ((2026, 8, 31), (2027, 2, 28)),
        ((2027, 8, 31), (2028, 2, 29)),
        ((2026, 6, 17), (2026, 12, 17)),
        ((2026, 12, 31), (2027, 6, 30)),
        ((2026, 1, 1), (2026, 7, 1)),
    ],
)
def test_six_months_by_the_calendar(date, expected):
    assert expiry.months_later(datetime.date(*date), 6) == datetime.date(*expected)


def test_a_nightly_names_its_day(tmp_path):
    built = expiry.build_date(distribution(tmp_path, "0.12.1.dev20261105", [DAY]))
    assert (built.date, built.exact) == (datetime.date(2026, 11, 5), True)


def test_a_release_is_dated_by_its_oldest_file_and_says_that_this_is_no_proof(tmp_path):
    built = expiry.build_date(distribution(tmp_path, "0.10.2", [DAY, datetime.date(2026, 6, 17)]))
    assert (built.date, built.exact) == (datetime.date(2026, 6, 17), False)


def test_the_constant_of_an_archiver_is_no_date(tmp_path):
    built = expiry.build_date(distribution(tmp_path, "0.10.2", [datetime.date(1980, 1, 1), DAY]))
    assert built.date == DAY


def test_an_export_is_good_for_six_months_of_builds():
    record = expiry.export_expiry(expiry.BuildDate(datetime.date(2026, 6, 17), True, "test"))
    assert (record.target, record.until) == ("export", "2026-12-17")
    guessed = expiry.export_expiry(expiry.BuildDate(datetime.date(2026, 6, 17), False, "test"))
    assert "the latest day it can have been built" in str(guessed.bound_to)


def test_the_jaxlib_installed_here_has_a_date():
    assert expiry.build_date().date <= datetime.datetime.now(datetime.UTC).date()


def test_executables_and_saved_models_are_bound():
    assert expiry.executable_expiry("abc").bound_to == "abc"
    assert expiry.saved_model_expiry("2.21.0").bound_to == "tensorflow 2.21.0"
