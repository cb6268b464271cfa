"""Keeps notes, has a model summarize them in the background, and counts them every morning."""

import json
import logging

from prompts import messages_for

from workers import Response, WorkerEntrypoint

log = logging.getLogger(__name__)


class NoSummary(Exception):
    """The model had nothing to say."""


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        note_id = request.url.rpartition("/")[2]
        if not note_id:
            return Response("GET or PUT a note: /ID\n", status=404)
        match request.method:
            case "PUT":
                return await self.keep(note_id, (await request.text()).strip(), request.headers.get("x-ttl"))
            case "POST":
                return await self.ask(note_id, (await request.text()).strip())
            case _:
                return await self.show(note_id)

    async def keep(self, note_id, text, ttl_s):
        if not text:
            return Response.json({"error": "a note needs text"}, status=400)
        options = {"expirationTtl": int(ttl_s)} if ttl_s else {}
        await self.env.NOTES.put(note_id, json.dumps({"text": text}), options)
        await self.env.TO_SUMMARIZE.send({"id": note_id})
        self.ctx.waitUntil(self.remember(note_id))
        return Response(None, status=202)

    async def remember(self, note_id):
        print("kept", note_id)

    async def show(self, note_id):
        note = await self.env.NOTES.get(note_id, "json")
        return Response.json(note) if note else Response("There is no such note\n", status=404)

    async def ask(self, note_id, question):
        """The answer to a question about a note, word by word."""
        note = await self.env.NOTES.get(note_id, "json")
        inputs = {"messages": messages_for(note["text"], question), "stream": True, "max_tokens": 60}
        stream = await self.env.AI.run(self.env.MODEL, inputs)
        return Response(stream, headers={"content-type": "text/event-stream"})

    async def queue(self, batch):
        for message in batch:
            note = await self.env.NOTES.get(message.body["id"], "json")
            if note is None:  # it has expired
                message.ack()
                continue
            inputs = {"messages": messages_for(note["text"]), "max_tokens": 60, "temperature": 0}
            result = await self.env.AI.run(self.env.MODEL, inputs)
            if not result["response"]:
                raise NoSummary(message.body["id"])
            note["summary"] = result["response"]
            await self.env.NOTES.put(message.body["id"], json.dumps(note))
            message.ack()

    async def scheduled(self, controller):
        notes = await self.env.NOTES.list()
        log.warning("%d notes at %d", len(notes["keys"]), controller.scheduledTime)

    async def num_notes(self, prefix):
        """For other workers, over a service binding."""
        return len((await self.env.NOTES.list({"prefix": prefix}))["keys"])
