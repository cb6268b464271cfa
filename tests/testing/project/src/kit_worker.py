"""A worker that does on request whatever a test wants to see."""

import asyncio
import logging
import sys
import threading

from kit_helper import count

from workers import Response, WorkerEntrypoint

print("imported")


class Broken(Exception):
    pass


def fail():
    raise Broken("on purpose")


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.removeprefix("http://localhost/").partition("?")[0]
        return await getattr(self, path or "echo")(request)

    async def echo(self, request):
        body = await request.text()
        return Response.json(
            {"method": request.method, "url": request.url, "body": body, "headers": dict(request.headers.items())}
        )

    async def stream(self, request):
        async def pieces():
            for piece in ("one ", "two ", "three"):
                yield piece
                await asyncio.sleep(0)

        return Response(pieces())

    async def broken(self, request):
        fail()

    async def broken_body(self, request):
        async def pieces():
            yield "one"
            fail()

        return Response(pieces())

    async def nothing(self, request):
        return None

    async def bad_status(self, request):
        response = Response("x")
        response.status = 700
        return response

    async def count(self, request):
        return Response(str(count()))

    async def greet(self, request):
        return Response(f"{self.env.GREETING} {self.env.NESTED.a[1]}")

    async def other(self, request):
        return Response(str(await self.env.OTHER.add(1, 2)))

    async def myself(self, request):
        return Response(await self.env.SELF.who())

    async def limit(self, request):
        return Response.json(await self.env.LIMIT.limit({"key": "k"}))

    async def asset(self, request):
        return await self.env.ASSETS.fetch("http://x/note.txt")

    async def later(self, request):
        async def work():
            await asyncio.sleep(0.01)
            print("later")

        self.ctx.waitUntil(work())
        return Response("now")

    async def talk(self, request):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        logging.getLogger("kit").warning("a warning")
        await asyncio.to_thread(print, "from a thread")
        print("without a line end", end="")
        return Response("talked")

    async def ask(self, request):
        options = {"stream": True} if "stream" in request.url else {}
        result = await self.env.AI.run("@cf/meta/llama-3.2-1b-instruct", {"prompt": "?", **options})
        return Response(result) if options else Response.json(result)

    async def send(self, request):
        await self.env.JOBS.send({"n": 1})
        await self.env.JOBS.send({"n": 2}, delaySeconds=60)
        return Response("sent")

    async def meet(self, request):
        """Returns once another request has come as well."""
        _waiting.append(asyncio.get_running_loop().create_future())
        if len(_waiting) == 2:
            for each in _waiting:
                each.set_result(None)
        await _waiting[-1]
        return Response("met")

    async def hang(self, request):
        await asyncio.sleep(3600)

    async def where(self, request):
        return Response(threading.current_thread().name)

    async def scheduled(self, controller):
        await self.env.KV.put("cron", f"{controller.cron} {controller.scheduledTime}")
        controller.noRetry()

    async def queue(self, batch):
        for message in batch:
            match message.body["do"]:
                case "ack":
                    message.ack()
                case "retry":
                    message.retry(delaySeconds=5)
                case "fail":
                    fail()

    async def add(self, first, second):
        return {"sum": first + second, "caller": self.ctx.props.get("caller")}


class Named(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("named")

    async def who(self):
        return f"named, for {self.ctx.props.caller}"


_waiting = []
