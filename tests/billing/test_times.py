from __future__ import annotations

import pytest

from edge.billing.times import iso_time, month_window, now_us, parse_time, this_month
from edge.errors import UsageError


def test_times_and_months() -> None:
    assert [iso_time(moment) for moment in month_window("2026-12")] == ["2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"]
    assert month_window("2024-02")[1] - month_window("2024-02")[0] == 29 * 86400 * 10**6
    assert parse_time("2026-11-30") == parse_time("2026-11-30T02:00:00+02:00") == parse_time("2026-11-30T00:00:00Z")
    assert iso_time(parse_time("2026-11-30T12:00:00.000001")) == "2026-11-30T12:00:00.000001Z"
    for month in ("2026", "2026-13", "11-2026", "", "0001-01"):
        with pytest.raises(UsageError):
            month_window(month)
    for time in ("yesterday", "", "9999-12-31T23:00-10:00", "0001-01-01T00:00+14:00"):
        with pytest.raises(UsageError):
            parse_time(time)


def test_now_is_in_this_month() -> None:
    assert iso_time(now_us())[:7] <= this_month() <= iso_time(now_us())[:7]
