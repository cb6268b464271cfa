from __future__ import annotations

from typing import Any

import pytest

from edge.bindings import ratelimit
from edge.bindings.ratelimit import RateLimits
from edge.errors import InvalidInput
from edge.isolates.base import Binding, Bundle
from workers.bindings.ratelimit import RateLimit
from workers.bindings.version import VersionMetadata

PROPS = {"id": "1001", "limit": 2, "period": 10}
CALLER = Bundle("worker", "v1", "/", "main.py")


class Calls:
    def __init__(self, provider: RateLimits, props: dict[str, Any], account: str = "dev") -> None:
        self._provider = provider
        self._binding = Binding("ratelimit", props)
        self._caller = Bundle("worker", "v1", "/", "main.py", account=account)

    async def call(self, method: str, *args: Any) -> Any:
        return (await self._provider.call(self._caller, self._binding, method, list(args), None)).value


def limit(provider: RateLimits, account: str = "dev", **props: Any) -> Any:
    return RateLimit("LIMIT", {}, Calls(provider, PROPS | props, account))


async def test_a_key_has_its_calls_per_period(clock: Any) -> None:
    limited = limit(RateLimits(clock))
    assert [(await limited.limit({"key": "a"})).success for _ in range(4)] == [True, True, False, False]
    assert (await limited.limit(key="b")).success
    clock.now_s += 9.9
    assert not (await limited.limit(key="a")).success
    clock.now_s += 0.2
    assert [(await limited.limit(key="a")).success for _ in range(3)] == [True, True, False]


async def test_accounts_and_namespaces_are_apart(clock: Any) -> None:
    provider = RateLimits(clock)
    for limited in (limit(provider), limit(provider, id="other"), limit(provider, "other")):
        assert [(await limited.limit(key="a")).success for _ in range(3)] == [True, True, False]


async def test_what_is_held_for_a_namespace_is_bounded(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimit, "MAX_KEYS", 10)
    provider = RateLimits(clock)
    limited = limit(provider)
    for number in range(100):
        await limited.limit(key=f"{number}" * 1000)
    (counts,) = provider._namespaces.values()
    assert len(counts) == 10
    assert all(len(name) == 16 for name in counts)
    clock.now_s += 11
    await limited.limit(key="a")
    assert len(counts) == 1


async def test_what_is_wrong(clock: Any) -> None:
    with pytest.raises(TypeError, match="needs"):
        await limit(RateLimits(clock)).limit({})
    for method, args in [("limit", [{}]), ("limit", [{"key": 1}]), ("limit", []), ("reset", [])]:
        with pytest.raises(InvalidInput):
            await RateLimits(clock).call(CALLER, Binding("ratelimit", PROPS), method, args, None)


def test_version_metadata() -> None:
    version = VersionMetadata("VERSION", {"id": "v-1", "tag": "", "timestamp": "2026-11-30T00:00:00Z"}, None)  # type: ignore[arg-type]
    assert (version.id, version.tag, version["timestamp"]) == ("v-1", "", "2026-11-30T00:00:00Z")
