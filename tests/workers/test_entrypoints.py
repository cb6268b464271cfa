from __future__ import annotations

import pytest

import workers
from workers import DurableObject, WorkflowEntrypoint, handler, import_from_javascript, patch_env
from workers.entrypoints import Context, Env, WorkerEntrypoint


def test_env_by_attribute_and_by_item():
    env = Env({"NAME": "x", "items": 1})
    assert env.NAME == env["NAME"] == "x"
    assert env.items == 1
    assert "NAME" in env
    assert list(env) == ["NAME", "items"]


def test_env_makes_its_values_once_and_when_they_are_asked_for():
    made = []

    def make(name, source):
        made.append(name)
        return [source]

    env = Env({"A": 1, "B": 2}, make)
    assert ("A" in env, list(env), made) == (True, ["A", "B"], [])
    assert env.A is env.A is env["A"]
    assert (env.A, made) == ([1], ["A"])
    assert "B" in dir(env)


def test_a_missing_variable_names_those_there_are():
    env = Env({"NAME": "secret"})
    assert getattr(env, "X", None) is None
    assert not hasattr(env, "X")
    with pytest.raises(AttributeError, match=r"no variable or binding 'X'; it has: NAME"):
        _ = env.X
    with pytest.raises(KeyError, match="no variable or binding 'X'"):
        _ = env["X"]
    assert "_Env__make" not in env


def test_env_shows_no_values():
    env = Env({"TOKEN": "secret"})
    assert env.TOKEN
    assert repr(env) == "Env(TOKEN)"


def test_an_entrypoint_keeps_ctx_and_env():
    ctx, env = Context(props={"tenant": {"id": 5}}), Env()
    entrypoint = WorkerEntrypoint(ctx, env)
    assert (entrypoint.ctx, entrypoint.env) == (ctx, env)
    assert ctx.props.tenant.id == 5
    assert Context().props == {}


async def test_wait_until_takes_awaitables_only():
    ctx = Context()
    ctx.passThroughOnException()

    async def work():
        return 1

    ctx.waitUntil(work())
    assert [await wait for wait in ctx._waits] == [1]
    with pytest.raises(TypeError, match="needs an awaitable, not function"):
        ctx.waitUntil(work)
    ctx._is_over = True
    with pytest.raises(RuntimeError, match="after the invocation was over"):
        ctx.waitUntil(work())
    with pytest.raises(RuntimeError, match="only while a handler serves an event"):
        workers.waitUntil(work())


@pytest.mark.parametrize(("base", "message"), [(DurableObject, "Durable Object"), (WorkflowEntrypoint, "workflow")])
def test_what_is_not_supported_yet_can_be_defined_but_not_used(base, message):
    class Mine(base):
        pass

    with pytest.raises(NotImplementedError, match=f"Mine is a {message}"):
        Mine(Context(), Env())


def test_the_decorator_of_global_handlers_changes_nothing():
    def on_fetch(request, env):
        return request, env

    assert handler(on_fetch) is on_fetch


def test_patched_values():
    with patch_env({"A": 1}, B=2):
        assert (workers.env.A, workers.env.B) == (1, 2)
        with patch_env([("A", 3)]):
            assert workers.env.A == 3
        assert workers.env.A == 1
    assert not hasattr(workers.env, "A")


def test_javascript_modules():
    module = import_from_javascript("cloudflare:workers")
    assert module.env is workers.env
    assert module.waitUntil is workers.wait_until
    assert module.WorkerEntrypoint is WorkerEntrypoint
    assert module.withEnv({"A": 1}, lambda: workers.env.A) == 1
    with pytest.raises(ImportError, match="use fetch"):
        import_from_javascript("cloudflare:sockets")
    with pytest.raises(ImportError, match="no JavaScript here to import 'node:fs'"):
        import_from_javascript("node:fs")


def test_the_names_of_the_package():
    assert set(workers.__all__) == {
        "Blob", "BlobEnding", "BlobValue", "Body", "Context", "DurableObject", "FetchKwargs", "FetchResponse", "File",
        "FormData", "FormDataValue", "Headers", "JSBody", "Request", "RequestInitCfProperties", "Response",
        "WorkerEntrypoint", "WorkflowEntrypoint", "env", "fetch", "handler", "import_from_javascript", "patch_env",
        "python_from_rpc", "python_to_rpc", "waitUntil", "wait_until",
    }  # fmt: skip
    for name in workers.__all__:
        assert getattr(workers, name) is not None
    assert set(workers.env) == set()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = workers.missing
