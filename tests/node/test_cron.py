from __future__ import annotations

import calendar
from datetime import date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import ConfigError
from edge.node.cron import Cron

RANGES = [(0, 59), (0, 23), (1, 31), (1, 12), (1, 7)]


def days_in(year: int, month: int, expression: str) -> list[int]:
    """The days of a month on which `expression`, which is for midnight, matches."""
    cron = Cron(expression)
    return [
        day for day in range(1, calendar.monthrange(year, month)[1] + 1) if cron.matches(datetime(year, month, day))
    ]


@pytest.mark.parametrize(
    ("expression", "times", "others"),
    [
        ("* * * * *", ["2026-01-01T00:00", "2026-12-31T23:59"], []),
        ("*/15 * * * *", ["2026-01-01T05:45"], ["2026-01-01T05:44"]),
        ("45 * * * *", ["2026-03-01T12:45"], ["2026-03-01T12:44"]),
        ("0 17 * * sun", ["2026-11-29T17:00"], ["2026-11-30T17:00"]),
        ("0 17 * * 1", ["2026-11-29T17:00"], ["2026-11-30T17:00"]),
        ("10 7 * * MON-FRI", ["2026-11-30T07:10"], ["2026-11-29T07:10", "2026-11-28T07:10"]),
        ("10 7 * * 2-6", ["2026-11-30T07:10"], ["2026-11-29T07:10", "2026-11-28T07:10"]),
        ("0 0 * * fri-sun", ["2026-11-29T00:00", "2026-11-28T00:00", "2026-11-27T00:00"], ["2026-11-26T00:00"]),
        ("0 22-2/2 * * *", ["2026-01-01T22:00", "2026-01-01T00:00", "2026-01-01T02:00"], ["2026-01-01T23:00"]),
        ("5/20 * * * *", ["2026-01-01T00:05", "2026-01-01T00:25", "2026-01-01T00:45"], ["2026-01-01T00:00"]),
        ("0 0 1,15 jan,JUL *", ["2026-07-15T00:00"], ["2026-07-16T00:00", "2026-06-15T00:00"]),
        # Either kind of day is enough, as Cloudflare has it.
        ("0 0 13 * fri", ["2026-11-13T00:00", "2026-11-27T00:00", "2026-10-13T00:00"], ["2026-10-14T00:00"]),
    ],
)
def test_what_matches(expression: str, times: list[str], others: list[str]) -> None:
    cron = Cron(expression)
    assert all(cron.matches(datetime.fromisoformat(time)) for time in times)
    assert not any(cron.matches(datetime.fromisoformat(time)) for time in others)


@pytest.mark.parametrize(
    ("expression", "year", "month", "days"),
    [
        ("0 0 L * *", 2024, 2, [29]),
        ("0 0 L-3 * *", 2026, 11, [27]),
        ("0 0 LW * *", 2026, 1, [30]),  # the 31st is a Saturday
        ("0 0 LW * *", 2026, 5, [29]),  # the 31st is a Sunday
        ("0 0 15W * *", 2026, 8, [14]),  # the 15th is a Saturday
        ("0 0 1W * *", 2026, 8, [3]),  # the 1st is a Saturday, and it stays in its month
        ("0 0 31W * *", 2026, 5, [29]),
        ("0 0 31W * *", 2026, 6, []),
        ("0 0 * * friL", 2026, 11, [27]),
        ("0 0 * * 6L", 2026, 11, [27]),
        ("0 0 * * mon#2", 2026, 11, [9]),
        ("0 0 * * mon#5", 2026, 11, [30]),
        ("0 0 * * L", 2026, 11, [7, 14, 21, 28]),
        ("0 0 30 2 *", 2024, 2, []),
    ],
)
def test_days_of_quartz(expression: str, year: int, month: int, days: list[int]) -> None:
    assert days_in(year, month, expression) == days


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("60 * * * *", "'60' is no value of the minute; it goes from 0 to 59"),
        ("* * * * 0", "'0' is no value of the day of the week; it goes from 1 to 7 or a name"),
        ("* * * * noday", "day of the week"),
        ("*/0 * * * *", "'0' is no step of the minute"),
        ("1,,2 * * * *", "'' is no value of the minute"),
        ("1- * * * *", "'' is no value of the minute"),
        ("-5 * * * *", "'' is no value of the minute"),
        ("* * 32W * *", "'32' is no value of the day of the month"),
        ("* * * * mon#6", "'6' is no number after #"),
        ("* * L-31 * *", "distance from the last day"),
        ("٣ * * * *", "is no value of the minute"),
        ("* " * 200, "five fields"),
    ],
)
def test_what_is_no_expression(expression: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Cron(expression)


@given(st.text(alphabet="0123456789*/-,lw# abcdefjmnorstuv", max_size=40))
def test_any_text_is_an_expression_or_an_error(text: str) -> None:
    try:
        cron = Cron(text)
    except ConfigError:
        return
    assert cron.matches(datetime(2026, 1, 1)) in (True, False)


@st.composite
def fields(draw: st.DrawFn, first: int, last: int) -> tuple[str, set[int], bool]:
    """A field as text, what it stands for, counted out value by value, and whether it is `*`."""
    texts, values = [], set()
    for _ in range(draw(st.integers(1, 3))):
        start, end = draw(st.integers(first, last)), draw(st.integers(first, last))
        step = draw(st.integers(1, last))
        kind = draw(st.sampled_from(["one", "range", "step", "every"]))
        if kind == "one":
            texts.append(str(start))
            values.add(start)
            continue
        if kind == "every":
            start, end = first, last
        at, num_passed = start, 0
        while True:
            if num_passed % (step if kind != "range" else 1) == 0:
                values.add(at)
            if at == end:
                break
            at, num_passed = (at + 1 if at < last else first), num_passed + 1
        texts.append({"range": f"{start}-{end}", "step": f"{start}-{end}/{step}", "every": f"*/{step}"}[kind])
    if draw(st.booleans()):
        return "*", set(range(first, last + 1)), True
    return ",".join(texts), values, False


@given(
    st.tuples(*(fields(first, last) for first, last in RANGES)),
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
)
def test_expressions_match_what_they_count_out(parts: tuple[tuple[str, set[int], bool], ...], time: datetime) -> None:
    minute, hour, day, month, weekday = parts
    sunday = date(2026, 11, 29)
    day_of_week = ((time.date() - sunday) // timedelta(days=1)) % 7 + 1
    if day[2]:
        is_day = day_of_week in weekday[1]
    elif weekday[2]:
        is_day = time.day in day[1]
    else:
        is_day = time.day in day[1] or day_of_week in weekday[1]
    expected = time.minute in minute[1] and time.hour in hour[1] and time.month in month[1] and is_day
    assert Cron(" ".join(part[0] for part in parts)).matches(time) == expected
