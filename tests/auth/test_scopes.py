from __future__ import annotations

import pytest

from edge.auth.scopes import AI_EDIT, AI_READ, AI_RUN, ALL, SCOPES, WORKERS_EDIT, WORKERS_READ, parse_scopes
from edge.errors import UsageError


def test_whoever_may_change_a_thing_may_see_it() -> None:
    assert parse_scopes([AI_RUN]) == {AI_RUN, AI_READ}
    assert parse_scopes([AI_EDIT]) == {AI_EDIT, AI_READ}
    assert parse_scopes([AI_READ]) == {AI_READ}
    assert parse_scopes([WORKERS_EDIT]) == {WORKERS_EDIT, WORKERS_READ}
    assert parse_scopes([]) == set()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("all", ALL),
        ("Workers AI Read", {AI_RUN, AI_READ}),
        ("workers-ai-read", {AI_RUN, AI_READ}),
        ("Workers AI - Write", {AI_RUN, AI_READ, AI_EDIT}),
        ("Workers Scripts Edit", {WORKERS_EDIT, WORKERS_READ}),
    ],
)
def test_cloudflare_s_names_stand_for_scopes(name: str, meant: set[str]) -> None:
    assert parse_scopes([name]) == meant


def test_an_unknown_scope_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"there is no scope 'ai:fly'; there are ai:run, ") as caught:
        parse_scopes([AI_RUN, "ai:fly"])
    assert all(scope in caught.value.message for scope in SCOPES)
