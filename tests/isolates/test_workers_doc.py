"""Runs the examples of docs/workers.md on requests to other servers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from local_server import serving
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from edge.config import EgressConfig
from edge.isolates.egress_rules import Rules

TEXT = (Path(__file__).parents[2] / "docs" / "workers.md").read_text()
SECTION = TEXT.partition("## Requests to other servers\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", blocks("python"))
async def test_examples_answer_with_what_they_fetch(worker, source):
    app = Starlette(routes=[Route("/items", lambda request: PlainTextResponse("items"))])
    async with serving(app) as url:
        worker.egress = EgressConfig(allow=["127.0.0.1"])
        await worker.deploy(source.replace("https://api.example.com", url), indented=False)
        assert await worker.get() == "items"


def test_the_rules_are_right():
    (text,) = blocks("toml")
    rules = Rules(EgressConfig(**tomllib.loads(text)["egress"]))
    rules.check_name("localhost", 3000)
