"""Cron triggers: fires `scheduled` events of workers at their minutes, and by hand over HTTP.

A run that the node missed, because it was down or its machine slept, is not made up for, and neither is one that is due
while the one before of the same cron still runs, which may take a quarter of an hour. By hand, in `edge dev` only:
`/cdn-cgi/local/scheduled?cron=…&time=MS&format=json`. A page on the web can send requests to a developer's machine, so
these routes answer only those that name a local host as `Host` and, if they have one, as `Origin`.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from edge.errors import EdgeError, ExceededCpu, ExceededMemory, UnknownWorker
from edge.isolates.base import InboundEvent, WorkerKey
from edge.node.cron import Cron
from edge.node.pages import headline

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_PREFIXES = ("/cdn-cgi/local", "/cdn-cgi/handler", "/cdn-cgi/mf")
_MAX_TIME_MS = 1 << 53

Deliver = Callable[[WorkerKey, InboundEvent], Awaitable[Any]]


class Ran(NamedTuple):
    """How a run ended."""

    outcome: str
    """In Cloudflare's terms: `ok`, `exception`, `exceededCpu`, `exceededMemory`."""
    no_retry: bool = False


class Triggers:
    """The crons of all workers of a node, from `start` until `close`.

    Args:
        deliver: gives an event to a worker.
        say: where a line for the operator goes.
    """

    def __init__(self, deliver: Deliver, say: Callable[[str], None]) -> None:
        self._deliver = deliver
        self._say = say
        self._crons: dict[WorkerKey, list[Cron]] = {}
        self._runs: dict[tuple[WorkerKey, str], asyncio.Task[Ran]] = {}
        """What `fire` has begun and what goes on, by worker and expression."""
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Fire from the next full minute on."""
        self._ticking = asyncio.create_task(self._tick())

    def use(self, key: WorkerKey, crons: Sequence[Cron]) -> None:
        """Fire `crons` of the worker `key` from here on, and no others of it."""
        self._crons[key] = list(crons)

    def remove(self, key: WorkerKey) -> None:
        """Fire none of that worker any more."""
        self._crons.pop(key, None)

    def first(self) -> tuple[WorkerKey, str] | None:
        """The first cron of the first worker that has one."""
        return next(((key, crons[0].expression) for key, crons in self._crons.items() if crons), None)

    async def run(self, key: WorkerKey, cron: str, scheduled_ms: int) -> Ran:
        """Have the worker `key` serve one `scheduled` event, and say how that went.

        Raises:
            UnknownWorker: there is no such worker.
        """
        started = time.perf_counter()
        details = ""
        try:
            value = await self._deliver(key, InboundEvent("scheduled", {"cron": cron, "scheduledTime": scheduled_ms}))
            ran = Ran("ok", isinstance(value, dict) and value.get("noRetry") is True)
        except UnknownWorker:
            raise
        except EdgeError as error:
            ran = Ran(_OUTCOMES.get(type(error), "exception"))
            details = f"  {headline(error)}\n{getattr(error, 'traceback', '')}".rstrip()
        self._say(f'CRON "{cron}" {key[1]} {ran.outcome} ({(time.perf_counter() - started) * 1000:.0f} ms){details}')
        return ran

    async def close(self) -> None:
        """Fire no more; runs that go on are given up."""
        tasks = [*self._runs.values(), *([self._ticking] if self._ticking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        last = int(time.time()) // 60
        while True:
            await asyncio.sleep(60 - time.time() % 60)
            minute = int(time.time()) // 60
            if minute != last:  # the sleep may end a moment early
                last = minute
                self.fire(minute * 60_000)

    def fire(self, minute_ms: int) -> None:
        """Begin all runs that are due in the minute that begins at `minute_ms`, in Unix time; but none of a cron whose
        last one still goes on, so that a handler that never ends does not take all places of its worker."""
        minute = datetime.fromtimestamp(minute_ms / 1000, UTC)
        for key, crons in self._crons.items():
            for cron in crons:
                place = (key, cron.expression)
                if not cron.matches(minute):
                    continue
                if place in self._runs:
                    at = f"{minute:%H:%M} UTC"
                    self._say(f'CRON "{cron.expression}" {key[1]} left out at {at}: the run before still goes on')
                    continue
                self._runs[place] = asyncio.create_task(self.run(key, cron.expression, minute_ms))
                self._runs[place].add_done_callback(functools.partial(self._on_run, place))

    def _on_run(self, place: tuple[WorkerKey, str], task: asyncio.Task[Ran]) -> None:
        del self._runs[place]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._say(f"error: a cron could not be run: {error}")


_OUTCOMES: dict[type[EdgeError], str] = {ExceededCpu: "exceededCpu", ExceededMemory: "exceededMemory"}


# -- over HTTP ---------------------------------------------------------------------------------------------


def routes(
    triggers: Triggers, find: Callable[[str], WorkerKey | None], local_hosts: frozenset[str] = LOCAL_HOSTS
) -> list[BaseRoute]:
    """The routes that fire crons by hand.

    Args:
        find: the worker of a name; of an empty name the one that HTTP requests reach.
        local_hosts: which names of the node are told apart from those of the web.
    """

    async def scheduled(request: Request) -> Response:
        query = request.query_params
        key = find(query.get("worker", ""))
        if key is None:
            return PlainTextResponse(f"there is no worker {query.get('worker', '')[:100]!r}\n", 404)
        time_text = query.get("time") or str(time.time_ns() // 1_000_000)
        if not re.fullmatch(r"[0-9]{1,16}", time_text) or int(time_text) > _MAX_TIME_MS:
            return PlainTextResponse("time must be a whole number of milliseconds since 1970\n", 400)
        try:
            ran = await triggers.run(key, query.get("cron", ""), int(time_text))
        except UnknownWorker as error:
            return PlainTextResponse(f"{error.message}\n", error.status)
        status = 200 if ran.outcome == "ok" else 500
        if request.url.path == "/__scheduled" and status == 200:
            return PlainTextResponse("Ran scheduled event")
        if query.get("format") == "json":
            return JSONResponse({"outcome": ran.outcome, "noRetry": ran.no_retry}, status)
        return PlainTextResponse(ran.outcome, status)

    def guarded(path: str) -> Route:
        return Route(path, _LocalOnly(request_response(scheduled), local_hosts))

    return [*(Mount(prefix, routes=[guarded("/scheduled")]) for prefix in _PREFIXES), guarded("/__scheduled")]


class _LocalOnly:
    """Refuses requests that come from elsewhere, or that a page of the web has sent."""

    def __init__(self, app: ASGIApp, local_hosts: frozenset[str]) -> None:
        self._app = app
        self._local_hosts = local_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope)
        origin = request.headers.get("origin")
        if self._is_local(f"//{request.headers.get('host', '')}") and (origin is None or self._is_local(origin)):
            await self._app(scope, receive, send)
        else:
            refusal = PlainTextResponse("this route is for local requests only: use http://localhost:PORT\n", 403)
            await refusal(scope, receive, send)

    def _is_local(self, url: str) -> bool:
        try:
            return urlsplit(url).hostname in self._local_hosts
        except ValueError:
            return False
