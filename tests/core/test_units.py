import pytest

from servax.core.errors import UsageError
from servax.core.units import duration_text, parse_duration, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 67_108_864),
        ("1GiB", 1_073_741_824),
        ("1.5KiB", 1536),
        ("10MB", 10_000_000),
        ("2 kb", 2000),
        ("7B", 7),
        ("1024", 1024),
        (1024, 1024),
        ("1TiB", 1_099_511_627_776),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5ms", 0.005),
        ("500us", 0.0005),
        ("1.5s", 1.5),
        ("2m", 120),
        ("1h", 3600),
        ("30", 30),
        (0.25, 0.25),
        (".5 s", 0.5),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "64 Mib/s", "nan", "1e3", "5 parsecs", "٣"])
def test_what_is_neither_is_refused(text):
    with pytest.raises(UsageError, match="a size cannot be read"):
        parse_size(text)
    with pytest.raises(UsageError, match="a duration cannot be read"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["64MiB", "1GiB", "1KiB", "1000", "0", "3TiB"])
def test_a_size_is_written_as_it_is_read(text):
    assert size_text(parse_size(text)) == text


@pytest.mark.parametrize("text", ["5ms", "30s", "500us", "0s", "3600s", "1.5s"])
def test_a_duration_is_written_as_it_is_read(text):
    assert duration_text(parse_duration(text)) == text
