from __future__ import annotations

import pytest

import workers
from workers.entrypoints import Context, Env, WorkerEntrypoint


def test_env_by_attribute_and_by_item():
    env = Env({"NAME": "x", "items": 1})
    assert env.NAME == env["NAME"] == "x"
    assert env.items == 1
    assert "NAME" in env
    assert list(env) == ["NAME", "items"]


def test_a_missing_variable_names_those_there_are():
    env = Env({"NAME": "secret"})
    assert getattr(env, "X", None) is None
    assert not hasattr(env, "X")
    with pytest.raises(AttributeError, match=r"no variable or binding 'X'; it has: NAME"):
        _ = env.X
    with pytest.raises(KeyError, match="no variable or binding 'X'"):
        _ = env["X"]


def test_env_shows_no_values():
    assert repr(Env({"TOKEN": "secret"})) == "Env(TOKEN)"


def test_an_entrypoint_keeps_ctx_and_env():
    ctx, env = Context(), Env()
    entrypoint = WorkerEntrypoint(ctx, env)
    assert (entrypoint.ctx, entrypoint.env) == (ctx, env)


async def test_wait_until_takes_awaitables_only():
    ctx = Context()
    ctx.passThroughOnException()

    async def work():
        return 1

    ctx.waitUntil(work())
    assert [await wait for wait in ctx._waits] == [1]
    with pytest.raises(TypeError, match="needs an awaitable, not function"):
        ctx.waitUntil(work)


def test_the_names_of_the_package():
    assert set(workers.__all__) == {
        "Context", "Request", "Response", "WorkerEntrypoint", "env", "fetch", "waitUntil", "wait_until",
    }  # fmt: skip
    for name in workers.__all__:
        assert getattr(workers, name) is not None
    with pytest.raises(AttributeError, match="module 'workers' has no attribute 'nope'"):
        _ = workers.nope


async def test_outside_of_an_isolate():
    from workers import env, waitUntil

    with pytest.raises(AttributeError, match="it has: none"):
        _ = env.AI
    with pytest.raises(RuntimeError, match="only while a handler serves"):
        waitUntil(None)
    with pytest.raises(RuntimeError, match="edge dev"):
        await workers.fetch("http://example.com/")
    with pytest.raises(TypeError, match="no option mode"):
        await workers.fetch("http://example.com/", mode="cors")
    with pytest.raises(TypeError, match="positional"):
        await workers.fetch("http://example.com/", {"method": "POST"})
