from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.errors import PortInUse, UsageError
from edge.node.access import Access
from edge.node.serving import _uvicorn, listen, log_access, public_address


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_localhost_is_every_loopback_address_on_one_port() -> None:
    sockets = listen("localhost", 0, "edge dev")
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert {each.getsockname()[0] for each in sockets} <= {"127.0.0.1", "::1"}
        host, port = public_address(sockets)
        assert host == "localhost"
        with socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        close(sockets)


def test_a_port_in_use_names_the_way_out() -> None:
    taken = listen("127.0.0.1", 0, "edge dev")
    port = taken[0].getsockname()[1]
    try:
        with pytest.raises(PortInUse, match=rf"port {port} on 127.0.0.1 is in use.*edge dev --port {port + 1}"):
            listen("127.0.0.1", port, "edge dev")
    finally:
        close(taken)


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0.*"):
        listen("192.0.2.1", 0, "edge dev")
    with pytest.raises(UsageError, match=r"cannot listen on no such host"):
        listen("no such host", 0, "edge dev")


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 200, 200), (100, 100, 100)])
def test_the_limit_of_descriptors_is_raised_as_far_as_it_may(soft: int, hard: int, raised: int) -> None:
    code = (
        f"import resource as r; r.setrlimit(r.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from edge.node.serving import _raise_descriptor_limit; _raise_descriptor_limit()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == f"({raised}, {hard})\n"


def test_garbage_collections_pass_over_what_is_there_from_the_start() -> None:
    code = (
        "import asyncio, gc, types\n"
        "from edge.node.serving import Server, listen\n"
        "async def main():\n"
        "    server = Server(listen('127.0.0.1', 0, 'edge dev'), 1)\n"
        "    server.start(types.SimpleNamespace(app=None, direct=None))\n"
        "    print(gc.get_freeze_count() > 10 * len(gc.get_objects()))\n"
        "    server.stop()\n"
        "    await server._serving\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


async def test_no_client_says_which_address_it_has() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(f"{scope['client'][0]} {scope['scheme']}")(scope, receive, send)

    sockets = listen("127.0.0.1", 0, "edge dev")
    server = _uvicorn(drain_s=1)
    server.config.app = echo
    serving = asyncio.create_task(server.serve(sockets))
    try:
        async with httpx.AsyncClient() as client:
            headers = {"x-forwarded-for": "1.2.3.4", "x-forwarded-proto": "https", "forwarded": "for=1.2.3.4"}
            response = await client.get(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/", headers=headers)
        assert response.text == "127.0.0.1 http"
    finally:
        server.should_exit = True
        await serving


def test_what_clients_send_does_not_reach_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    log_access(Access("GET", "/\x1b[2J\nGET /admin", 404, True, 1.2, "no route for /\x1b[2J"))
    assert capsys.readouterr().err == "GET /�[2J�GET /admin 404 (1 ms)  no route for /�[2J\n"


def test_a_shared_node_says_when_and_who(capsys: pytest.CaptureFixture[str]) -> None:
    log_access(Access("GET", "/v1/models", 200, True, 1.2, account="acme", request_id="r1"), is_shared=True)
    log_access(Access("GET", "/x", None, False, 2.0), is_shared=True)
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    expected = rf"{time} acme r1 GET /v1/models 200 \(1 ms\)\n{time} - - GET /x hung up \(2 ms\)\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
