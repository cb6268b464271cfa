"""Moments and periods of usage and bills: microseconds since the epoch, in UTC, to and from what people write.

This module knows nothing about records, prices or databases.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

from edge.errors import UsageError


def now_us() -> int:
    """The current time in microseconds since the epoch."""
    return time.time_ns() // 1000


def month_window(month: str) -> tuple[int, int]:
    """[since, until) of a month `YYYY-MM` in microseconds since the epoch, UTC.

    Raises:
        UsageError: it is no such month.
    """
    try:
        since = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    except ValueError as error:
        raise UsageError(f"month {month!r} is not of the form YYYY-MM, for example 2026-11") from error
    _check_year(since)
    until = since.replace(year=since.year + since.month // 12, month=since.month % 12 + 1)
    return _time_us(since), _time_us(until)


def this_month() -> str:
    """The current month `YYYY-MM` in UTC."""
    return datetime.now(UTC).strftime("%Y-%m")


def parse_time(text: str) -> int:
    """Microseconds since the epoch of an ISO 8601 date or time; without an offset it is in UTC.

    Raises:
        UsageError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"time {text!r} is not ISO 8601, for example 2026-11-30 or 2026-11-30T12:00:00Z") from error
    _check_year(moment)
    return _time_us(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def _check_year(moment: datetime) -> None:
    if not 1970 < moment.year < 9999:
        raise UsageError(f"the year {moment.year} is out of range: give one from 1971 to 9998")


def iso_time(moment_us: int) -> str:
    """ISO 8601 in UTC of microseconds since the epoch."""
    seconds, us = divmod(moment_us, 10**6)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return text + (f".{us:06d}" if us else "") + "Z"


def _time_us(moment: datetime) -> int:
    """Microseconds since the epoch of `moment`, which has a time zone; exact, unlike `timestamp()`."""
    since_epoch = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch.days * 86400 + since_epoch.seconds) * 10**6 + since_epoch.microseconds
