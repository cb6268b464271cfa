"""`import js`, `pyodide` and `asgi` in real handler processes, as code for Cloudflare's runtime does it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from edge.errors import HandlerFailed
from edge.isolates.base import JsonAnswer
from edge.node.hub import Hub


async def test_idioms_around_ai_results(worker) -> None:
    """Items g, h, k, l and m of what public code does with results."""
    worker.bindings.answer = lambda model, inputs, options: JsonAnswer({"response": inputs, "data": [[0.5]]})
    await worker.deploy("""
        async def fetch(self, request):
            import js, json
            from js import JSON, Object
            from pyodide.ffi import JsException, JsProxy, run_sync, to_js

            inputs = to_js({"messages": [{"role": "user"}], "image": [1]}, dict_converter=Object.fromEntries)
            result = await self.env.AI.run("m", inputs)
            assert isinstance(result, JsProxy) and isinstance(result, dict)
            assert isinstance(result.data, JsProxy) and isinstance(result.data, list)
            assert json.loads(JSON.stringify(result))["response"]["image"] == [1]
            assert (await self.env.AI.run("m", JSON.parse('{"prompt": "x"}'))).response.prompt == "x"
            assert (await self.env.AI.run("m", to_js({"a": [{"b": 1}]}))).response.a[0].b == 1
            buffered = await self.env.AI.run("m", {"audio": list(js.Uint8Array.new(b"ab"))})
            assert buffered.to_py()["response"] == {"audio": [97, 98]}
            assert run_sync(self.env.AI.run("m", {"n": 1})).response.n == 1
            try:
                await self.env.AI.run("m", {"n": object()})
            except TypeError:
                pass
            return js.Response.new(js.JSON.stringify(result.response), headers=js.Headers.new({"x-kind": "js"}))
    """)
    response = await worker.open()
    assert ("x-kind", "js") in response.headers
    assert await worker.get() == '{"messages":[{"role":"user"}],"image":[1]}'


async def test_errors_of_bindings_are_those_of_javascript(worker) -> None:
    async def refuse(*_args):
        raise HandlerFailed("no such model")

    worker.bindings.ai_run = refuse
    await worker.deploy("""
        async def fetch(self, request):
            from pyodide.ffi import JsException
            try:
                await self.env.AI.run("m", {})
            except JsException as error:
                return Response(f"{error.name}: {error.message}")
    """)
    assert "no such model" in await worker.get()


async def test_global_handlers_with_javascript_requests(worker) -> None:
    await worker.deploy(
        """
        from js import Response, URL

        async def on_fetch(request, env):
            url = URL.new(request.url)
            body = (await request.json()).to_py() if request.method == "POST" else {}
            return Response.new(f"{url.pathname} {request.headers.get('x-a')} {body}", {"status": 201})
        """,
        indented=False,
    )
    response = await worker.open("/a?b", method="GET", headers=[("X-A", "1")])
    assert response.status == 201
    assert await worker.get("/a?b", headers=[("X-A", "1")]) == "/a 1 {}"


async def test_modules_that_only_cloudflare_has(worker) -> None:
    await worker.deploy(
        """
        async def fetch(self, request):
            import asgi, pyodide, pyodide.code, pyodide.http, pyodide.webloop, workers.asgi
            import _cloudflare_compat_flags as flags
            import _pyodide_entrypoint_helper as helper

            assert asgi is workers.asgi
            assert pyodide.__version__ > "0.26.0a2"
            assert pyodide.code.relaxed_call(lambda a: a, 1, 2) == 1
            assert flags.nonsense is False
            assert (await helper.doAnImport("cloudflare:workers")).env.NAME == "value"
            try:
                pyodide.code.run_js("1 + 1")
            except NotImplementedError:
                return Response("all there")
    """,
        vars={"NAME": "value"},
    )
    assert await worker.get() == "all there"


async def test_an_unknown_name_of_js_fails_as_an_import(worker) -> None:
    await worker.deploy("""
        async def fetch(self, request):
            from js import Nonsense
    """)
    with pytest.raises(HandlerFailed, match="cannot import name 'Nonsense' from 'js'"):
        await worker.get()


def test_only_isolates_have_them() -> None:
    code = "import importlib.util as u, workers; print([u.find_spec(n) for n in ('js', 'pyodide', 'asgi')])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[None, None, None]"


class Models:
    """An AI provider that has two models."""

    async def run(self, caller, model, inputs, options):
        return JsonAnswer({})

    async def models(self, params):
        return JsonAnswer([{"name": "a", "asked": params}, {"name": "b"}])


async def test_models_and_what_is_not_there_of_the_ai_binding(worker) -> None:
    worker.bindings.call = Hub(Models(), {}).call
    await worker.deploy("""
        async def fetch(self, request):
            models = await self.env.AI.models({"search": "x"}, page=2)
            assert [each.name for each in models] == ["a", "b"]
            assert models[0].asked == {"search": "x", "page": 2}
            texts = []
            for call in (lambda ai: ai.gateway("g"), lambda ai: ai.toMarkdown([]), lambda ai: ai.autorag("r"),
                         lambda ai: ai.aiSearch(), lambda ai: ai._calls.call("other")):
                try:
                    await call(self.env.AI)
                except Exception as error:
                    texts.append(f"{type(error).__name__}: {error}")
            return Response.json(texts)
    """)
    gateway, markdown, search, other_search, unknown = json.loads(await worker.get())
    assert "NotImplementedError: env.AI.gateway() is not supported" in gateway
    assert "markitdown" in markdown
    assert "no AI Search" in search
    assert search == other_search
    assert "env.AI of this worker is no binding" in unknown
