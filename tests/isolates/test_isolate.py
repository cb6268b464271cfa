"""Requests through real handler processes: what handlers can do, and what they can do wrong."""

from __future__ import annotations

import asyncio
import json
import resource

import pytest

from edge.errors import HandlerFailed, HandlerTimeout, UnknownModel, WorkerStartFailed
from edge.isolates.dispatch import JsonAnswer, StreamAnswer
from edge.isolates.isolate import MAX_LOG_TEXT, MAX_NAME, MAX_TRACEBACK

from .conftest import is_alive, until

# -- what handlers can do ----------------------------------------------------------------------------------


async def test_a_request_and_its_response(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            body = await request.json()
            text = f"{request.method} {request.url} {request.headers['X-A']} {request.cf.colo} {body.name}"
            return Response(text, 201, headers=[("set-cookie", "a=1"), ("set-cookie", "b=2")])
        """
    )

    async def body():
        yield b'{"name"'
        yield b': "x"}'

    response = await worker.open("/a?b", "POST", body(), [("x-a", "1")])
    assert response.status == 201
    text = b"".join([chunk async for chunk in response.body])
    assert text == b"POST http://test/a?b 1 DEV x"
    assert response.headers == [
        ("set-cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("content-type", "text/plain;charset=UTF-8"),
        ("content-length", str(len(text))),
    ]


async def test_a_response_without_body(worker):
    await worker.deploy("def fetch(self): return Response(None, 204)")
    response = await worker.open()
    assert (response.status, response.headers, response.body) == (204, [], None)


async def test_global_handler(worker):
    source = "from workers import Response\ndef on_fetch(request, env, ctx):\n    return Response(env.A)\n"
    await worker.deploy(source, vars={"A": "x"}, indented=False)
    assert await worker.get() == "x"


async def test_env_at_import_and_in_the_handler(worker):
    await worker.deploy(
        """
        from workers import env
        AT_IMPORT = env.NAME
        async def fetch(self, request):
            self.env.CONFIG.a = "changed"
            from workers import env
            return Response.json([self.AT_IMPORT, env.NAME, self.env["CONFIG"].b.c, hasattr(self.env, "X")])
        """,
        vars={"NAME": "n", "CONFIG": {"a": 1, "b": {"c": 2}}},
    )
    assert json.loads(await worker.get()) == ["n", "n", 2, False]


async def test_the_environment_of_the_process_is_clean(worker, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    await worker.deploy(
        """
        def fetch(self):
            import os, resource, sys
            edge = sorted(name for name in sys.modules if name.split(".")[0] == "edge")
            fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(64) if os.path.lexists(f"/proc/self/fd/{fd}")]
            session = os.getsid(0) == os.getpid()
            return Response.json([sorted(os.environ), edge, fds, session, resource.getrlimit(resource.RLIMIT_CORE)])
        """
    )
    names, modules, fds, is_session_leader, core = json.loads(await worker.get())
    assert "SECRET_TOKEN" not in names
    assert modules[:2] == ["edge", "edge.isolates"]
    assert all(name.startswith("edge.isolates.sandbox") for name in modules[2:])
    assert fds[0] == "/dev/null"
    assert sum(fd.startswith("socket:") for fd in fds) == 3  # the node's, and a pair of the event loop's own
    assert is_session_leader
    assert core == [0, 0]
    assert {"session", "clean-environment", "closed-descriptors", "no-new-privileges"} <= set(worker.status.layers)


async def test_streams_in_both_directions_at_once(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            async def shout():
                async for chunk in request.body:
                    yield chunk.to_bytes().upper()
            return Response(shout())
        """
    )
    said: asyncio.Queue[bytes] = asyncio.Queue()

    async def body():
        for word in (b"a", b"b", b"c"):
            await said.put(word)
            yield word
            await heard.wait()
            heard.clear()

    heard = asyncio.Event()
    response = await worker.open("/", "POST", body())
    async for chunk in response.body:
        assert chunk == (await said.get()).upper()
        heard.set()
    assert said.empty()


@pytest.mark.slow
async def test_100_mb_stream_in_constant_memory(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            async def blocks():
                for _ in range(1600):
                    yield bytes(65536)
            return Response(blocks())
        """
    )
    response = await worker.open()
    await anext(response.body)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, peak_kb(worker.pid)
    num_bytes = 65536
    async for chunk in response.body:
        num_bytes += len(chunk)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, peak_kb(worker.pid)
    assert num_bytes == 1600 * 65536
    assert after[0] - before[0] < 8 << 10
    assert after[1] - before[1] < 8 << 10


async def test_nothing_is_produced_that_nobody_reads(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            async def blocks():
                for number in range(10_000):
                    print("block", number)
                    yield bytes(32768)
            return Response(blocks())
        """
    )
    response = await worker.open()
    await anext(response.body)
    await worker.log_text("block 8")
    await asyncio.sleep(0.1)
    assert len(worker.logs) < 16  # a window of 8 blocks, and what was read
    await response.body.aclose()


async def test_a_request_body_that_nobody_reads_is_not_taken(worker):
    await worker.deploy('async def fetch(self, request):\n    await asyncio.sleep(0.1)\n    return Response("done")')
    num_taken = 0

    async def body():
        nonlocal num_taken
        while True:
            num_taken += 1
            yield bytes(32768)

    assert await worker.get("/", method="POST", body=body()) == "done"
    assert num_taken < 16


async def test_a_request_body_that_breaks_off_is_an_oserror(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            try:
                return Response(await request.text())
            except OSError as error:
                return Response(f"caught {error}")
        """
    )

    async def body():
        yield b"a"
        raise ConnectionResetError("the client went away")

    assert (
        await worker.get("/", method="POST", body=body()) == "caught the request's body broke off: the client went away"
    )


async def test_concurrent_requests_interleave_and_keep_their_logs_apart(worker):
    await worker.deploy(
        """
        waiting = []
        async def fetch(self, request):
            print("start", request.url, end=" ")
            event = asyncio.Event()
            self.waiting.append(event)
            if len(self.waiting) == 3:
                for other in self.waiting:
                    other.set()
            await event.wait()
            print("end", request.url)
            await asyncio.create_task(self.later(request.url))
            return Response("ok")
        async def later(self, url):
            print("later", url)
        """
    )
    assert await asyncio.gather(*(worker.get(f"/{name}") for name in "abc")) == ["ok"] * 3
    await until(lambda: len(worker.logs) == 6)
    by_invocation: dict[int, list[str]] = {}
    for invocation, _, text in worker.logs:
        by_invocation.setdefault(invocation, []).append(text)
    assert sorted(by_invocation.values()) == [
        [f"start http://test/{name} end http://test/{name}", f"later http://test/{name}"] for name in "abc"
    ]


async def test_output_and_log_records(worker):
    await worker.deploy(
        """
        import logging, sys, warnings
        logging.warning("at import")
        def fetch(self):
            import logging, sys, threading
            print("one\\ntwo")
            print("to stderr", file=sys.stderr)
            sys.stdout.buffer.write(b"raw\\n")
            logging.getLogger("mine").error("a %s", "record")
            logging.info("not shown by default")
            thread = threading.Thread(target=print, args=("from a thread",))
            thread.start()
            thread.join()
            print("\\ud800 no line end", end="")
            return Response("")
        """
    )
    await worker.get()
    await worker.log_text("from a thread")
    await worker.log_text("no line end")
    assert worker.logs[0] == (0, "warning", "WARNING:root:at import")
    invocation = worker.logs[1][0]
    assert invocation > 0
    assert worker.logs[1:6] == [
        (invocation, "log", "one"),
        (invocation, "log", "two"),
        (invocation, "error", "to stderr"),
        (invocation, "log", "raw"),
        (invocation, "error", "ERROR:mine:a record"),
    ]
    assert (invocation, "log", "\\ud800 no line end") in worker.logs


async def test_basic_config_of_the_user_works(worker):
    await worker.deploy(
        """
        import logging
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s:%(message)s")
        def fetch(self):
            import logging
            logging.debug("x")
            return Response("")
        """
    )
    await worker.get()
    assert (await worker.log_text("x"))[1:] == ("debug", "DEBUG:x")


async def test_log_records_without_any_configuration(worker):
    await worker.deploy(
        """
        def fetch(self):
            import logging
            logging.getLogger("mine").warning("%s", "w")
            logging.getLogger("mine").info("not shown")
            print("end")
            return Response("")
        """
    )
    await worker.get()
    await worker.log_text("end")
    assert [entry[1:] for entry in worker.logs] == [("warning", "w"), ("log", "end")]


async def test_wait_until_goes_on_after_the_response(worker):
    await worker.deploy(
        """
        go_on = asyncio.Event()
        async def fetch(self, request):
            from workers import waitUntil
            if "go-on" in request.url:
                self.go_on.set()
            else:
                self.ctx.waitUntil(self.later("method"))
                waitUntil(self.later("function"))
                self.ctx.waitUntil(self.fail())
            return Response("done")
        async def later(self, what):
            await self.go_on.wait()
            print("later", what)
        async def fail(self):
            raise ValueError("in the background")
        """
    )
    assert await worker.get() == "done"
    await worker.log_text("in the background")
    assert not any("later" in text for _, _, text in worker.logs)
    await worker.get("/go-on")
    await worker.log_text("later method")
    await worker.log_text("later function")
    _, level, text = await worker.log_text("in the background")
    assert level == "error"
    assert text.startswith("waitUntil() work failed:\nTraceback")
    assert 'worker_main.py", line' in text


async def test_wait_until_outlives_a_client_that_hangs_up(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            self.ctx.waitUntil(self.later())
            async def endless():
                while True:
                    yield "x"
                    await asyncio.sleep(0.01)
            return Response(endless())
        async def later(self):
            await asyncio.sleep(0.2)
            print("still done")
        """
    )
    response = await worker.open()
    await anext(response.body)
    await response.body.aclose()
    await worker.log_text("still done")


# -- env.AI ------------------------------------------------------------------------------------------------


async def test_ai_results(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            class Proxy:
                def to_py(self): return {"prompt": "p"}
            result = await self.env.AI.run("@cf/m", Proxy(), {"gateway": {"id": "x"}}, prefix="y")
            raw = await self.env.AI.run("@cf/m", {"image": b"ab"}, returnRawResponse=True)
            model, inputs, options = result
            ai = self.env.AI
            return Response.json([
                model, inputs.prompt, options.to_py(), (await raw.json())[0], raw.headers["content-type"],
                ai.lastRequestId, ai.lastRequestHttpStatusCode, ai.aiGatewayLogId,
            ])
        """
    )
    seen = []

    def answer(model, inputs, options):
        seen.append(inputs)
        return JsonAnswer([model, None if "image" in inputs else inputs, options], {"requestId": "r", "status": 200})

    worker.bindings.answer = answer
    assert json.loads(await worker.get()) == [
        "@cf/m", "p", {"gateway": {"id": "x"}, "prefix": "y"}, "@cf/m", "application/json", "r", 200, None,
    ]  # fmt: skip
    assert seen == [{"prompt": "p"}, {"image": b"ab"}]


async def test_ai_errors(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            from workers.ai import InferenceUpstreamError
            try:
                await self.env.AI.run("@cf/nope", {})
            except InferenceUpstreamError as error:
                raw = await self.env.AI.run("@cf/nope", {}, {"returnRawResponse": True})
                found = [str(error), error.name, error.message, error.code, error.status, raw.status]
            try:
                await self.env.AI.run("@cf/nope", {"a": {1}})
            except TypeError as error:
                found.append(str(error))
            try:
                await self.env.AI.run("@cf/nope", {"a": 2**70})
            except ValueError as error:
                found.append(str(error))
            return Response.json(found)
        """
    )

    def refuse(*_):
        raise UnknownModel("no such model")

    worker.bindings.answer = refuse
    *error, unsendable, too_large = json.loads(await worker.get())
    assert error == ["5007: no such model", "NoSuchModel", "5007: no such model", 5007, 400, 400]
    assert unsendable.startswith("inputs.a is a set")
    assert "a value cannot be sent" in too_large


async def test_a_bug_in_a_binding_is_an_error_in_the_handler(worker, caplog):
    await worker.deploy(
        """
        async def fetch(self, request):
            try:
                await self.env.AI.run("m", {})
            except Exception as error:
                return Response(str(error))
        """
    )
    worker.bindings.answer = lambda *_: 1 / 0
    assert await worker.get() == "1000: internal error: ZeroDivisionError"
    assert "a handler's call failed" in caplog.text
    worker.bindings.answer = lambda *_: JsonAnswer(object())
    assert "cannot be handed to the handler" in await worker.get()


class Tokens:
    """An endless stream of tokens that knows whether it was closed."""

    def __init__(self) -> None:
        self.num_given = 0
        self.closed = asyncio.Event()

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        self.num_given += 1
        return b"data: x\n\n"

    async def aclose(self):
        await asyncio.sleep(0.05)  # closing takes a while, and may not be broken off
        self.closed.set()


@pytest.mark.parametrize(
    "body",
    [
        "Response(stream, headers={'content-type': 'text/event-stream'})",
        "Response(stream.getReader()._stream)",
        "Response(wrapped(stream))",
    ],
)
async def test_a_client_that_hangs_up_stops_the_model(worker, body):
    await worker.deploy(
        f"""
        async def fetch(self, request):
            stream = await self.env.AI.run("m", {{"stream": True}})
            async def wrapped(stream):
                async for chunk in stream:
                    yield chunk.to_bytes()
            return {body}
        """
    )
    tokens = Tokens()
    worker.bindings.answer = lambda *_: StreamAnswer(200, [("content-type", "text/event-stream")], tokens)
    response = await worker.open()
    assert (await anext(response.body)).startswith(b"data: x\n\n")
    assert not tokens.closed.is_set()
    await response.body.aclose()
    await asyncio.wait_for(tokens.closed.wait(), 10)


async def test_a_stream_that_the_handler_leaves_is_stopped(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            stream = await self.env.AI.run("m", {"stream": True})
            async for chunk in stream:
                return Response(chunk.to_bytes())
        """
    )
    tokens = Tokens()
    worker.bindings.answer = lambda *_: StreamAnswer(200, [], tokens)
    assert await worker.get() == "data: x\n\n"
    await asyncio.wait_for(tokens.closed.wait(), 10)


async def test_a_response_body_that_was_never_read_can_be_closed(worker):
    await worker.deploy("async def fetch(self, request): return Response(await self.env.AI.run('m', {'stream': True}))")
    tokens = Tokens()
    worker.bindings.answer = lambda *_: StreamAnswer(200, [], tokens)
    response = await worker.open()
    await response.body.aclose()
    await asyncio.wait_for(tokens.closed.wait(), 10)


async def test_a_cancelled_request_cancels_the_call(worker):
    await worker.deploy("async def fetch(self, request): return Response.json(await self.env.AI.run('m', {}))")
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    worker.bindings.answer = lambda *_: hang()
    request = asyncio.create_task(worker.get())
    await started.wait()
    request.cancel()
    await asyncio.wait_for(cancelled.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_an_error_in_a_stream_reaches_the_handler(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            stream = await self.env.AI.run("m", {"stream": True})
            reader, found = stream.getReader(), []
            try:
                while not (read := await reader.read()).done:
                    found.append(read.value.to_bytes().decode())
            except OSError as error:
                found.append(str(error))
            return Response.json(found)
        """
    )

    async def tokens():
        yield b"a"
        raise UnknownModel("went away")

    worker.bindings.answer = lambda *_: StreamAnswer(200, [], tokens())
    assert json.loads(await worker.get()) == ["a", "went away"]


# -- what handlers do wrong --------------------------------------------------------------------------------


async def test_an_exception_comes_with_the_users_traceback(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            return self.helper()
        def helper(self):
            raise KeyError("x")
        """
    )
    with pytest.raises(HandlerFailed) as caught:
        await worker.get()
    assert (caught.value.type, caught.value.message) == ("KeyError", "'x'")
    lines = caught.value.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{worker.root}/worker_main.py", line 7, in fetch'
    assert "helper" in caught.value.traceback
    assert "_isolate.py" not in caught.value.traceback


@pytest.mark.parametrize(
    ("code", "type", "message"),
    [
        ("sys.exit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt()", "KeyboardInterrupt", ""),
        ("raise asyncio.CancelledError()", "CancelledError", ""),
        ("raise GeneratorExit()", "GeneratorExit", ""),
        ("self.fetch(request)", "RecursionError", "maximum recursion depth exceeded"),
        ("return None", "TypeError", "must return a Response, but returned None (is a `return` missing?)"),
        (
            "return {}",
            "TypeError",
            "fetch() of class Default in worker_main.py must return a Response, but returned a dict",
        ),
        ("return Response({})", "TypeError", "Unsupported type in Response: dict"),
        ("return Response('', headers={'a': 'b\\nc'})", "ValueError", "line break"),
    ],
)
async def test_what_a_handler_raises_ends_only_its_request(worker, code, type, message):
    await worker.deploy(
        f"""
        def fetch(self, request):
            import sys
            if "ok" in request.url:
                return Response("ok")
            {code}
        """
    )
    pid = worker.pid
    with pytest.raises(HandlerFailed) as caught:
        await worker.get()
    assert caught.value.type == type
    assert message in caught.value.message
    assert await worker.get("/ok") == "ok"
    assert worker.pid == pid


@pytest.mark.parametrize("code", ["sys.exit(3)", "raise KeyboardInterrupt()", "asyncio.get_event_loop().stop()"])
async def test_what_a_background_task_raises_ends_nothing(worker, code):
    await worker.deploy(
        f"""
        tasks = []
        async def fetch(self, request):
            self.tasks.append(asyncio.create_task(self.bad()))
            await asyncio.sleep(0.02)
            return Response("ok")
        async def bad(self):
            import sys
            {code}
        """
    )
    pid = worker.pid
    assert await worker.get() == "ok"
    assert await worker.get() == "ok"
    assert worker.pid == pid
    await worker.log_text("a background task ended with")


async def test_a_body_that_breaks_off_after_the_head(worker):
    await worker.deploy(
        """
        async def fetch(self, request):
            async def broken():
                yield "a"
                raise ValueError("no more")
            return Response(broken())
        """
    )
    response = await worker.open()
    assert await anext(response.body) == b"a"
    with pytest.raises(HandlerFailed, match="the response's body broke off: ValueError: no more"):
        await anext(response.body)
    _, level, text = await worker.log_text("the response's body broke off")
    assert level == "error"
    assert f'File "{worker.root}/worker_main.py", line 9, in broken' in text


async def test_a_body_of_wrong_chunks(worker):
    await worker.deploy("def fetch(self): return Response(iter([{}]))")
    response = await worker.open()
    with pytest.raises(HandlerFailed, match="Unsupported type in stream: dict"):
        await anext(response.body)


async def test_a_missing_handler(worker):
    await worker.deploy("async def scheduled(self): pass")
    with pytest.raises(HandlerFailed, match="Method fetch does not exist"):
        await worker.get()


async def test_a_handler_that_waits_too_long(hasty):
    await hasty.deploy(
        """
        async def fetch(self, request):
            if "slow" in request.url:
                try:
                    await asyncio.sleep(60)
                finally:
                    print("cancelled")
            return Response("ok")
        """
    )
    pid = hasty.pid
    with pytest.raises(HandlerTimeout, match=r"within 1 s and was stopped; raise limits\.timeout_s \(now 1\)"):
        await hasty.get("/slow")
    await hasty.log_text("cancelled")
    assert await hasty.get() == "ok"
    assert hasty.pid == pid


@pytest.mark.parametrize(
    "wedge",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import threading; threading.Event().wait()",
        "__import__('os').kill(__import__('os').getpid(), 19)",  # SIGSTOP
    ],
)
async def test_a_wedged_process_is_killed_and_replaced(hasty, wedge):
    await hasty.deploy(
        f"""
        async def fetch(self, request):
            if "wedge" in request.url:
                print("before")
                {wedge}
            return Response("ok")
        """
    )
    pid = hasty.pid
    with pytest.raises(HandlerTimeout):
        await hasty.get("/wedge")
    assert await hasty.get() == "ok"  # from another process, while that one is in doubt
    await until(lambda: hasty.pid != pid)
    await until(lambda: not is_alive(pid))
    await hasty.log_text("before")


async def test_a_handler_that_refuses_to_stop_is_killed(hasty):
    await hasty.deploy(
        """
        async def fetch(self, request):
            while "stubborn" in request.url:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
            return Response("ok")
        """
    )
    pid = hasty.pid
    with pytest.raises(HandlerTimeout):
        await hasty.get("/stubborn")
    assert await hasty.get() == "ok"  # from another process, while that one is in doubt
    await until(lambda: hasty.pid != pid)


async def test_a_handler_that_answers_although_cancelled(hasty):
    await hasty.deploy(
        """
        async def fetch(self, request):
            try:
                await asyncio.sleep(60 if "slow" in request.url else 0)
            except asyncio.CancelledError:
                return Response("too late")
            return Response("ok")
        """
    )
    pid = hasty.pid
    with pytest.raises(HandlerTimeout):
        await hasty.get("/slow")
    assert await hasty.get() == "ok"
    assert hasty.pid == pid


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("return request.text()", "Is an `await` missing?"),
        ("return Response(request.text())", "Is an `await` missing?"),
        ("return Response(self.env.AI.run('m', {})['response'])", "Is an `await` missing?"),
        ("return Response(request.json().name)", "Is an `await` missing?"),
        ("return 'text'", "Response(value) makes a response of it."),
        ("return {}", "Response.json(value) makes a JSON response of it."),
    ],
)
async def test_a_common_slip_is_named(worker, code, hint):
    await worker.deploy(f"async def fetch(self, request):\n    {code}")
    with pytest.raises(HandlerFailed) as caught:
        await worker.get()
    assert hint.lower() in f"{caught.value.traceback}".lower()
    await asyncio.sleep(0.1)
    if "self.env" not in code and ".name" not in code:  # there Python has the coroutine and says it was never awaited
        assert not any("never awaited" in text for _, _, text in worker.logs)


async def test_a_handler_that_forks_does_not_answer_twice(unsandboxed):
    worker = unsandboxed
    await worker.deploy(
        """
        async def fetch(self, request):
            import multiprocessing, os
            match request.url.rsplit("/")[-1]:
                case "fork":
                    return Response(str(os.fork()))
                case "big":
                    return Response(b"x" * 5_000_000)
                case "child":
                    pipe, theirs = multiprocessing.Pipe()
                    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(6 * 7))
                    child.start()
                    result = pipe.recv()
                    child.join()
                    return Response(f"{result} {child.exitcode}")
        """
    )
    for _ in range(5):
        assert int(await worker.get("/fork")) > 0
        assert await worker.get("/child") == "42 0"
    async with asyncio.timeout(20):
        assert len(await worker.get("/big")) == 5_000_000
    assert [entry for entry in worker.logs if "loop" in entry[2]] == []


def peak_kb(pid: int) -> int:
    """The most memory that a process had resident so far, in KiB."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


async def test_what_a_process_says_of_itself_is_cut(worker):
    """Frames of its own making: names and texts of any length."""
    await worker.deploy(
        """
        import asyncio
        from workers import Response, WorkerEntrypoint, _runtime
        from workers._wire import Log, Ready, StartFailed, Threw

        channel = _runtime.runtime.channel
        channel.send(Ready(["fetch", "x" * 100_000, *map(str, range(1000)), "queue"], 0))
        long = "x" * 1_000_000

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                channel.send(Log(0, long, "forged " + long))
                channel.send(Threw(self.ctx._invocation, long, long, long))
                await asyncio.sleep(60)
        """,
        indented=False,
    )
    assert worker.status.handlers == ["fetch", "queue"]
    with pytest.raises(HandlerFailed) as caught:
        await worker.get()
    error = caught.value
    assert (len(error.type), len(error.message), len(error.traceback)) == (MAX_NAME, MAX_LOG_TEXT, MAX_TRACEBACK)
    _, level, text = await worker.log_text("forged")
    assert (len(level), len(text)) == (MAX_NAME, MAX_LOG_TEXT)


async def test_why_a_process_could_not_start_is_cut(worker):
    source = """
        from workers import _runtime
        from workers._wire import StartFailed
        _runtime.runtime.channel.send(StartFailed("x" * 100_000, "y" * 100_000, "z" * 1_000_000))
        """
    with pytest.raises(WorkerStartFailed) as caught:
        await worker.deploy(source, indented=False)
    assert len(caught.value.message) < MAX_LOG_TEXT + MAX_NAME + 100
    assert len(caught.value.traceback) == MAX_TRACEBACK
