"""The product as its users run it: `edge dev` in a folder of its own, and loads through its OpenAI endpoint."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import load
from bench.load import Answer
from bench.prompts import Prompt

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
PATH = "/client/v4/accounts/dev/ai/v1/chat/completions"

_CONFIG = """\
name = "bench"
main = "worker.py"
state_dir = "{state_dir}"
[ai]
[engine]
{engine}
"""
_WORKER = """\
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("ok")
"""


class Node:
    """A running node; see `node`."""

    def __init__(self, process: subprocess.Popen[str], model: str, end_ids: list[int], output: list[str]) -> None:
        self.process = process
        self._model = model
        self._end_ids = end_ids
        self._output = output
        self._target = load.Target("127.0.0.1", _port(output), PATH, "dev")

    @property
    def output(self) -> str:
        """What it has printed."""
        return "".join(self._output)

    def complete(
        self, prompts: list[Prompt], num_outputs: int | list[int], at_s: list[float] | None = None
    ) -> list[Answer]:
        """Answers of that many tokens to all `prompts`, each sent `at_s` seconds after the start (default: at once).

        Raises:
            RuntimeError: one of them is refused, fails, or does not have the tokens that it should have.
        """
        outputs = [num_outputs] * len(prompts) if isinstance(num_outputs, int) else num_outputs
        bodies = [self._body(prompt, num) for prompt, num in zip(prompts, outputs, strict=True)]
        try:
            answers = load.run(self._target, bodies, at_s)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\nThe node's output ends with: {self.output[-1000:]}") from None
        for prompt, num, answer in zip(prompts, outputs, answers, strict=True):
            counted = (answer.num_prompt_tokens, answer.num_output_tokens)
            if counted != (len(prompt.ids), num):
                raise RuntimeError(f"usage says (prompt, output) = {counted}, expected {(len(prompt.ids), num)}")
        return answers

    def _body(self, prompt: Prompt, num_outputs: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": prompt.messages,
            "max_tokens": num_outputs,
            "temperature": 0,
            # No answer ends before it has its tokens.
            "logit_bias": {str(id): -100 for id in self._end_ids},
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@contextlib.contextmanager
def node(
    model_folder: Path,
    kernels: Path,
    end_ids: list[int],
    engine: dict[str, Any] | None = None,
    python_path: Path | None = None,
) -> Iterator[Node]:
    """A node with the installed model in `model_folder` and these settings of `[engine]`, stopped at the end.

    `kernels` is the folder of compiled kernels, which all nodes share; `python_path` is put before the path of all
    its processes.

    Raises:
        RuntimeError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        _install(model_folder, folder / "state" / "models" / model_folder.name)
        (folder / "state" / "cache").mkdir()
        (folder / "state" / "cache" / "kernels").symlink_to(kernels)
        lines = "\n".join(f"{key} = {_toml(value)}" for key, value in (engine or {}).items())
        (folder / "edge.toml").write_text(_CONFIG.format(state_dir="state", engine=lines))
        (folder / "worker.py").write_text(_WORKER)
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        if python_path is not None:
            environment["PYTHONPATH"] = str(python_path)
        process = subprocess.Popen(
            [sys.executable, "-c", "from edge.cli import main; main()", "dev", "--port", "0", "--no-reload"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output: list[str] = []
        ready = threading.Event()
        reader = threading.Thread(target=_read, args=(process, output, ready), daemon=True)
        reader.start()
        try:
            if not ready.wait(START_TIMEOUT_S) or _port(output) == 0:
                raise RuntimeError(f"`edge dev` did not get ready:\n{''.join(output)[-2000:]}")
            yield Node(process, model_folder.name, end_ids, output)
        finally:
            _stop(process)
            reader.join(STOP_TIMEOUT_S)


def _install(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:  # on another file system
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | int) else f'"{value}"'


def _read(process: subprocess.Popen[str], output: list[str], ready: threading.Event) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if line.startswith("Ready on "):
            ready.set()
    ready.set()


def _port(output: list[str]) -> int:
    found = re.search(r"^Ready on http://\S+?:(\d+)", "".join(output), re.MULTILINE)
    return int(found[1]) if found else 0


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
