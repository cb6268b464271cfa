from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from edge.config import AiConfig, Config, EngineConfig, LimitsConfig
from edge.errors import PortInUse, UsageError
from edge.node.dev import _listen, _only_at_start, _public_address


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_localhost_is_every_loopback_address_on_one_port() -> None:
    sockets = _listen("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert {each.getsockname()[0] for each in sockets} <= {"127.0.0.1", "::1"}
        host, port = _public_address(sockets)
        assert host == "localhost"
        with socket.create_connection(("127.0.0.1", port)):
            pass
    finally:
        close(sockets)


def test_a_port_in_use_names_the_way_out() -> None:
    taken = _listen("127.0.0.1", 0)
    port = taken[0].getsockname()[1]
    try:
        with pytest.raises(PortInUse, match=rf"port {port} on 127.0.0.1 is in use.*edge dev --port {port + 1}"):
            _listen("127.0.0.1", port)
    finally:
        close(taken)


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1:0.*"):
        _listen("192.0.2.1", 0)
    with pytest.raises(UsageError, match=r"cannot listen on no such host"):
        _listen("no such host", 0)


def test_what_only_a_new_start_takes_over_is_named(tmp_path: Path) -> None:
    running = Config("demo", tmp_path / "worker.py", ai=AiConfig(models={"@cf/a": "b"}))
    taken_over = replace(running, name="other", vars={"A": 1}, ai=AiConfig("LLM", {"@cf/a": "b"}))
    assert _only_at_start(running, taken_over) == []
    changed = replace(running, limits=LimitsConfig(1.0), engine=EngineConfig(dtype="bfloat16"), ai=None)
    assert _only_at_start(running, changed) == ["limits", "engine", "ai.models"]
