"""The packages that a worker depends on, installed by pip into a layer: a folder that workers with the same list share.

A layer is named by a hash of what was asked for, of the Python version and of the platform. It is built in a folder of
its own and renamed into place, so that it is there whole or not at all, and found again without a network. Only wheels
are installed: building a package from source would run its code, and in no sandbox. It knows nothing about isolates.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from edge.config import Config
from edge.errors import ConfigError, DependenciesFailed
from edge.node.contained import contained
from edge.text_files import read_text

KEEP_DAYS = 30
"""Layers that nobody used for this long are removed by the next build."""
BUILD_TIMEOUT_S = 1800.0
DISTRIBUTION = "edge-workers-ai"
OURS = frozenset({"workers", "js", "pyodide", "pyodide-py", "workers-py", "workers-runtime-sdk", DISTRIBUTION})
"""Packages that are not installed, because the runtime has these modules itself."""
LOCK_FILES = ("pylock.toml", "uv.lock")

_SHOWN_LINES = 12
_MAX_FILE_BYTES = 4 << 20
_MAX_INCLUDES = 20
_held: dict[Path, int] = {}
"""Locks on layers in use, by layer, until this process ends: nobody removes those."""


class Requirements(msgspec.Struct, frozen=True):
    """What a worker asks for: lines as in a `requirements.txt`, and versions that a lock file pins."""

    source: Path | None = None
    lines: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Names the layer for this interpreter."""
        interpreter = f"{sys.implementation.cache_tag} {sysconfig.get_platform()}"
        text = "\n".join(["layer 1", interpreter, *self.lines, "pins", *self.pins])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


async def prepare(config: Config, state_dir: Path, say: Callable[[str], None]) -> tuple[str, ...]:
    """The folders that a worker's isolates need on `sys.path` after its own: its layer, then `python_modules`.

    The layer is built if there is none, which `say` hears of.

    Raises:
        ConfigError: the list of dependencies cannot be read, or `python_modules` is a link out of the project.
        DependenciesFailed: they cannot be installed.
    """
    requirements = read_requirements(config.project, say)
    folders = []
    if requirements.lines:
        folders.append(await layer(requirements, state_dir / "layers", say))
    for vendored in dict.fromkeys((config.main.parent / "python_modules", config.project / "python_modules")):
        # pywrangler leaves packages for another platform there, which it takes from pyproject.toml too.
        if vendored.is_dir() and not (requirements.lines and (vendored / ".synced").exists()):
            folders.append(contained(config.project, vendored, "python_modules"))
    return tuple(str(folder) for folder in folders)


# -- what is asked for -------------------------------------------------------------------------------------


def read_requirements(project: Path, say: Callable[[str], None] = lambda _: None) -> Requirements:
    """The dependencies in `pyproject.toml` of the folder `project`, or else in its `requirements.txt`.

    Versions come from `pylock.toml` or `uv.lock` where these name exactly one; `say` hears of those that they do not.

    Raises:
        ConfigError: a file cannot be read or parsed, or asks for something that is not supported.
    """
    source, lines, pins = project / "pyproject.toml", list[str](), list[str]()
    if source.is_file():
        lines = _project_dependencies(source)
    if not lines:
        source = project / "requirements.txt"
        if source.is_file():
            _read_requirements_file(source, lines, pins)
    lines = [line for line in dict.fromkeys(lines) if _name_of(line) not in OURS]
    if not any(map(_name_of, lines)):
        return Requirements()
    if not any("--hash" in line for line in lines):  # with hashes the list is its own lock
        pins += _locked_versions(project, say)
    return Requirements(source, tuple(lines), tuple(pins))


def _project_dependencies(file: Path) -> list[str]:
    project = _toml(file).get("project", {})
    if isinstance(project, dict) and project.get("name") == DISTRIBUTION:
        return []  # this is the runtime's own source tree, and its packages are those that it runs with
    found = project.get("dependencies", []) if isinstance(project, dict) else None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{file}: project.dependencies must be a list of strings")
    for each in found:
        _check_requirement(file, each)
    return found


def _read_requirements_file(file: Path, lines: list[str], pins: list[str], including: tuple[Path, ...] = ()) -> None:
    """Add the lines of a requirements file, and of those that it includes, as pip takes them from any folder."""
    if file in including or len(including) >= _MAX_INCLUDES:
        raise ConfigError(f"{including[-1]}: {file} includes itself")
    text = re.sub(r"\\\n", " ", read_text(file, "a list of packages", _MAX_FILE_BYTES))
    for line in (re.sub(r"(^|\s)#.*", "", each).strip() for each in text.splitlines()):
        option, _, value = line.replace("=", " ", 1).partition(" ") if line.startswith("--") else line.partition(" ")
        other = file.parent / value.strip()
        match option:
            case "":
                continue
            case "-r" | "--requirement":
                _read_requirements_file(other, lines, pins, (*including, file))
            case "-c" | "--constraint":
                _read_requirements_file(other, pins, pins, (*including, file))
            case "-f" | "--find-links" if "://" not in value:
                lines.append(f"--find-links {other}")
            case _:
                _check_requirement(file, line)
                lines.append(line)


_OPTIONS = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links|--no-index|--pre|--prefer-binary|--require-hashes|--trusted-host)"
    r"(\s|=|$)"
)


def _check_requirement(file: Path, line: str) -> None:
    """Refuse what would run code of a package here (sources of any kind), or depends on where pip is started."""
    if line.startswith("-"):
        is_right = _OPTIONS.match(line) is not None
    else:
        wanted, *options = re.split(r"\s+--", line)
        name, at, location = wanted.partition("@")
        is_wheel = not at or re.match(r"\s*https?://[^\s#?]*\.whl([#?;\s]|$)", location) is not None
        is_right = bool(_name_of(line)) and is_wheel and not set("/:") & set(name.partition(";")[0])
        is_right &= all(option.startswith("hash") for option in options)
    if not is_right or "\n" in line:
        raise ConfigError(
            f"{file}: {line!r} cannot be installed; expected a package such as httpx>=0.27, or NAME @ URL of a wheel. "
            "Packages in folders and repositories would run code here: build a wheel of them (python -m pip wheel), "
            "and name its folder with --find-links in requirements.txt"
        )


def _name_of(line: str) -> str:
    """The package that a line asks for, normalised; empty for an option."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _locked_versions(project: Path, say: Callable[[str], None]) -> Iterator[str]:
    """`NAME==VERSION` of every package that the lock file has in one version."""
    file = next((project / name for name in LOCK_FILES if (project / name).is_file()), None)
    if file is None:
        return
    table = _toml(file)
    packages = table.get("packages" if file.name == "pylock.toml" else "package", [])
    versions: dict[str, set[str]] = {}
    for package in packages if isinstance(packages, list) else []:
        if isinstance(package, dict) and isinstance(name := package.get("name"), str):
            is_plain = not {"directory", "vcs", "archive"} & package.keys() and _is_from_index(package.get("source"))
            version = package.get("version")
            versions.setdefault(_name_of(name), set()).add(str(version) if is_plain and version else "")
    unclear = sorted(name for name, found in versions.items() if len(found) > 1)
    if unclear:
        say(f"{file.name} has several versions of {', '.join(unclear)}; pip chooses one of them by itself")
    for name, found in sorted(versions.items()):
        if len(found) == 1 and (version := next(iter(found))):
            yield f"{name}=={version}"


def _is_from_index(source: Any) -> bool:
    return source is None or (isinstance(source, dict) and "registry" in source)


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(file, "a list of packages", _MAX_FILE_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


# -- layers ------------------------------------------------------------------------------------------------


async def layer(requirements: Requirements, layers: Path, say: Callable[[str], None]) -> Path:
    """The folder with the packages of `requirements`, built below `layers` unless it is there.

    It is kept at least as long as this process lives, and marked as used now.

    Raises:
        DependenciesFailed: they cannot be installed.
    """
    folder = layers / requirements.key
    try:
        layers.mkdir(parents=True, exist_ok=True)
        if folder not in _held:
            await _hold(folder, requirements, say)
        os.utime(folder)
    except OSError as error:
        raise DependenciesFailed(f"the packages of the worker cannot be kept in {layers}: {error}") from error
    return folder / "packages"


async def _hold(folder: Path, requirements: Requirements, say: Callable[[str], None]) -> None:
    """Keep `folder` from being removed while this process lives; if it is not there, build it, this process alone."""
    fd = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not (_try_lock(fd, fcntl.LOCK_SH) and folder.is_dir()):
            fcntl.flock(fd, fcntl.LOCK_UN)
            if _try_lock(fd, fcntl.LOCK_EX) and not folder.is_dir():
                await _build(requirements, folder, say)
            else:
                await asyncio.sleep(0.1)
    except BaseException:
        os.close(fd)
        raise
    if _held.setdefault(folder, fd) != fd:
        os.close(fd)


def prune(layers: Path, now_s: float) -> list[str]:
    """Remove the layers that nobody uses and that nobody has used for KEEP_DAYS; their keys."""
    removed = []
    for folder in layers.iterdir():
        if folder.is_dir() and folder not in _held and now_s - folder.stat().st_mtime > KEEP_DAYS * 86_400:
            fd = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(fd, fcntl.LOCK_EX):
                    unfinished = _unfinished(folder)
                    shutil.rmtree(unfinished, ignore_errors=True)
                    folder.rename(unfinished)  # in one step, so that nobody finds half of it
                    shutil.rmtree(unfinished)
                    removed.append(folder.name)
            finally:
                os.close(fd)
    return removed


def _lock_file(folder: Path) -> Path:
    """A file that stays when the layer goes: a lock on a file without a name would keep nobody out."""
    return folder.with_name(f"{folder.name}.lock")


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.unfinished")


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _build(requirements: Requirements, folder: Path, say: Callable[[str], None]) -> None:
    """Install into a folder beside `folder`, and rename it. Whoever calls holds the lock."""
    started_s = time.monotonic()
    names = [_name_of(line) for line in requirements.lines if _name_of(line)]
    source = requirements.source.name if requirements.source else "the worker"
    say(f"Installing {', '.join(names)} ({source}) …")
    unfinished = _unfinished(folder)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a build that was killed
    unfinished.mkdir()
    try:
        (unfinished / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements.lines))
        (unfinished / "pins.txt").write_text("".join(f"{line}\n" for line in requirements.pins))
        await _install(unfinished, requirements.source)
        await asyncio.to_thread(os.sync)  # or a power failure could leave the name with half of the files
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"Installed in {time.monotonic() - started_s:.1f} s")
    await asyncio.to_thread(prune, folder.parent, time.time())


async def _install(folder: Path, source: Path | None) -> None:
    process = await asyncio.create_subprocess_exec(
        *_command(folder),
        cwd=folder,  # and not the worker's, whose modules Python would find before its own
        env=_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(BUILD_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise DependenciesFailed(
            f"the packages of the worker were not installed within {BUILD_TIMEOUT_S:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
        raise DependenciesFailed(_explanation(lines, source))


def _command(folder: Path) -> list[str]:
    files = ["--requirement", "requirements.txt", "--constraint", "pins.txt"]
    target = ["--target", str(folder / "packages"), "--only-binary", ":all:"]
    if importlib.util.find_spec("pip") is not None:  # first, because it alone reads all of the user's pip settings
        quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
        return [sys.executable, "-m", "pip", "install", *quiet, *target, *files]
    if uv := shutil.which("uv"):
        quiet = ["--quiet", "--no-progress", "--compile-bytecode", "--python", sys.executable]
        return [uv, "pip", "install", *quiet, *target, *files]
    raise DependenciesFailed(
        f"the packages of the worker cannot be installed: {sys.executable} has no pip, and there is no uv. "
        f"Install one of them, for example: {sys.executable} -m ensurepip"
    )


_UV_SETTINGS = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "UV_NO_INDEX": "PIP_NO_INDEX",
}


def _environment() -> dict[str, str]:
    """The user's, with the settings of pip for indexes and proxies, without those that say where to install."""
    left_out = ("PIP_TARGET", "PIP_USER", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH")
    found = {name: value for name, value in os.environ.items() if name not in left_out}
    for_uv = {uv: found[pip] for uv, pip in _UV_SETTINGS.items() if pip in found}
    return for_uv | found | {"PYTHONSAFEPATH": "1"}


_UNREACHABLE = re.compile(
    r"connection (broken|refused|reset)|ConnectionError|name resolution|dns error|timed out|ProxyError", re.I
)
_NOTHING_FOUND = ("No matching distribution", "No solution found")


def _explanation(lines: list[str], source: Path | None) -> str:
    text = "\n".join(lines)
    if _UNREACHABLE.search(text):
        fix = (
            "the package index cannot be reached. Connect to the network, or name another index (PIP_INDEX_URL=URL) "
            "or a folder with the wheels (PIP_FIND_LINKS=DIR)"
        )
    elif any(words in text for words in _NOTHING_FOUND) and _is_set("PIP_NO_INDEX"):
        fix = (
            "PIP_NO_INDEX keeps pip from the package index, and the folders that it looks in have no wheels of them. "
            "Unset it, or name one that has (PIP_FIND_LINKS=DIR): python -m pip download NAME --dest DIR fills it. "
            "Packages are not built from source"
        )
    elif any(words in text for words in _NOTHING_FOUND):
        fix = (
            "is the name right, and is there a wheel for this Python and platform? Packages are not built from source: "
            "python -m pip wheel NAME --wheel-dir DIR builds one, and PIP_FIND_LINKS=DIR lets it be found"
        )
    else:
        fix = "correct the list, or the settings of pip (python -m pip config list)"
    lines = [line for line in lines if "Retrying (Retry(" not in line] or lines  # which say one thing many times
    shown = "\n".join(lines[-_SHOWN_LINES:])
    return f"the packages in {source or 'the list'} could not be installed: {fix}.\nThe installer said:\n{shown}"


def _is_set(name: str) -> bool:
    """Whether pip takes a variable for yes."""
    return os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true", "on")
