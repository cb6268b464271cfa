"""What the node holds for the calls that a handler has open."""

from __future__ import annotations

import asyncio
import json

import pytest

from edge.isolates import calls
from edge.isolates.dispatch import JsonAnswer


@pytest.mark.parametrize(
    "arguments",
    ["'x' * 700_000", "{'prompt': 'x' * 700_000}", "[['x' * 7_000] * 100]", "{'x' * 700_000: 1}", "[0] * 50_000"],
)
async def test_arguments_of_open_calls_are_bounded(worker, monkeypatch, arguments):
    monkeypatch.setattr(calls, "MAX_HELD_BYTES", 1 << 20)
    may_answer = asyncio.Event()

    async def answer() -> JsonAnswer:
        await may_answer.wait()
        return JsonAnswer("answered")

    worker.bindings.answer = lambda *_: answer()
    await worker.deploy(
        f"""
        async def fetch(self, request):
            async def call():
                try:
                    return await self.env.AI.run("m", {{"inputs": {arguments}}})
                except Exception as error:
                    return str(error)
            first = asyncio.ensure_future(call())
            await asyncio.sleep(0)  # so that it begins
            refused = await call()
            print("refused")
            return Response.json([refused, await first, await call()])
        """
    )
    answering = asyncio.ensure_future(worker.get())
    await worker.log_text("refused")
    may_answer.set()
    refused, first, later = json.loads(await answering)
    assert "may hold 1; await some of them first" in refused
    assert (first, later) == ("answered", "answered")
