"""`starlette_hello.py PORT`: a bare Starlette application on uvicorn, set up as the product sets up its own server."""

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route


async def hello(request: Request) -> PlainTextResponse:
    """Say hello."""
    return PlainTextResponse("hello")


if __name__ == "__main__":
    uvicorn.run(
        Starlette(routes=[Route("/", hello)]),
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
