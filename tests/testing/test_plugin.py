"""The plugin as pytest sees it: what it costs, its options and its mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WORKER = """
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            return Response(self.env.AI is not None and "hello")
"""
TEST = """
    def test_it(worker):
        worker.fetch()
"""


def test_it_imports_next_to_nothing() -> None:
    heavy = ("edge.config", "edge.errors", "msgspec", "workers", "asyncio.base_events", "httpx", "torch")
    code = (
        f"import sys, pytest, _pytest.config; before = set(sys.modules); import edge.testing.plugin; print({heavy!r})"
    )
    code += (
        "; print([name for name in set(sys.modules) - before if name.startswith('edge') or name in "
        + repr(heavy)
        + "])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(eval(done.stdout.splitlines()[1])) == ["edge", "edge.testing", "edge.testing.plugin"]


def test_no_fixture_needs_torch() -> None:
    code = "import sys, edge.testing.session, edge.testing.models; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_options_are_shown(run_tests: Any) -> None:
    shown = run_tests("--help").stdout
    for option in ("--edge-mode", "--edge-ai", "--edge-modules", "--edge-config", "--edge-cassettes", "edge_mode"):
        assert option in shown
    assert "@pytest.mark.edge(mode, ai, config)" in run_tests("--markers").stdout


@pytest.mark.parametrize(
    ("arguments", "marker", "message"),
    [
        (["-o", "edge_mode=thread"], "", "edge_mode must be one of inprocess, subprocess, not 'thread'"),
        ([], "@pytest.mark.edge('subprocess')", "@pytest.mark.edge takes mode=, ai= and config= only"),
        ([], "@pytest.mark.edge(colour='red')", "@pytest.mark.edge takes mode=, ai= and config= only"),
        (["--edge-config", "missing.toml"], "", "missing.toml"),
    ],
)
def test_mistakes_are_said(run_tests: Any, arguments: list[str], marker: str, message: str) -> None:
    test = f"\n    import pytest\n\n    {marker}\n    def test_it(worker):\n        pass\n"
    done = run_tests(*arguments, src__my_worker_dot_py=WORKER, test_it_dot_py=test)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_a_project_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(worker): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", "--rootdir", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "there is no configuration of a worker" in done.stdout
    assert "edge_config = FILE under [tool.pytest.ini_options]" in done.stdout


def test_a_failure_shows_the_handler_and_what_it_printed(run_tests: Any) -> None:
    worker = """
        from workers import WorkerEntrypoint

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                print("just before")
                raise KeyError("of the handler")
    """
    for mode in ("inprocess", "subprocess"):
        done = run_tests("--edge-mode", mode, src__my_worker_dot_py=worker, test_it_dot_py=TEST)
        assert "1 failed" in done.stdout
        assert "of the handler" in done.stdout
        assert "just before" in done.stdout
        if mode == "inprocess":
            assert 'raise KeyError("of the handler")' in done.stdout
            assert "edge/testing" not in done.stdout


def test_marker_goes_before_option_before_ini(run_tests: Any) -> None:
    worker = """
        import os
        from workers import Response, WorkerEntrypoint

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                return Response(str(os.getpid()))
    """
    test = """
        import os
        import pytest

        def test_option(worker):
            assert worker.fetch().text == str(os.getpid())

        @pytest.mark.edge(mode="subprocess")
        def test_marker(worker):
            assert worker.fetch().text != str(os.getpid())
    """
    ini = ["-o", "edge_mode=subprocess", "--edge-mode", "inprocess"]
    done = run_tests(*ini, src__my_worker_dot_py=worker, test_it_dot_py=test)
    assert "2 passed" in done.stdout, done.stdout
    done = run_tests("-o", "edge_mode=subprocess", src__my_worker_dot_py=worker, test_it_dot_py=test)
    assert "1 failed, 1 passed" in done.stdout
