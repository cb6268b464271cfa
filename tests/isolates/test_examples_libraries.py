"""What public examples do with libraries: pillow draws an image, langchain-cloudflare talks through `env.AI`."""

from __future__ import annotations

import io
import json

import pytest

from edge.isolates.base import JsonAnswer


async def test_pillow_draws_an_image(worker) -> None:
    image = pytest.importorskip("PIL.Image")
    await worker.deploy("""
        async def fetch(self, request):
            from io import BytesIO
            from urllib.parse import parse_qs, urlsplit
            from PIL import Image, ImageDraw
            from pyodide.ffi import to_js

            text = parse_qs(urlsplit(request.url).query)["text"][0]
            picture = Image.new("RGB", (64, 32), "white")
            ImageDraw.Draw(picture).text((4, 4), text, fill="black")
            out = BytesIO()
            picture.save(out, "PNG")
            return Response(to_js(out.getvalue()).buffer, headers={"content-type": "image/png"})
    """)
    response = await worker.open("/?text=hi")
    assert ("content-type", "image/png") in response.headers
    picture = image.open(io.BytesIO(b"".join([chunk async for chunk in response.body])))
    assert picture.size == (64, 32)
    assert picture.getpixel((63, 31)) == (255, 255, 255)
    assert min(picture.convert("L").tobytes()) < 100, "something is drawn"


@pytest.mark.slow
async def test_langchain_chats_through_the_binding(worker) -> None:
    pytest.importorskip("langchain_cloudflare")
    calls = []

    def answer(model, inputs, options) -> JsonAnswer:
        calls.append((model, inputs["messages"][-1]["content"]))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return JsonAnswer({"response": "Paris", "usage": usage})

    worker.bindings.answer = answer
    await worker.deploy("""
        async def fetch(self, request):
            from langchain_cloudflare import ChatCloudflareWorkersAI
            model = ChatCloudflareWorkersAI(model_name="@cf/meta/llama-3.2-1b-instruct", binding=self.env.AI)
            message = await model.ainvoke("What is the capital of France?")
            return Response.json({"text": message.content, "usage": message.usage_metadata})
    """)
    result = json.loads(await worker.get())
    assert result["text"] == "Paris"
    assert result["usage"]["total_tokens"] == 5
    assert calls == [("@cf/meta/llama-3.2-1b-instruct", "What is the capital of France?")]
