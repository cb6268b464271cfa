"""Serves a request of an empty worker, so that what that builds, caches and touches is there for a real one."""

from __future__ import annotations

import asyncio
import socket
from types import ModuleType

from workers import _run_sync, _runtime
from workers._cpu import MeteredLoop
from workers._isolate import Isolate
from workers._load import Worker
from workers._wire import Fetch, Init, Sandboxed, encode

_SOURCE = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("hello", headers={"x": request.headers.get("host", "")})
"""


def rehearse() -> None:
    """Do once, in this process, what it does to serve a request; nothing of it stays but caches."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode(Init("", "", "", "", {})))
        theirs.shutdown(socket.SHUT_WR)
        loop = MeteredLoop()
        asyncio.set_event_loop(loop)
        _run_sync.install(loop)
        try:
            loop.run_until_complete(_Rehearsal(loop).run(ours, Sandboxed([])))
        finally:
            loop.close()
            asyncio.set_event_loop(None)
            _runtime.runtime = None


class _Rehearsal(Isolate):
    def _start(self, init: Init) -> None:
        super()._start(init)
        request = Fetch(2, "GET", "http://localhost/", [("host", "localhost")], False, {"colo": ""})
        self.loop.call_soon(self._on_frame, request)

    def _prepare(self, init: Init) -> None:
        """Leave the interpreter as it is."""

    def _load(self, init: Init) -> Worker:
        module = ModuleType("rehearsal")
        exec(compile(_SOURCE, "rehearsal.py", "exec"), vars(module))
        return Worker(module, "rehearsal.py")
