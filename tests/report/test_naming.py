import pytest

from lit_fedad.report.naming import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1000, "1.00 kB"),
        (2_290_000, "2.29 MB"),
        (22_478_848, "22.48 MB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (4_500_000_000, "4.50 GB"),
        (7 * 10**15, "7000.00 TB"),
    ],
)
def test_bytes_are_decimal(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1:00"),
        (60, "1:00"),
        (3599.6, "1:00:00"),
        (90061, "25:01:01"),
    ],
)
def test_durations_are_short(seconds, text):
    assert human_seconds(seconds) == text
