"""Cron expressions as Cloudflare's Cron Triggers read them. It knows nothing about clocks or workers.

Five fields: minute, hour, day of the month, month, day of the week; `*`, lists, ranges (also around the end, such as
`fri-mon`), steps, names of months and days, and of Quartz `L`, `L-3`, `LW`, `15W` for days of the month and `friL`,
`fri#2` for days of the week. Days of the week count from 1, Sunday, to 7, Saturday, unlike in Unix, where Sunday is 0.
If both kinds of days are given, either is enough. The rules are those of Cloudflare's parser,
github.com/cloudflare/saffron.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import date, datetime
from typing import NamedTuple

from edge.errors import ConfigError

_MAX_CHARS = 200
_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAY_NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


class _Field(NamedTuple):
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    """What the values from 1 on can be called as well."""


_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day of the month", 1, 31)
_MONTH = _Field("month", 1, 12, _MONTH_NAMES)
_WEEKDAY = _Field("day of the week", 1, 7, _DAY_NAMES)

_Days = Callable[[date], bool]


class Cron:
    """A parsed expression.

    Raises:
        ConfigError: `expression` is none; the message says which field is wrong.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression
        parts = expression.lower().split()
        if len(parts) != 5 or len(expression) > _MAX_CHARS:
            raise ConfigError(
                f"the cron expression {expression[:_MAX_CHARS]!r} must have five fields: minute, hour, day of the "
                'month, month, day of the week; for example "*/15 * * * *"'
            )
        try:
            self._minutes = _values(parts[0], _MINUTE)
            self._hours = _values(parts[1], _HOUR)
            self._months = _values(parts[3], _MONTH)
            self._is_day = _either(_days_of_month(parts[2]), _days_of_week(parts[4]))
        except ValueError as error:
            raise ConfigError(f"the cron expression {expression!r} is wrong: {error}") from error

    def matches(self, time: datetime) -> bool:
        """Whether the minute of `time`, which is in UTC, is one of the expression's."""
        return (
            time.minute in self._minutes
            and time.hour in self._hours
            and time.month in self._months
            and self._is_day(time.date())
        )


def _values(text: str, field: _Field) -> frozenset[int]:
    """The values that a list of numbers, names, ranges and steps stands for."""
    found: set[int] = set()
    for part in text.split(","):
        bounds, slash, step_text = part.partition("/")
        step = _number(step_text, field, "step", 1, field.last) if slash else 1
        start_text, dash, end_text = bounds.partition("-")
        start = field.first if start_text == "*" else _value(start_text, field)
        single = field.last if start_text == "*" or slash else start
        end = _value(end_text, field) if dash else single
        if start <= end:
            found.update(range(start, end + 1, step))
        else:
            found.update([*range(start, field.last + 1), *range(field.first, end + 1)][::step])
    return frozenset(found)


def _value(text: str, field: _Field) -> int:
    return (
        field.names.index(text) + 1 if text in field.names else _number(text, field, "value", field.first, field.last)
    )


def _number(text: str, field: _Field, what: str, first: int, last: int) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text) or not first <= int(text) <= last:
        names = " or a name" if field.names and what == "value" else ""
        raise ValueError(f"{text[:20]!r} is no {what} of the {field.name}; it goes from {first} to {last}{names}")
    return int(text)


# -- days --------------------------------------------------------------------------------------------------


def _either(of_month: _Days | None, of_week: _Days | None) -> _Days:
    """None stands for `*`, which does not widen what the other says."""
    if of_month is None or of_week is None:
        return of_month or of_week or (lambda day: True)
    return lambda day: of_month(day) or of_week(day)


def _days_of_month(text: str) -> _Days | None:
    if text == "*":
        return None
    if match := re.fullmatch(r"l(?:-([0-9]+))?(w)?", text):
        offset = _number(match[1], _DAY, "distance from the last day", 1, 30) if match[1] else 0
        is_weekday = match[2] is not None
        return lambda day: day.day == _nearest(day, _num_days(day) - offset, is_weekday)
    if text.endswith("w"):
        wanted = _value(text[:-1], _DAY)
        return lambda day: day.day == _nearest(day, wanted, True)
    values = _values(text, _DAY)
    return lambda day: day.day in values


def _days_of_week(text: str) -> _Days | None:
    if text == "*":
        return None
    if text == "l":
        return lambda day: _weekday(day) == 7
    if match := re.fullmatch(r"(\w+?)l", text):
        last = _value(match[1], _WEEKDAY)
        return lambda day: _weekday(day) == last and day.day + 7 > _num_days(day)
    if "#" in text:
        name, _, number = text.partition("#")
        of_week = _value(name, _WEEKDAY)
        nth = _number(number, _WEEKDAY, "number after #", 1, 5)
        return lambda day: _weekday(day) == of_week and (day.day - 1) // 7 + 1 == nth
    values = _values(text, _WEEKDAY)
    return lambda day: _weekday(day) in values


def _nearest(month: date, day: int, is_weekday: bool) -> int:
    """`day` of the month of `month`, moved to the nearest day from Monday to Friday in that month if `is_weekday`;
    0 if the month has no such day."""
    num_days = _num_days(month)
    if not 1 <= day <= num_days:
        return 0
    weekday = _weekday(month.replace(day=day))
    if is_weekday and weekday == 7:
        return day - 1 if day > 1 else 3
    if is_weekday and weekday == 1:
        return day + 1 if day < num_days else day - 2
    return day


def _weekday(day: date) -> int:
    return day.isoweekday() % 7 + 1


def _num_days(month: date) -> int:
    return calendar.monthrange(month.year, month.month)[1]
