"""The pytest plugin: options, the marker `edge` and the fixtures. It is loaded with every pytest, so what costs time is
imported by the first test that uses a fixture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from edge.testing.ai import Ai
    from edge.testing.clock import Clock
    from edge.testing.env import Env
    from edge.testing.harness import Harness
    from edge.testing.records import Logs, Usage
    from edge.testing.session import Session
    from edge.testing.worker import Worker

MODES = ("inprocess", "subprocess")
AI_MODES = ("canned", "record", "replay", "real")
MODULES = ("test", "session")
_MARKER = "edge(mode, ai, config): how a test runs its worker, instead of --edge-mode, --edge-ai and --edge-config"


def pytest_addoption(parser: pytest.Parser) -> None:
    """See pytest."""
    group = parser.getgroup("edge", "workers")
    options: list[tuple[str, tuple[str, ...] | None, str, str]] = [
        ("mode", MODES, "inprocess", "where handlers run: in pytest's process, or in a sandboxed one as in production"),
        ("ai", AI_MODES, "canned", "what env.AI answers: ai.answers(…) only, or what else from cassettes or models"),
        ("modules", MODULES, "test", "how long modules of the worker keep their state, in in-process mode"),
        ("config", None, "", "configuration of the worker; default: the first one above the test's file"),
        ("cassettes", None, "cassettes", "folder of the cassettes, beside the test's file"),
    ]
    for name, choices, default, help in options:
        group.addoption(f"--edge-{name}", choices=choices, help=f"{help} (ini: edge_{name})")
        parser.addini(f"edge_{name}", f"as --edge-{name}", default=default)


def pytest_configure(config: pytest.Config) -> None:
    """See pytest."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture(scope="session")
def _edge_session(pytestconfig: pytest.Config) -> Iterator[Session]:
    from edge.testing.session import Session

    session = Session(keeps_modules=_setting(pytestconfig, "modules", MODULES) == "session")
    yield session
    session.close()


@pytest.fixture
def _edge_harness(_edge_session: Session, request: pytest.FixtureRequest) -> Iterator[Harness]:
    marked = _marked(request)
    mode = _setting(request.config, "mode", MODES, marked)
    ai: Any = _setting(request.config, "ai", AI_MODES, marked)
    if ai == "replay" and request.config.getoption("--edge-ai") in ("record", "real"):
        ai = request.config.getoption("--edge-ai")  # what is replayed has to be recorded by something
    cassettes = request.path.parent / _setting(request.config, "cassettes")
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    cassette = cassettes / f"{request.path.stem}.{name}.json"
    harness = _edge_session.open(_config(request, marked), mode, ai, cassette)  # type: ignore[arg-type]
    yield harness
    _edge_session.close_test(harness)


@pytest.fixture
def worker(_edge_harness: Harness) -> Worker:
    """The worker of the project's configuration: `fetch`, `scheduled`, `queue`, `deliver`, `rpc`."""
    from edge.testing.worker import Worker

    return Worker(_edge_harness)


@pytest.fixture
def env(_edge_harness: Harness) -> Env:
    """The worker's variables and bindings, to arrange and to look at; `env.override(NAME=…)`."""
    from edge.testing.env import Env

    return Env(_edge_harness)


@pytest.fixture
def ai(_edge_harness: Harness) -> Ai:
    """What `env.AI` answers (`ai.answers(model, …)`), and what it was asked (`ai.calls`)."""
    return _edge_harness.ai


@pytest.fixture
def logs(_edge_harness: Harness) -> Logs:
    """What handlers have printed and logged."""
    return _edge_harness.logs


@pytest.fixture
def usage(_edge_harness: Harness) -> Usage:
    """What invocations and model calls have used, and what that costs."""
    return _edge_harness.usage


@pytest.fixture
def clock(_edge_harness: Harness) -> Clock:
    """The time of events and bindings: `freeze`, `advance`."""
    return _edge_harness.clock


def _marked(request: pytest.FixtureRequest) -> dict[str, str]:
    """The arguments of the markers of the test, its class and its module; the nearest goes first."""
    found: dict[str, str] = {}
    for marker in request.node.iter_markers("edge"):
        unknown = set(marker.kwargs) - {"mode", "ai", "config"}
        if marker.args or unknown:
            raise pytest.UsageError(f"{request.node.nodeid}: @pytest.mark.edge takes mode=, ai= and config= only")
        found = marker.kwargs | found
    return found


def _setting(
    config: pytest.Config, name: str, choices: tuple[str, ...] = (), marked: dict[str, str] | None = None
) -> str:
    """From the marker, else from the command line, else from the ini file."""
    value = str((marked or {}).get(name) or config.getoption(f"--edge-{name}") or config.getini(f"edge_{name}"))
    if choices and value not in choices:
        raise pytest.UsageError(f"edge_{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def _config(request: pytest.FixtureRequest, marked: dict[str, str]) -> Path:
    """The worker's configuration: what is named is relative to the test's file (marker), to where pytest was called
    (option) or to the ini file."""
    from edge.config.file import FILE_NAMES, find

    config = request.config
    folder = request.path.parent
    named = [
        (folder, marked.get("config")),
        (config.invocation_params.dir, config.getoption("--edge-config")),
        (config.inipath.parent if config.inipath is not None else config.rootpath, config.getini("edge_config")),
    ]
    for base, name in named:
        if name:
            return (base / str(name)).resolve()
    found = find(folder)
    if found is None:
        raise pytest.UsageError(
            f"there is no configuration of a worker ({', '.join(FILE_NAMES)}) above {request.path}; name it: "
            "edge_config = FILE under [tool.pytest.ini_options], or --edge-config FILE"
        )
    return found
