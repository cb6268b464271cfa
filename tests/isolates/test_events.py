"""Events other than requests, and the bindings to other workers and queues, in real handler processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edge.errors import HandlerFailed, InvalidInput
from edge.isolates.base import Binding, JsonAnswer, StreamAnswer
from workers import File, FormData
from workers._rpc import pack, unpack

from .conftest import until

SCHEDULED = {"cron": "*/5 * * * *", "scheduledTime": 1_700_000_000_000}


def batch_of(*bodies: Any) -> dict[str, Any]:
    messages = [
        {"id": f"m{number}", "timestamp": 1_700_000_000_000, "body": pack(body), "attempts": number}
        for number, body in enumerate(bodies, 1)
    ]
    return {"queue": "jobs", "messages": messages}


async def rpc(worker, method: str, *args: Any, **event: Any) -> Any:
    return unpack(await worker.event("rpc", {"method": method, "args": pack(list(args))}, **event))


class Relay:
    """Answers the service binding `SVC` with a worker of the harness, as the node does."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def __call__(self, binding: str, method: str, args: list[Any], body: Any) -> Any:
        if method == "rpc":
            return JsonAnswer(await self._worker.event("rpc", {"method": args[0], "args": args[1]}, entrypoint="Other"))
        path = args[1].removeprefix("http://svc")
        response = await self._worker.open(path, args[0], body, [(n, v) for n, v in args[2]], entrypoint="Other")
        return StreamAnswer(response.status, response.headers, response.body or _nothing())


async def _nothing():
    for piece in ():
        yield piece


# -- scheduled ---------------------------------------------------------------------------------------------


async def test_a_scheduled_event_with_all_arguments(worker):
    await worker.deploy(
        """
        async def scheduled(self, controller, env, ctx):
            ctx.waitUntil(asyncio.sleep(0))
            print("ran", controller.cron, controller.scheduledTime, controller.type, env is self.env)
        """,
        vars={"NAME": "x"},
    )
    assert await worker.event("scheduled", SCHEDULED) == {"noRetry": False}
    assert "ran */5 * * * * 1700000000000 scheduled True" in (await worker.log_text("ran"))[2]


async def test_a_scheduled_event_that_is_not_to_be_repeated(worker):
    await worker.deploy("def scheduled(self, controller): controller.noRetry()")
    assert await worker.event("scheduled", SCHEDULED) == {"noRetry": True}


async def test_a_scheduled_event_that_fails(worker):
    await worker.deploy("async def scheduled(self): raise KeyError('gone')")
    with pytest.raises(HandlerFailed, match="gone") as caught:
        await worker.event("scheduled", SCHEDULED)
    assert caught.value.type == "KeyError"
    assert "worker_main.py" in caught.value.traceback


async def test_an_event_without_handler(worker):
    await worker.deploy("def fetch(self): return Response('x')")
    with pytest.raises(HandlerFailed, match="Method scheduled does not exist"):
        await worker.event("scheduled", SCHEDULED)
    with pytest.raises(HandlerFailed, match="no events of the kind 'alarm'"):
        await worker.event("alarm", {})
    assert await worker.get() == "x"


async def test_global_style(worker):
    await worker.deploy(
        """
        from workers import handler
        @handler
        async def on_scheduled(event, env, ctx):
            print("global", event.cron, env.NAME, ctx.props)
        """,
        vars={"NAME": "x"},
        indented=False,
    )
    await worker.event("scheduled", SCHEDULED, props={"a": 1})
    assert "global */5 * * * * x {'a': 1}" in (await worker.log_text("global"))[2]


# -- queue -------------------------------------------------------------------------------------------------


async def test_a_batch_with_outcomes(worker):
    await worker.deploy(
        """
        async def queue(self, batch, env, ctx):
            for message in batch:
                match message.body:
                    case {"do": "ack"}: message.ack()
                    case {"do": "retry"}: message.retry(delaySeconds=9)
                    case other: print("left", batch.queue, len(batch), message.attempts, other)
        """
    )
    result = await worker.event("queue", batch_of({"do": "ack"}, {"do": "retry"}, [b"x", {1}]))
    assert result == {"acks": ["m1"], "retries": [["m2", 9]], "error": None}
    assert "left jobs 3 3 [b'x', {1}]" in (await worker.log_text("left"))[2]


async def test_a_batch_whose_handler_fails_keeps_what_it_acknowledged(worker):
    await worker.deploy(
        """
        def queue(self, batch):
            batch.messages[0].ack()
            raise ValueError("later")
        """
    )
    result = await worker.event("queue", batch_of(1, 2))
    assert (result["acks"], result["retries"]) == (["m1"], [])
    assert (result["error"]["type"], result["error"]["message"]) == ("ValueError", "later")
    assert "raise ValueError" in result["error"]["traceback"]


async def test_a_batch_handler_that_exits_ends_no_process(worker):
    await worker.deploy("def queue(self, batch): raise SystemExit(3)")
    for _ in range(2):
        assert (await worker.event("queue", batch_of(1)))["error"]["type"] == "SystemExit"
    assert len(worker.pids) == 1


# -- rpc ---------------------------------------------------------------------------------------------------

METHODS = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    def add(self, a, b=1): return a + b
    async def echo(self, value): return value
    def kinds(self, options): return {"type": type(options).__name__, "x": options.x, "props": self.ctx.props}
    def fail(self): raise ValueError("own message")
    def tuple(self): return (1, 2)
    async def response(self):
        async def chunks():
            yield "a"
            yield "b"
        return Response(chunks(), 201)
    def _private(self): return 1

class Other(WorkerEntrypoint):
    def add(self, a, b): return f"other {a + b}"
    async def fetch(self, request):
        return Response(f"{request.method} {request.url} {await request.text()}", 203, headers={"x-a": "1"})
    def fail(self): raise ValueError("own message")
    def echo(self, value): return value
"""


async def test_methods(worker):
    await worker.deploy(METHODS, indented=False)
    assert await rpc(worker, "add", 1, 2) == 3
    assert await rpc(worker, "add", 1) == 2
    assert await rpc(worker, "echo", {"a": [None, b"x", {1}]}) == {"a": [None, b"x", {1}]}
    assert await rpc(worker, "kinds", {"x": 5}, props={"p": 1}) == {"type": "JsDict", "x": 5, "props": {"p": 1}}
    assert await rpc(worker, "add", 1, 2, entrypoint="Other") == "other 3"
    response = await rpc(worker, "response")
    assert (response.status, await response.text()) == (201, "ab")


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("fail", [], "own message"),
        ("tuple", [], r"tuple cannot be sent over RPC\. Send a list"),
        ("_private", [], "Method _private does not exist"),
        ("__init__", [], "Method __init__ does not exist"),
        ("missing", [], "Method missing does not exist"),
        ("add", [1, 2, 3], "takes from 2 to 3 positional arguments but 4 were given"),
    ],
)
async def test_calls_that_fail(worker, method, args, message):
    await worker.deploy(METHODS, indented=False)
    with pytest.raises(HandlerFailed, match=message):
        await rpc(worker, method, *args)
    with pytest.raises(HandlerFailed, match="not a value of RPC"):
        await worker.event("rpc", {"method": method, "args": b"\xc1"})


# -- bindings ----------------------------------------------------------------------------------------------


async def through_binding(worker, code: str, kind: str = "service") -> str:
    """What `code` in a fetch handler gives; `SVC` is the binding."""
    source = f"    async def call(self):\n        {code}\n"
    source += "    async def probe(self):\n        return str(await self.call())\n"
    source = METHODS.replace("    def _private", source + "    def _private", 1)
    await worker.deploy(source, indented=False, bindings={"SVC": Binding(kind)})
    return await rpc(worker, "probe")


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("return await self.env.SVC.add(1, 2)", "other 3"),
        ("return await self.env.SVC.echo({'a': [1, b'x']})", "{'a': [1, b'x']}"),
        ("return await self.env.SVC.echo(x=1, y=2)", "{'x': 1, 'y': 2}"),
        ("return (await self.env.SVC.echo({'a': 1})).a", "1"),
        ("r = await self.env.SVC.fetch('http://svc/p'); return r.status, r.headers['x-a'], await r.text()",
         "(203, '1', 'GET http://test/p ')"),
        ("r = await self.env.SVC.fetch('http://svc/p', method='PUT', body='hi'); return await r.text()",
         "PUT http://test/p hi"),
        ("import workers; r = await workers.fetch('http://svc/q', fetcher=self.env.SVC); return await r.text()",
         "GET http://test/q "),
    ],
)  # fmt: skip
async def test_a_service_binding(worker, code, result):
    worker.bindings.answer_call = Relay(worker)
    assert await through_binding(worker, code) == result


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("return await self.env.SVC.fail()", "BindingError: own message"),
        ("return await self.env.SVC.missing()", "BindingError: Method missing does not exist"),
        (
            "return await self.env.SVC.add((1, 2))",
            "TypeError: argument 1 of env.SVC.add(): tuple cannot be sent over RPC",
        ),
        ("return await self.env.SVC.fetch('/relative')", "TypeError: Invalid URL"),
        ("return self.env.SVC._private", "AttributeError: service binding SVC has no attribute '_private'"),
    ],
)
async def test_a_service_binding_that_fails(worker, code, message):
    worker.bindings.answer_call = Relay(worker)
    with pytest.raises(HandlerFailed) as caught:
        await through_binding(worker, code)
    assert f"{caught.value.type}: {caught.value.message}".startswith(message)


async def test_a_queue_binding(worker):
    sent = []

    async def answer(binding, method, args, body):
        sent.append((binding, method, [{**one, "body": unpack(one["body"])} for one in args[0]]))
        return JsonAnswer(None)

    worker.bindings.answer_call = answer
    code = """
        q = self.env.SVC
        await q.send({"a": 1})
        await q.send("t", {"contentType": "text", "delaySeconds": 5})
        await q.send({1}, contentType="v8")
        await q.sendBatch([{"body": 1}, {"body": b"x", "contentType": "bytes", "delaySeconds": 2}], delaySeconds=9)
        await q.send_batch(iter([{"body": None}]))
        """
    await through_binding(worker, code, "queue")

    def message(body, content_type="json", delay_s=None):
        return {"body": body, "content_type": content_type, "delay_s": delay_s}

    assert sent == [
        ("SVC", "send", [message({"a": 1})]),
        ("SVC", "send", [message("t", "text", 5)]),
        ("SVC", "send", [message({1}, "v8")]),
        ("SVC", "send", [message(1, delay_s=9), message(b"x", "bytes", 2)]),
        ("SVC", "send", [message(None)]),
    ]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "await self.env.SVC.send(1, {'contentType': 'xml'})",
            "TypeError: send(): contentType must be one of json, text",
        ),
        ("await self.env.SVC.send(1, contentType='text')", "TypeError: send(): a body of contentType text must be str"),
        ("await self.env.SVC.send('x', contentType='bytes')", "TypeError: send(): a body of contentType bytes must be"),
        ("await self.env.SVC.send(b'x')", "TypeError: Object of type bytes is not JSON serializable"),
        ("await self.env.SVC.send(1, delaySeconds=-1)", "ValueError: send(): delaySeconds must be 0 to 43200"),
        ("await self.env.SVC.sendBatch(['x'])", 'TypeError: sendBatch() needs messages of the form {"body": …}'),
        ("await self.env.SVC.sendBatch([{'body': 1, 'x': 2}])", "TypeError: sendBatch() has no option x"),
        ("await self.env.SVC.send(1)", "BindingError: the queue is full"),
    ],
)
async def test_a_queue_binding_that_refuses(worker, code, message):
    async def answer(binding, method, args, body):
        raise InvalidInput("the queue is full")

    worker.bindings.answer_call = answer
    with pytest.raises(HandlerFailed) as caught:
        await through_binding(worker, code, "queue")
    assert f"{caught.value.type}: {caught.value.message}".startswith(message)


async def test_a_binding_of_an_unknown_kind_harms_only_who_uses_it(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            if request.url.endswith("/use"):
                return Response(str(self.env.ODD))
            return Response(str("ODD" in self.env))
        """,
        bindings={"ODD": Binding("odd")},
    )
    assert await worker.get() == "True"
    with pytest.raises(HandlerFailed, match=r"env\.ODD is a binding of the unknown kind 'odd'"):
        await worker.get("/use")


# -- requests ----------------------------------------------------------------------------------------------


async def test_named_entrypoints_and_props(worker):
    await worker.deploy(
        """
        from workers import Response, WorkerEntrypoint

        class Default(WorkerEntrypoint):
            def fetch(self): return Response("default")

        class Admin(WorkerEntrypoint):
            def fetch(self): return Response(f"admin {self.ctx.props.user}")
        """,
        indented=False,
    )
    assert await worker.get() == "default"
    assert await worker.get(entrypoint="Admin", props={"user": "ann"}) == "admin ann"
    with pytest.raises(HandlerFailed, match="no 'Other' class defined"):
        await worker.get(entrypoint="Other")


async def test_a_form_upload(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            form = await request.form_data()
            file = form["file"]
            return Response.json({"name": form["name"], "file": [file.name, file.content_type, await file.text()]})
        """
    )
    form = FormData({"name": "Ann", "file": File("hello", "a.txt", "text/plain")})
    body, content_type = form._as_body()

    async def pieces():
        yield body[:50]
        yield body[50:]

    answer = await worker.get(method="POST", body=pieces(), headers=[("content-type", content_type)])
    assert json.loads(answer) == {"name": "Ann", "file": ["a.txt", "text/plain", "hello"]}


async def test_values_put_into_env_for_a_while(worker):
    await worker.deploy(
        """
        async def fetch(self):
            import workers
            with workers.patch_env(NAME="patched"):
                inside = [self.env.NAME, workers.env.NAME]
            return Response.json([*inside, self.env.NAME, workers.env.NAME])
        """,
        vars={"NAME": "x"},
    )
    assert json.loads(await worker.get()) == ["patched", "patched", "x", "x"]


async def test_an_answer_that_no_frame_can_carry(worker):
    await worker.deploy("def fetch(self): return Response('x', headers={'x': 'y' * (33 << 20)})")
    with pytest.raises(HandlerFailed, match="the answer cannot be sent"):
        await worker.get()
    await worker.deploy("def big(self): return b'x' * (33 << 20)\ndef fetch(self): return Response('x')")
    with pytest.raises(HandlerFailed, match="the answer cannot be sent"):
        await rpc(worker, "big")
    assert await worker.get() == "x"


async def test_sync_code_can_wait(worker):
    await worker.deploy(
        """
        def fetch(self):
            from pyodide.ffi import run_sync
            return Response(str(run_sync(self.env.AI.run("m", {"x": 1}))))

        def twice(self, value):
            from pyodide.ffi import run_sync
            async def later():
                await asyncio.sleep(0)
                return value * 2
            return run_sync(later())
        """
    )
    assert await worker.get() == "['m', {'x': 1}, {}]"
    assert await rpc(worker, "twice", 4) == 8


async def test_where_modules_come_from(worker, tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("some_dependency", "helper", "workers", "js"):
        (packages / f"{name}.py").write_text("origin = 'packages'\n")
    (worker.root / "helper.py").write_text("origin = 'worker'\n")
    await worker.deploy(
        """
        def fetch(self):
            import helper, js, some_dependency, workers
            found = [helper.origin, some_dependency.origin]
            return Response.json([*found, hasattr(js, "JSON"), hasattr(workers, "Response")])
        """,
        search_paths=(str(packages),),
    )
    assert json.loads(await worker.get()) == ["worker", "packages", True, True]


async def test_cpu_time_of_invocations_that_take_turns(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            import time
            ms = int(request.url.rpartition("/")[2])
            for _ in range(10):
                end = time.thread_time_ns() + ms * 100_000
                while time.thread_time_ns() < end:
                    pass
                await asyncio.sleep(0)
            return Response("x")
        """
    )
    await worker.get("/1")
    worker.usage.clear()
    await asyncio.gather(worker.get("/100"), worker.get("/300"))
    await until(lambda: len(worker.usage) == 2)
    assert len({*worker.pids}) == 1
    used_ms = sorted(usage.cpu_us / 1000 for usage in worker.usage)
    assert used_ms[0] == pytest.approx(100, rel=0.2)
    assert used_ms[1] == pytest.approx(300, rel=0.1)
