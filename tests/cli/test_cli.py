from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers import EDGE

from edge.cli import COMMANDS, cli
from edge.errors import ModelStoreError, UsageError

HEAVY = ("torch", "starlette", "httpx", "uvicorn", "rich", "numpy", "safetensors")


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom edge.cli import cli\n"
        "try:\n    cli.main(['--help'], prog_name='edge')\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    for name, line in COMMANDS.items():
        assert f"  {name} " in output
        assert line in output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_help_is_the_command_s_own(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(200) == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_without_torch(name: str) -> None:
    code = f"import sys\nfrom edge.cli import cli\ntry:\n    cli.main(['{name}', '--help'])\nfinally:\n"
    code += "    print([name for name in ('torch', 'numpy') if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    assert f"{COMMANDS[name]}" in output


def test_version() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert result.output == f"edge, version {importlib.metadata.version('edge-workers-ai')}\n"


def test_an_unknown_command_names_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["modles", "list"], prog_name="edge")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no such command 'modles'; did you mean `edge models`?" in result.stderr
    assert "there are: init, dev," in CliRunner().invoke(cli, ["xyzzy"]).stderr
    assert CliRunner().invoke(cli, ["--nope"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["models", "remove"], "edge models rm"),
        (["models", "delete", "x"], "edge models rm"),
        (["models", "install", "x"], "edge models add"),
        (["models", "ls"], "edge models list"),
        (["models", "lsit"], "edge models list"),
        (["start"], "edge dev"),
        (["new", "x"], "edge init"),
    ],
)
def test_words_of_other_programs_and_unknown_subcommands_name_the_nearest(arguments: list[str], meant: str) -> None:
    result = CliRunner().invoke(cli, arguments, prog_name="edge")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"; did you mean `{meant}`?\n")


def test_without_a_near_subcommand_all_are_named() -> None:
    # "install" is a word for `models add`, and there is no `edge add`.
    assert "there are: init, dev," in CliRunner().invoke(cli, ["install"]).stderr
    assert "there are: adapt, add, list, quantize, rm." in CliRunner().invoke(cli, ["models", "xyzzy"]).stderr


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        (UsageError("no such thing; do that"), 2, "error: no such thing; do that\n"),
        (ModelStoreError("disk is full"), 1, "error: disk is full\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, stderr: str
) -> None:
    @click.command()
    def doctor() -> None:
        raise raised

    monkeypatch.setattr("edge.cli.doctor.doctor", doctor)
    result = CliRunner().invoke(cli, ["doctor"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", stderr)


def test_a_program_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def doctor() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("edge.cli.doctor.doctor", doctor)
    assert isinstance(CliRunner().invoke(cli, ["doctor"]).exception, ZeroDivisionError)


def test_the_console_script_is_interrupted_quietly(tmp_path: Path) -> None:
    code = "import edge.cli.doctor as d, time, click\n"
    code += "d.doctor = click.Command('doctor', callback=lambda: (print('on', flush=True), time.sleep(60)))\n"
    code += "from edge.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (130, "", "")


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("arguments", [["models", "list"], ["bill", "--json"], ["--help"]])
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, arguments: list[str], buffering: str
) -> None:
    (tmp_path / "edge.toml").write_text('name = "demo"\nmain = "worker.py"\n')
    (tmp_path / "worker.py").write_text("")
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": buffering}
        command = [*EDGE, *arguments]
        result = subprocess.run(command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("buffering", ["", "1"])
def test_a_reader_that_goes_away_is_no_error_to_speak_of(tmp_path: Path, buffering: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": buffering}
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as nobody:
        done = subprocess.run([*EDGE, "--help"], env=environment, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_names_and_paths_that_are_no_text_are_refused(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    (folder / "edge.toml").write_text('name = "demo"\nmain = "worker.py"\n')
    (folder / "worker.py").write_text("")
    for arguments in (["usage"], ["dev", "--port", "0"]):
        result = subprocess.run([*EDGE, *arguments], cwd=folder, capture_output=True)
        assert (result.returncode, result.stdout) == (2, b"")
        assert result.stderr.endswith(b"is no text in UTF-8, as names and paths have to be\n")
    result = subprocess.run([*EDGE, "bill", "--state-dir", tmp_path, "--account", b"\xff"], capture_output=True)
    assert (result.returncode, result.stderr) == (
        2,
        b"error: '\\udcff' is no text in UTF-8, as names and paths have to be\n",
    )
