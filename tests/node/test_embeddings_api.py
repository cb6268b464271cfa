"""The routes for embeddings and classification over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from doubles import BGE_M3, CLASSIFIER, ENCODER, MODEL, ScriptedPool, encoded, encoders, make_gate
from starlette.applications import Starlette

from edge.errors import TextTooLong
from edge.node.api import routes

BASE = "/client/v4/accounts/dev/ai"
TWO = encoded((0.6, 0.8), (1.0, 0.0))


async def post(path: str, body: Any, *script: Any) -> httpx.Response:
    gate = make_gate(ScriptedPool(*script or TWO), models=encoders())
    transport = httpx.ASGITransport(Starlette(routes=routes(gate, tokens={"dev": "dev"})))
    headers = {"authorization": "Bearer dev"}
    async with httpx.AsyncClient(transport=transport, base_url="http://node", headers=headers) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("path", [f"{BASE}/v1/embeddings", "/v1/embeddings"])
async def test_openai_embeddings_are_bare_and_have_a_price(path: str) -> None:
    response = await post(path, {"model": BGE_M3, "input": ["a", "b"]})
    assert response.status_code == 200
    body = response.json()
    assert (body["object"], body["model"], len(body["data"])) == ("list", BGE_M3, 2)
    assert "success" not in body
    assert response.headers["cf-ai-neurons"] == "0.008600"


async def test_native_embeddings_are_enveloped() -> None:
    response = await post(f"{BASE}/run/{BGE_M3}", {"text": ["a", "b"]})
    assert response.status_code == 200
    assert response.json()["success"] is True
    assert response.json()["result"]["shape"] == [2, 2]
    assert response.headers["cf-ai-neurons"] == "0.008600"


async def test_classification_is_a_list() -> None:
    response = await post(f"{BASE}/run/{CLASSIFIER}", {"text": "a"}, *encoded((0.25, 0.75), labels=("no", "yes")))
    assert response.status_code == 200
    assert response.json()["result"] == [{"label": "no", "score": 0.25}, {"label": "yes", "score": 0.75}]


async def test_errors_are_in_the_form_of_each_dialect() -> None:
    response = await post(f"{BASE}/run/{BGE_M3}", {"text": "a"}, TextTooLong("text 0 has more", param="text"))
    assert (response.status_code, response.json()["errors"][0]["code"]) == (400, 3030)
    response = await post(f"{BASE}/v1/embeddings", {"model": ENCODER, "input": [1, 2]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"
    response = await post(f"{BASE}/v1/embeddings", {"model": MODEL, "input": "a"})
    assert response.status_code == 404


async def test_models_for_embeddings_do_not_chat() -> None:
    body = {"model": ENCODER, "messages": [{"role": "user", "content": "hi"}]}
    response = await post(f"{BASE}/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "5007")
    assert "Text Embeddings" in response.json()["error"]["message"]
