"""A worker that answers /?q=... with a language model, at once or word by word. Also the demo of `make dev`."""

import json
from urllib.parse import parse_qs, urlsplit

from workers import Response, WorkerEntrypoint

MODEL = "@cf/meta/llama-3.2-1b-instruct"

HELP = """\
Ask me something:

  curl 'ORIGIN/?q=What+is+the+capital+of+France'
  curl -N 'ORIGIN/?q=Tell+me+a+story&stream=1'      words as they come
  curl -N 'ORIGIN/?q=Tell+me+a+story&stream=sse'    the same as server-sent events
"""


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        url = urlsplit(request.url)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if "q" not in query:
            return Response(HELP.replace("ORIGIN", f"{url.scheme}://{url.netloc}"))
        question = {"role": "user", "content": query["q"]}
        # Temperature 0: always the likeliest word. A small model that chooses more freely soon talks nonsense.
        inputs = {"messages": [question], "max_tokens": self.env.MAX_TOKENS, "temperature": 0}
        if "stream" not in query:
            result = await self.env.AI.run(MODEL, inputs)
            return Response(result["response"].strip() + "\n")
        stream = await self.env.AI.run(MODEL, {**inputs, "stream": True})
        if query["stream"] == "sse":
            return Response(stream, headers={"content-type": "text/event-stream"})
        return Response(words(stream), headers={"content-type": "text/plain;charset=UTF-8"})


async def words(stream):
    """The text in the model's server-sent events, piece by piece."""
    rest = b""
    async for chunk in stream:
        *lines, rest = (rest + bytes(chunk)).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    yield f"\n[{event['error']['message']}]".encode()
                yield event["response"].encode()
    yield b"\n"
