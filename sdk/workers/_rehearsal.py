"""Serves requests of small workers, so that what that builds, caches and touches is there for real ones."""

from __future__ import annotations

import asyncio
import socket
import sys
from types import ModuleType

from workers import _run_sync, _runtime
from workers._cpu import MeteredLoop
from workers._isolate import Isolate
from workers._load import Worker
from workers._wire import Fetch, Frame, Init, Sandboxed, encode

TIMEOUT_S = 5.0

_HELLO = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("hello", headers={"x": request.headers.get("host", "")})
"""
_FASTAPI = """
from fastapi import FastAPI
from pydantic import BaseModel
from workers import asgi

class Item(BaseModel):
    name: str
    price: float | None = None

app = FastAPI()

@app.get("/")
async def read(q: str = "") -> Item:
    return Item(name=q)

@app.post("/")
async def write(item: Item) -> list[Item]:
    return [item]

Default = asgi.entrypoint(app)
"""
_SOURCES = {"workers": _HELLO, "fastapi": _FASTAPI}
"""By the package that has to be there. A framework's first application and request build what the next ones find."""


def rehearse() -> None:
    """Do, in this process, what it does to serve a request, for each package that is there; only caches stay of it."""
    for package, source in _SOURCES.items():
        if package in sys.modules:
            _rehearse(source)


def _rehearse(source: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode(Init("", "", "", "", {})))
        loop = MeteredLoop()
        asyncio.set_event_loop(loop)
        _run_sync.install(loop)
        try:
            run = _Rehearsal(loop, source, theirs).run(ours, Sandboxed([]))
            loop.run_until_complete(asyncio.wait_for(run, TIMEOUT_S))
        except TimeoutError:  # then real requests will show what is wrong with the package
            pass
        finally:
            loop.close()
            asyncio.set_event_loop(None)
            _runtime.runtime = None


class _Rehearsal(Isolate):
    def __init__(self, loop: MeteredLoop, source: str, theirs: socket.socket) -> None:
        super().__init__(loop)
        self._source = source
        self._theirs = theirs

    def finish(self, invocation: int, last: list[Frame]) -> None:
        super().finish(invocation, last)
        self._theirs.shutdown(socket.SHUT_WR)

    def _start(self, init: Init) -> None:
        super()._start(init)
        request = Fetch(2, "GET", "http://localhost/", [("host", "localhost")], False, {"colo": ""})
        self.loop.call_soon(self._on_frame, request)

    def _prepare(self, init: Init) -> None:
        """Leave the interpreter as it is."""

    def _load(self, init: Init) -> Worker:
        module = ModuleType("rehearsal")
        exec(compile(self._source, "rehearsal.py", "exec"), vars(module))
        return Worker(module, "rehearsal.py")
