"""`run_sync` in real handler processes: sync code waits, everything else goes on."""

from __future__ import annotations

import asyncio

import pytest

from edge.errors import HandlerFailed
from edge.isolates.base import JsonAnswer


async def test_sync_code_in_an_async_handler_waits_for_a_binding(worker) -> None:
    await worker.deploy("""
        def ask(self, text):
            from pyodide.ffi import can_run_sync, run_sync
            assert can_run_sync()
            return run_sync(self.env.AI.run("model", {"prompt": text}))[1]

        async def fetch(self, request):
            first = self.ask("one")
            await asyncio.sleep(0)
            return Response.json([first, self.ask("two")])
    """)
    assert await worker.get() == '[{"prompt": "one"}, {"prompt": "two"}]'


async def test_a_sync_handler_can_wait_and_does_not_hold_up_others(worker) -> None:
    await worker.deploy("""
        gate = None

        def fetch(self, request):
            from pyodide.ffi import run_sync
            gate = Default.gate = Default.gate or asyncio.Event()
            if request.url.endswith("open"):
                gate.set()
            run_sync(gate.wait())
            return Response(request.url)
    """)
    waiting = [asyncio.create_task(worker.get(f"/{n}")) for n in range(5)]
    assert await worker.get("/open") == "http://test/open"
    assert await asyncio.gather(*waiting) == [f"http://test/{n}" for n in range(5)]


async def test_context_is_that_of_the_invocation_everywhere(worker) -> None:
    await worker.deploy("""
        async def fetch(self, request):
            from contextvars import ContextVar
            from pyodide.ffi import run_sync
            from workers import _runtime
            import workers

            seen = []
            mark = ContextVar("mark")
            mark.set(request.url)

            async def look():
                await asyncio.sleep(0)
                seen.append((mark.get(), _runtime.context.get() is self.ctx, asyncio.current_task() is task))

            async def in_a_task():
                run_sync(look_without_task())

            async def look_without_task():
                seen.append((mark.get(), _runtime.context.get() is self.ctx))

            task = asyncio.current_task()
            run_sync(look())
            await asyncio.create_task(in_a_task())
            await asyncio.to_thread(lambda: run_sync(look_without_task()))
            mine = ("http://test/a", True)
            assert seen == [(*mine, True), mine, mine], seen
            return Response("right")
    """)
    assert await worker.get("/a") == "right"


async def test_errors_and_cancellation_reach_the_sync_code(worker) -> None:
    await worker.deploy("""
        async def fetch(self, request):
            from pyodide.ffi import run_sync

            async def fails():
                await asyncio.sleep(0)
                raise KeyError("inside")

            def caught():
                try:
                    run_sync(fails())
                except KeyError as error:
                    return str(error)

            if request.url.endswith("error"):
                return Response(caught())
            try:
                print("waiting")
                run_sync(asyncio.sleep(600))
            finally:
                print("cancelled")
    """)
    assert await worker.get("/error") == "'inside'"
    waiting = asyncio.create_task(worker.get("/wait"))
    await worker.log_text("waiting")
    waiting.cancel()
    await worker.log_text("cancelled")


async def test_it_works_while_the_worker_is_imported(worker) -> None:
    await worker.deploy(
        """
        import asyncio
        from pyodide.ffi import run_sync
        from workers import Response, WorkerEntrypoint

        async def load():
            await asyncio.sleep(0.01)
            return "loaded"

        VALUE = run_sync(load())

        class Default(WorkerEntrypoint):
            def fetch(self, request):
                return Response(VALUE)
        """,
        indented=False,
    )
    assert await worker.get() == "loaded"


async def test_where_it_cannot_wait_it_says_so(worker) -> None:
    await worker.deploy("""
        async def fetch(self, request):
            from pyodide.ffi import can_run_sync, run_sync
            done = asyncio.get_running_loop().create_future()

            def callback():
                try:
                    run_sync(asyncio.sleep(0))
                except RuntimeError as error:
                    done.set_result([can_run_sync(), str(error)])

            asyncio.get_running_loop().call_soon(callback)
            return Response.json(await done)
    """)
    assert '[false, "run_sync() works only in a handler' in await worker.get()


async def test_what_is_no_awaitable_is_refused(worker) -> None:
    await worker.deploy("""
        def fetch(self, request):
            from pyodide.ffi import run_sync
            run_sync(3)
    """)
    with pytest.raises(HandlerFailed, match=r"run_sync\(\) needs an awaitable, not int"):
        await worker.get()


async def test_many_waits_at_once(worker) -> None:
    worker.bindings.answer = lambda model, inputs, options: answer(inputs)
    await worker.deploy("""
        async def fetch(self, request):
            from pyodide.ffi import run_sync
            def ask(n, depth=0):
                if depth < 20:
                    return ask(n, depth + 1)
                return run_sync(self.env.AI.run("m", {"n": n}))["n"]
            async def one(n):
                return ask(n)
            results = await asyncio.gather(*map(one, range(200)))
            assert results == list(range(200)), results
            return Response("all")
    """)
    assert await worker.get() == "all"


async def answer(inputs: dict[str, int]) -> JsonAnswer:
    await asyncio.sleep(0.001 * (inputs["n"] % 7))
    return JsonAnswer(inputs)
