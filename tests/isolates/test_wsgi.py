"""Flask and Django applications in real handler processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from edge.errors import HandlerFailed
from edge.isolates.base import JsonAnswer

FLASK = """
import threading
from flask import Flask, Response, request, stream_with_context
from pyodide.ffi import run_sync
from workers import WorkerEntrypoint, wsgi

app = Flask(__name__)
gates = [threading.Event(), threading.Event()]

@app.route("/json/<int:id>", methods=["POST"])
def add(id):
    env = request.environ["workers.env"]
    return {"id": id, "got": request.get_json(), "arg": request.args["q"], "message": env.MESSAGE,
            "ip": request.remote_addr, "url": request.url}

@app.route("/events")
def events():
    @stream_with_context
    def stream():
        for number, gate in enumerate(gates):
            gate.wait()
            yield f"data: {number} {request.path}\\n\\n"
    return Response(stream(), mimetype="text/event-stream")

@app.route("/open/<int:n>")
def open_gate(n):
    gates[n].set()
    return ""

@app.route("/count", methods=["POST"])
def count():
    def stream():
        while piece := request.stream.read(3):
            yield f"{len(piece)} "
    return Response(stream_with_context(stream()))

@app.route("/ask")
def ask():
    return run_sync(request.environ["workers.env"].AI.run("m", {"prompt": "sync"}))["prompt"]

@app.route("/endless")
def endless():
    def stream():
        try:
            while True:
                yield "x" * 1000
        finally:
            print("stopped")
    return Response(stream())

@app.route("/raise")
def fails():
    raise ValueError("inside of flask")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await wsgi.fetch(app, request, self.env)
"""


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.fixture
async def flask(worker):
    worker.bindings.answer = lambda model, inputs, options: JsonAnswer(inputs)
    await worker.deploy(FLASK, indented=False, vars={"MESSAGE": "hi"})
    return worker


async def test_flask_json(flask) -> None:
    headers = [("content-type", "application/json"), ("content-length", "8"), ("cf-connecting-ip", "1.2.3.4")]
    answer = await flask.get("/json/7?q=%C3%A4", method="POST", body=pieces(b'{"a":', b" 1}"), headers=headers)
    assert json.loads(answer) == {
        "id": 7,
        "got": {"a": 1},
        "arg": "ä",
        "message": "hi",
        "ip": "1.2.3.4",
        "url": "http://test/json/7?q=ä",
    }
    assert (await flask.open("/nowhere")).status == 404


async def test_flask_streams_and_does_not_hold_up_others(flask) -> None:
    opening = asyncio.create_task(flask.open("/events"))  # WSGI sends no head before the first piece
    for number in range(2):
        await flask.get(f"/open/{number}")
        response = await opening
        assert await anext(response.body) == f"data: {number} /events\n\n".encode()
    assert [chunk async for chunk in response.body] == []


async def test_flask_reads_an_upload_while_it_arrives(flask) -> None:
    gate = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"abc"
        await gate.wait()
        yield b"de"

    response = await flask.open("/count", method="POST", body=body(), headers=[("transfer-encoding", "chunked")])
    assert await anext(response.body) == b"3 "
    gate.set()
    assert await anext(response.body) == b"2 "


async def test_flask_waits_for_bindings(flask) -> None:
    assert await asyncio.gather(*[flask.get("/ask") for _ in range(5)]) == ["sync"] * 5


async def test_a_client_that_hangs_up_stops_the_stream(flask) -> None:
    response = await flask.open("/endless")
    await anext(response.body)
    await response.body.aclose()
    await flask.log_text("stopped")


async def test_flask_answers_its_errors(flask) -> None:
    response = await flask.open("/raise")
    assert response.status == 500
    await flask.log_text("ValueError: inside of flask")


async def test_bare_applications(worker) -> None:
    await worker.deploy(
        """
        from workers import wsgi

        seen = {}

        class Chunks(list):
            def close(self):
                print("closed")

        def app(environ, start_response):
            seen.update(environ)
            match environ["PATH_INFO"]:
                case "/none":
                    return []
                case "/early":
                    raise ValueError("before")
                case "/write":
                    start_response("200 OK", [("Content-Length", "4")])(b"ab")
                    return [b"cd"]
                case "/late":
                    start_response("200 OK", [])
                    return fail()
            start_response("201 Made", [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
            return Chunks([environ["PATH_INFO"].encode("latin-1"), b"", b"!"])

        def fail():
            yield b"some"
            raise ValueError("after")

        Default = wsgi.entrypoint(app)
        """,
        indented=False,
    )
    response = await worker.open("/%C3%A4")
    assert (response.status, response.headers) == (201, [("set-cookie", "a=1"), ("set-cookie", "b=2")])
    assert b"".join([chunk async for chunk in response.body]) == "/ä!".encode()
    await worker.log_text("closed")
    assert await worker.get("/write") == "abcd"
    with pytest.raises(HandlerFailed, match="before"):
        await worker.get("/early")
    with pytest.raises(HandlerFailed, match=r"did not call start_response"):
        await worker.get("/none")
    with pytest.raises(HandlerFailed, match="broke off"):
        await worker.get("/late")


async def test_headers_cannot_pass_for_others(worker) -> None:
    await worker.deploy(
        """
        import json
        from workers import wsgi

        def app(environ, start_response):
            start_response("200 OK", [])
            return [json.dumps(sorted(key for key in environ if key.startswith("HTTP_"))).encode()]

        Default = wsgi.entrypoint(app)
        """,
        indented=False,
    )
    headers = [("x-a", "1"), ("x_b", "2"), ("proxy", "http://evil")]
    assert await worker.get(headers=headers) == '["HTTP_X_A"]'


async def test_django(worker) -> None:
    """Views, templates, sessions in signed cookies, a database in memory and the ORM's check for event loops."""
    await worker.deploy(
        """
        import django
        from django.conf import settings
        from django.core.wsgi import get_wsgi_application
        from django.db import connection
        from django.http import JsonResponse, StreamingHttpResponse
        from django.template import Context, Engine
        from django.http import HttpResponse
        from django.urls import path
        from workers import WorkerEntrypoint, wsgi

        settings.configure(
            DEBUG=False, SECRET_KEY="x" * 50, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        )

        def hello(request, name):
            page = Engine().from_string("<h1>{{ greeting }}, {{ name }}</h1>")
            greeting = request.META["workers.env"].GREETING
            return HttpResponse(page.render(Context({"greeting": greeting, "name": name})))

        def query(request):
            with connection.cursor() as cursor:
                cursor.execute("select 20 + %s", [22])
                return JsonResponse({"answer": cursor.fetchone()[0], "posted": request.POST.get("a")})

        def lines(request):
            return StreamingHttpResponse(f"{n} " for n in range(3))

        from django.views.decorators.csrf import csrf_exempt
        urlpatterns = [path("hello/<name>", hello), path("query", csrf_exempt(query)), path("lines", lines)]
        application = get_wsgi_application()

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                return await wsgi.fetch(application, request, self.env)
        """,
        indented=False,
        vars={"GREETING": "Hi"},
    )
    assert await worker.get("/hello/<b>") == "<h1>Hi, &lt;b&gt;</h1>"
    headers = [("content-type", "application/x-www-form-urlencoded"), ("content-length", "3")]
    answer = await worker.get("/query", method="POST", body=pieces(b"a=1"), headers=headers)
    assert json.loads(answer) == {"answer": 42, "posted": "1"}
    assert await worker.get("/lines") == "0 1 2 "
