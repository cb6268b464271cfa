"""The sandbox on machines that lack a layer: made by a filter around the node that takes system calls away from it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from edge.isolates.sandbox import linux
from edge.isolates.sandbox.layers import SandboxReport, refusal

WITHOUT = """
import errno, os, struct, sys
from edge.isolates.sandbox import linux

number, argument, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
deny, allow = 0x50000 | errno.EPERM, 0x7FFF0000
program = [
    (0x20, 0, 0, 0), (0x15, 0, 3, number),  # this call …
    (0x20, 0, 0, 16), (0x15, 0, 1, argument) if argument else (0x15, 0, 0, 0),  # … with this first argument, if not 0
    (0x06, 0, 0, deny), (0x06, 0, 0, allow),
]
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
linux.set_seccomp_filter(b"".join(struct.pack("=HBBI", *each) for each in program))
os.execv(sys.executable, [sys.executable, *command])
"""
IS_ARM = linux.MACHINE == "aarch64"
UNSHARE, PRCTL = (97, 167) if IS_ARM else (272, 157)
NAMESPACES = {"user-namespace", "network-namespace", "ipc-namespace", "uts-namespace", "mount-namespace", "own-uid"}
NODE = """
import asyncio, sys
from pathlib import Path
from edge.config import IsolatesConfig
from edge.isolates.dispatch import Bundle, InboundRequest, Isolates

async def main():
    isolates = Isolates(None, lambda *log: None, IsolatesConfig(sandbox="standard"))
    await isolates.deploy(Bundle("test", "v1", sys.argv[1], "worker_main.py"))
    for path in sys.argv[2:]:
        try:
            response = await isolates.fetch(("dev", "test"), InboundRequest("GET", f"http://test/{path}", []))
            print((await anext(response.body)).decode(), flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    await isolates.close()

asyncio.run(main())
"""
HANDLER = """
import os, tempfile, time
from workers import Response

def on_fetch(request):
    folder = tempfile.gettempdir()
    if request.url.endswith("write"):
        with open(os.path.join(folder, "a"), "w") as file:
            file.write("x")
        return Response(str(len(os.listdir(folder))))
    deadline = time.monotonic() + 20
    number = 0
    if request.url.endswith("hide"):  # where no path leads to
        os.chdir(folder)
        for _ in range(20):
            os.mkdir("d" * 255)
            os.chdir("d" * 255)
        folder = "."
    if request.url.endswith("nest"):
        os.chdir(folder)
        while time.monotonic() < deadline:
            os.mkdir("d")
            os.chdir("d")
    while time.monotonic() < deadline:
        with open(os.path.join(folder, str(number % 50)), "wb") as file:
            file.write(bytes(4 << 20))
        number += 1
    return Response("never stopped")
"""


def without(number: int, argument: int, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(number), str(argument), *command],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def report_without(number: int, argument: int = 0) -> SandboxReport:
    answer: dict[str, Any] = json.loads(without(number, argument, "-m", "edge.isolates.probe", "standard"))
    return SandboxReport(answer["layers"], answer["missing"], answer["escapes"])


def test_without_namespaces_standard_holds_and_strict_refuses():
    report = report_without(UNSHARE)
    assert set(report.missing) >= NAMESPACES
    assert refusal("standard", report) is None
    refused = refusal("strict", report) or ""
    assert "user-namespace (no user namespace: unshare: Operation not permitted)" in refused
    assert "user.max_user_namespaces" in refused


def test_without_landlock_standard_refuses_and_best_effort_goes_on():
    report = report_without(linux.LANDLOCK_CREATE_RULESET)
    assert set(report.missing) >= {"landlock-files", "landlock-network", "landlock-scopes", "own-uid"}
    assert report.escapes == []
    assert "landlock-files (the kernel has no Landlock" in (refusal("standard", report) or "")
    assert refusal("best-effort", report) is None


def test_without_seccomp_standard_refuses_and_best_effort_goes_on():
    report = report_without(PRCTL, linux.PR_SET_SECCOMP)
    assert "seccomp" in report.missing
    assert "CONFIG_SECCOMP_FILTER" in (refusal("standard", report) or "")
    assert refusal("best-effort", report) is None


@pytest.mark.parametrize("way", ["fill", "hide", "nest"])
def test_without_mounts_temporary_folders_are_apart_are_watched_and_are_removed(tmp_path, monkeypatch, way):
    (tmp_path / "worker_main.py").write_text(HANDLER)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    output = without(UNSHARE, 0, "-c", NODE, str(tmp_path), "write", way, "write")
    assert output.split() == ["1", "IsolateLost", "1"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("policy", ["strict", "standard", "best-effort"])
def test_a_complete_report_is_accepted(policy):
    output = subprocess.run(
        [sys.executable, "-m", "edge.isolates.probe", policy], capture_output=True, text=True, check=True
    ).stdout
    answer = json.loads(output)
    assert refusal(policy, SandboxReport(answer["layers"], answer["missing"], answer["escapes"])) is None
