"""Ways out of the sandbox, tried by a real worker on a real node: all held, node and neighbours unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from helpers import is_alive

from edge.config import IsolatesConfig, LimitsConfig
from edge.errors import ExceededResources, IsolateLost
from edge.isolates.base import Binding, Bundle, InboundRequest, JsonAnswer
from edge.isolates.dispatch import Isolates
from edge.isolates.output import OUTPUT_BYTES_PER_S
from edge.isolates.sandbox import NUM_DESCRIPTORS, NUM_THREADS, linux
from edge.isolates.sandbox.layers import TMP_MB
from edge.isolates.sandbox.seccomp import TABLES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCE = Path(__file__).with_name("attacker.py")
NEIGHBOUR = "def on_fetch(request):\n    from workers import Response\n    return Response('hello')\n"
LIMITS = LimitsConfig(cpu_ms=1500, memory_mb=64, timeout_s=4.0)
LIMIT_S = 30
# Numbers on x86-64 and aarch64 of calls that the filter does not name; newer ones have one number everywhere.
OTHER_CALLS = {
    "keyctl": (250, 219), "add_key": (248, 217), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "quotactl": (179, 60), "open_by_handle_at": (304, 265), "syslog": (103, 116), "settimeofday": (164, 170),
    "memfd_create": (319, 279), "inotify_init1": (294, 26), "fanotify_init": (300, 262), "vhangup": (153, 58),
    "kcmp": (312, 272), "io_uring_setup": 425, "io_uring_enter": 426, "open_tree": 428, "fsopen": 430,
    "pidfd_open": 434, "clone3": 435, "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "landlock_create_ruleset": 444, "memfd_secret": 447,
}  # fmt: skip

HARMLESS = {
    *("read_passwd", "read_code_of_another_worker", "read_secrets_file_of_the_node", "read_dev_vars_beside_the_code"),
    *("read_state_beside_the_code", "read_hidden_state_beside_the_code", "read_cgroups", "read_through_dot_dot"),
    *("list_the_root", "list_processes", "read_after_chdir", "openat2", "follow_a_symlink", "hard_link"),
    *("watch_files_of_others", "make_a_pipe_file", "tcp_socket", "udp_socket", "unix_socket"),
    *(
        "netlink_socket",
        "connect_to_the_node",
        "datagram_socket_pair",
        "listen_on_a_socket_pair",
        "receive_a_descriptor",
    ),
    *("probe_a_pid", "run_a_program", "spawn", "memfd_create"),
    "landlock_create_ruleset",
}


def _attacker() -> Any:
    spec = importlib.util.spec_from_file_location("escape_attacker", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAY_END = {"memory_bomb", "slow_memory_bomb"}
"""Attempts that may be held back by the end of their process."""

ATTACKER = _attacker()
ATTEMPTS = set(ATTACKER.ATTEMPTS)


def call_numbers() -> dict[str, int]:
    column = 1 if linux.MACHINE == "aarch64" else 0
    tables = {name: numbers for table in TABLES for name, numbers in table.items()} | OTHER_CALLS
    return {name: each if isinstance(each, int) else each[column] for name, each in tables.items()}


class Node:
    """A node with two workers, and things around it that are worth attacking."""

    def __init__(self, folder: Path, policy: Literal["standard", "none"] = "standard") -> None:
        self.folder = folder
        self.num_calls = 0
        self.isolates = Isolates(
            self, self._on_log, IsolatesConfig(sandbox=policy), hidden_paths=(str(folder / "attacker" / "state"),)
        )
        self.logs: list[tuple[str, str]] = []
        """Worker and text."""
        self.sockets: list[socket.socket] = []

    async def ai_run(self, *_: Any) -> JsonAnswer:
        self.num_calls += 1
        await asyncio.sleep(0.01)
        return JsonAnswer(None)

    async def start(self) -> None:
        own = self.folder / "attacker"
        for folder in (own / ".edge", own / "state", self.folder / "other"):
            folder.mkdir(parents=True)
        for path in (".dev.vars", ".edge/ledger.sqlite", "state/ledger.sqlite"):
            (own / path).write_text("secret")
        shutil.copy(SOURCE, own / "attacker.py")
        (self.folder / "other" / "other.py").write_text(NEIGHBOUR)
        (self.folder / "secrets").write_text("secret")
        os.environ["NODE_SECRET"] = "secret"
        await self.isolates.start()
        await self.isolates.deploy(Bundle("other", "v1", str(self.folder / "other"), "other.py"))
        await self.isolates.deploy(
            Bundle(
                "attacker",
                "v1",
                str(own),
                "attacker.py",
                limits=LIMITS,
                vars=self._targets(),
                bindings={"AI": Binding("ai")},
                account="another",
            )
        )

    @property
    def neighbour(self) -> int:
        return self.isolates.status(("dev", "other")).pids[0]

    async def attempt(self, name: str) -> dict[str, str]:
        """What the attacker's answer says. Raises as `Isolates.fetch`."""
        return json.loads(await self._get(("another", "attacker"), name))

    async def check_unharmed(self, neighbour: int) -> None:
        """The neighbour is the same process and serves, and so does a new attacker."""
        assert await self._get(("dev", "other"), "hello") == "hello"
        assert self.neighbour == neighbour
        assert is_alive(self.isolates.zygote_pid or 0)
        assert await self._get(("another", "attacker"), "hello") == "hello"

    async def close(self) -> None:
        await self.isolates.close()
        for sock in self.sockets:
            sock.close()
        os.environ.pop("NODE_SECRET", None)

    async def _get(self, key: tuple[str, str], path: str) -> str:
        async with asyncio.timeout(LIMIT_S):
            response = await self.isolates.fetch(key, InboundRequest("GET", f"http://test/{path}", []))
            assert response.body is not None
            return b"".join([chunk async for chunk in response.body]).decode()

    def _targets(self) -> dict[str, Any]:
        tcp = socket.create_server(("127.0.0.1", 0))
        stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stream.bind(str(self.folder / "stream"))
        stream.listen()
        datagram.bind(str(self.folder / "datagram"))
        abstract.bind(f"{ATTACKER.ABSTRACT}-{id(self):x}")
        self.sockets += [tcp, stream, datagram, abstract]
        return {
            "NR": call_numbers(),
            "OTHER_FILE": str(self.folder / "other" / "other.py"),
            "SECRET_FILE": str(self.folder / "secrets"),
            "NODE": str(os.getpid()),
            "ZYGOTE": str(self.isolates.zygote_pid),
            "NEIGHBOUR": str(self.neighbour),
            "PORT": str(tcp.getsockname()[1]),
            "SOCKET_PATH": str(self.folder / "stream"),
            "DATAGRAM_PATH": str(self.folder / "datagram"),
            "ABSTRACT": f"{ATTACKER.ABSTRACT[1:]}-{id(self):x}",
        }

    def _on_log(self, bundle: Bundle, _invocation: int, _level: str, text: str) -> None:
        self.logs.append((bundle.worker, text))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"))
    try:
        await node.start()
        yield node
    finally:
        await node.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    node = Node(tmp_path_factory.mktemp("open"), "none")
    try:
        await node.start()
        yield node
    finally:
        await node.close()


@pytest.mark.parametrize("name", sorted(ATTEMPTS - ATTACKER.REPORTS - ATTACKER.FATAL))
async def test_held_back(node: Node, name: str) -> None:
    neighbour = node.neighbour
    ended = ""
    try:
        answer = await node.attempt(name)
    except (IsolateLost, ExceededResources) as error:
        answer, ended = {"held": ""}, str(error)
    assert list(answer) == ["held"], answer
    assert not ended or name in MAY_END, ended
    await node.check_unharmed(neighbour)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKER.FATAL))
async def test_ends_only_its_own_process(node: Node, name: str) -> None:
    neighbour = node.neighbour
    with pytest.raises((IsolateLost, ExceededResources)):
        await node.attempt(name)
    await node.check_unharmed(neighbour)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("thread_flood", NUM_THREADS),
        ("disk_fill", TMP_MB),
        ("inode_flood", 5000),
        ("descriptor_exhaustion", NUM_DESCRIPTORS),
        ("race_with_a_symlink", 0),
    ],
)
async def test_is_bounded(node: Node, name: str, most: int) -> None:
    neighbour = node.neighbour
    try:
        answer = await node.attempt(name)
        assert 0 <= int(answer["got"]) <= most
    except IsolateLost:  # the node watches folders that nothing else limits
        assert name in ("disk_fill", "inode_flood")
        assert "mount-namespace" not in node.isolates.status(("dev", "other")).layers
    await node.check_unharmed(neighbour)


async def test_modes_times_and_owners_of_files_stay(node: Node) -> None:
    path = node.folder / "other" / "other.py"
    before, interpreter = path.stat(), os.stat(os.__file__)
    await node.attempt("change_modes_and_times")
    after = path.stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (before.st_mode, before.st_mtime_ns, before.st_uid)
    assert os.stat(os.__file__).st_mode == interpreter.st_mode
    await node.check_unharmed(node.neighbour)


@pytest.mark.parametrize("name", ["answer_requests_that_there_are_not", "claim_other_layers"])
async def test_frames_that_mean_nothing_are_ignored(node: Node, name: str) -> None:
    neighbour, before = node.neighbour, node.isolates.status(("another", "attacker"))
    assert await node.attempt(name) == {"got": "sent"}
    after = node.isolates.status(("another", "attacker"))
    assert (after.layers, after.handlers) == (before.layers, before.handlers)
    assert set(after.pids) & set(before.pids)  # one that an attempt before this has ended may be gone by now
    await node.check_unharmed(neighbour)


async def test_a_frame_that_only_nodes_send_ends_its_process(node: Node) -> None:
    neighbour = node.neighbour
    with pytest.raises(IsolateLost):
        await node.attempt("send_a_frame_of_the_node")
    await node.check_unharmed(neighbour)


async def test_a_flood_of_output_is_told_in_lines_of_its_own_worker(node: Node) -> None:
    neighbour, num_before = node.neighbour, len(node.logs)
    assert await node.attempt("flood_the_log") == {"got": "None"}
    logs = node.logs[num_before:]
    assert {worker for worker, _ in logs} == {"attacker"}
    assert 0 < len(logs) <= 20_001
    await node.check_unharmed(neighbour)


async def test_a_flood_past_python_s_streams_is_cut_and_harmless(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    neighbour, began = node.neighbour, time.monotonic()
    assert await node.attempt("flood_the_error_stream") == {"got": "None"}
    text = "".join(record.getMessage() for record in caplog.records if record.name == "edge.isolates.output")
    assert "flood" in text
    assert "\x1b" not in text
    assert len(text) <= 4 * OUTPUT_BYTES_PER_S * (time.monotonic() - began + 2)
    await node.check_unharmed(neighbour)


async def test_calls_are_limited(node: Node) -> None:
    neighbour, num_before = node.neighbour, node.num_calls
    assert await node.attempt("flood_with_calls") == {"got": "done"}
    assert node.num_calls - num_before == LIMITS.subrequests
    await node.check_unharmed(neighbour)


async def test_nothing_of_the_node_leaks_or_grows(node: Node) -> None:
    """After all of the above in one node; run alone it says little."""
    for _ in range(3):
        with contextlib.suppress(IsolateLost):
            await node.attempt("exit")
    await node.check_unharmed(node.neighbour)
    assert len(os.listdir("/proc/self/fd")) < 100
    for sock in node.sockets[2:]:  # nothing was ever sent to them
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


@pytest.mark.parametrize("name", sorted(HARMLESS))
async def test_the_same_attempt_succeeds_without_a_sandbox(open_node: Node, name: str) -> None:
    """Or it would prove nothing. Only those that harm nobody are tried."""
    answer = await open_node.attempt(name)
    assert list(answer) == ["got"], answer


async def test_there_are_enough_attempts() -> None:
    assert len(ATTEMPTS) >= 120
