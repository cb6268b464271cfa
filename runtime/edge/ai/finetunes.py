"""The finetunes of accounts: LoRA adapters that they upload, for calls of their own.

What there is, is said by a SQLite file; the adapters' files are in a folder each, named by the finetune's id, on which
no caller has any say. A file appears by one rename once it is on disk. A finetune is used once both files are there and
the engine's own reader has taken them, in a process of its own, because that takes torch.

This module knows nothing about HTTP or forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edge import sqlite
from edge.ai.catalogue import TEXT_GENERATION, Catalogue, Model
from edge.ai.fields import Boolean, Choice, Custom, Fields, Integer, String, Table, is_unicode
from edge.ai.listing import parameters
from edge.billing.times import now_us
from edge.errors import (
    Conflict,
    DiskFull,
    EdgeError,
    FinetuneMissingFiles,
    InvalidInput,
    LoraUnsupported,
    ModelStoreError,
    RequestTooLarge,
    UnknownFinetune,
    UnknownModel,
    WeightsError,
)
from edge.weights.store import ADAPTER_FILES, ModelStore

MAX_PER_ACCOUNT = 100
MAX_FILE_BYTES = 300_000_000
_MAX_CONFIG_BYTES = 1 << 20
_MAX_NAME_CHARS = 100
_MAX_DESCRIPTION_CHARS = 2000
_CHECK_TIMEOUT_S = 300.0
_ORPHAN_S = 3600
"""A folder without a row is left from a crash if nothing in it is younger; else it may be another process's."""
_FILE_NAME = "finetunes.sqlite"
_INCOMING = ".incoming-"
_CONFIG_NAME, _WEIGHTS_NAME = ADAPTER_FILES
_ORDERS = ("created_at", "modified_at", "name", "model", "id")


def _description(fields: Fields, path: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= _MAX_DESCRIPTION_CHARS and is_unicode(value):
        return value
    fields.wrong(path, value, f"a string of at most {_MAX_DESCRIPTION_CHARS} characters")
    return ""


FINETUNE: Table = {
    "model": String("The model that the adapter was trained for.", required=True, max_chars=200),
    "name": String("What calls say as `lora`; its own in the account.", required=True, max_chars=_MAX_NAME_CHARS),
    "description": Custom(
        "What it is for.",
        json={"type": "string", "maxLength": _MAX_DESCRIPTION_CHARS},
        reader=_description,
        default="",
    ),
    "public": Boolean("Let other accounts see it and use it, by its id."),
}
"""The body with which a finetune is made."""
LISTED: Table = {
    "limit": Integer("How many there are at most.", default=100, low=1, high=1000),
    "offset": Integer("How many to leave out.", default=0, low=0, high=10**9),
    "orderBy": Choice("By what they are sorted.", default="created_at", values=_ORDERS),
}
"""The parameters of the list of public ones."""


class Finetune(msgspec.Struct, frozen=True, kw_only=True):
    """A finetune of `account`. Times are integer microseconds since the epoch."""

    id: str
    account: str
    model: str
    """The model's id, as the account called it."""
    served_by: str
    """The installed model that the adapter is for."""
    name: str
    description: str
    public: bool
    created_at: int
    modified_at: int


class Finetunes:
    """The finetunes below the folder `root`. What another process changes there is seen by those that open it later."""

    def __init__(self, root: Path, catalogue: Catalogue, models: ModelStore) -> None:
        """Open or make what is in `root`, and remove what uploads that were cut short have left there.

        Raises:
            EdgeError: it cannot be read or written.
        """
        self._root = root
        self._catalogue = catalogue
        self._models = models
        self._uploads: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One upload of an account at a time: what is not checked yet takes the room of one file."""
        self._checks = asyncio.Lock()
        self._writes = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._database = sqlite.connect(root / _FILE_NAME)
            sqlite.migrate(self._database, _MIGRATIONS, f"{root / _FILE_NAME}")
            rows = self._database.execute(f"SELECT {', '.join(Finetune.__struct_fields__)} FROM finetunes").fetchall()
            found = [Finetune(**dict(zip(Finetune.__struct_fields__, row, strict=True))) for row in rows]
        except (sqlite3.Error, OSError) as error:
            raise EdgeError(f"the finetunes in {root} cannot be used: {error}") from error
        self._finetunes = {each.id: each for each in (msgspec.structs.replace(f, public=bool(f.public)) for f in found)}
        self._files = {id: self._files_of(id) for id in self._finetunes}
        for folder in root.iterdir():
            if folder.is_dir() and folder.name not in self._finetunes and _is_orphan(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Let go of the file. Nothing is lost without it."""
        self._database.close()

    # -- what there is -------------------------------------------------------------------------------------

    def of_account(self, account: str) -> list[Finetune]:
        """The finetunes of `account`, in the order in which they were made."""
        return sorted(
            (each for each in self._finetunes.values() if each.account == account),
            key=lambda each: (each.created_at, each.id),
        )

    def public(self, params: Mapping[str, Any]) -> list[Finetune]:
        """What every account may use: those of the finished finetunes that are public that `params` (`LISTED`) choose.

        Raises:
            InvalidInput: a parameter is wrong.
        """
        fields = parameters(params, LISTED)
        limit, offset, order = (fields[key] for key in LISTED)
        fields.raise_problems()
        found = [each for each in self._finetunes.values() if each.public and not self._missing(each)]
        return sorted(found, key=lambda each: (getattr(each, order), each.id))[offset : offset + limit]

    def find(self, account: str, label: str) -> Finetune:
        """The finetune of `account` with the id or name `label`.

        Raises:
            UnknownFinetune: there is none.
        """
        found = self._finetunes.get(label)
        if found is not None and found.account == account:
            return found
        for each in self.of_account(account):
            if each.name == label:
                return each
        raise UnknownFinetune(
            f"the account has no finetune {label[:100]!r}; `GET ai/finetunes` lists those that it has"
        )

    def files(self, finetune: Finetune) -> list[str]:
        """Which files it has."""
        return sorted(self._files.get(finetune.id, ()))

    def folder_for(self, account: str, model: Model, label: str) -> Path | None:
        """The folder of the adapter that a call of `model` names `label`; None: no finetune, but the model's own one.

        Those of the account go first, by id or name; those of others are found by the id, if they are public.

        Raises:
            LoraUnsupported: the model takes no adapters.
            FinetuneMissingFiles: it is not complete.
            InvalidInput: it is for another model.
        """
        if model.manifest.task != TEXT_GENERATION:
            raise LoraUnsupported(f"model {model.id!r} takes no LoRA adapters: leave lora out", param="lora")
        try:
            finetune = self.find(account, label)
        except UnknownFinetune:
            found = self._finetunes.get(label)
            if found is None or not found.public:
                return None
            finetune = found
        if missing := self._missing(finetune):
            raise FinetuneMissingFiles(
                f"the finetune {label[:100]!r} has no {' and no '.join(missing)} yet: upload it to "
                f"ai/finetunes/{finetune.id}/finetune-assets",
                param="lora",
            )
        if finetune.served_by != model.manifest.name:
            raise InvalidInput(
                f"the finetune {label[:100]!r} is for the model {finetune.model!r} (served by {finetune.served_by!r}), "
                f"and the call is for {model.id!r} (served by {model.manifest.name!r})",
                param="lora",
            )
        return (self._root / finetune.id).absolute()

    def check(self, account: str, model: Model, label: str) -> None:
        """Whether a call of `model` will find the adapter `label`: a finetune, or one of the model's own.

        Raises:
            InvalidInput: there is none.
            EdgeError: as `folder_for`.
        """
        if self.folder_for(account, model, label) is None and label not in self._models.adapters(model.manifest.name):
            raise InvalidInput(
                f"bad input: $.lora is {label[:100]!r}, which is no finetune of the account and no adapter of the "
                f"model {model.id!r}",
                param="lora",
            )

    # -- changes -------------------------------------------------------------------------------------------

    async def create(self, account: str, body: Any) -> Finetune:
        """A new finetune of `account`, without files yet, as a `body` of `FINETUNE` describes it.

        Raises:
            InvalidJson, InvalidInput, UnknownModel, LoraUnsupported: the body is wrong.
            Conflict: the name is taken, or the account has `MAX_PER_ACCOUNT`.
            DiskFull: it could not be written.
        """
        fields = Fields(body, "the body", FINETUNE)
        model, name, description, public = (fields[key] for key in FINETUNE)
        if name is not None and not name.isprintable():
            fields.wrong("$.name", name, "of printable characters")
        fields.raise_problems()
        resolved = self._catalogue.resolve(model)
        if resolved.manifest.task != TEXT_GENERATION:
            raise LoraUnsupported(
                f"model {model!r} takes no LoRA adapters: its task is {resolved.manifest.task!r}", param="model"
            )
        now = now_us()
        finetune = Finetune(
            id=str(uuid.uuid4()),
            account=account,
            model=resolved.id,
            served_by=resolved.manifest.name,
            name=name,
            description=description,
            public=public,
            created_at=now,
            modified_at=now,
        )

        async def insert() -> None:
            mine = self.of_account(account)
            if any(each.name == name for each in mine):
                raise Conflict(
                    f"the account has a finetune {name!r} already: choose another name, or DELETE ai/finetunes/{name}"
                )
            if len(mine) >= MAX_PER_ACCOUNT:
                raise Conflict(
                    f"the account has {len(mine)} finetunes, as many as it may: DELETE ai/finetunes/ID one of them"
                )
            await self._write(_INSERT, msgspec.structs.asdict(finetune))
            self._finetunes[finetune.id], self._files[finetune.id] = finetune, frozenset()

        await self._whole(insert)
        return finetune

    @contextlib.asynccontextmanager
    async def upload(self, account: str, label: str) -> AsyncIterator[tuple[Finetune, Path]]:
        """The finetune `label` and an empty folder in which to put one file of it, for `add`; one at a time.

        Raises:
            UnknownFinetune: the account has none of that id or name.
            DiskFull: a file could not be written in the block.
        """
        finetune = self.find(account, label)
        async with self._uploads[account]:
            with _full_disk_told():
                folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=_INCOMING, dir=self._root))
                try:
                    yield finetune, folder
                finally:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def add(self, finetune: Finetune, name: str, path: Path) -> None:
        """Make the file in `path`, in the folder that `upload` gave, the file `name` of the finetune.

        With the last file the adapter is checked; if it cannot be used, both are forgotten.

        Raises:
            InvalidInput: there is no such file in an adapter, or the adapter cannot be used.
            RequestTooLarge: it is too large.
            Conflict: the finetune has that file already.
            UnknownFinetune, UnknownModel: it, or its model, is not there any more.
        """
        if name not in ADAPTER_FILES:
            raise InvalidInput(
                f"file_name is {name[:100]!r}, must be {_CONFIG_NAME} or {_WEIGHTS_NAME}", param="file_name"
            )
        limit = _MAX_CONFIG_BYTES if name == _CONFIG_NAME else MAX_FILE_BYTES
        if path.stat().st_size > limit:
            raise RequestTooLarge(f"{name} has {path.stat().st_size} bytes, more than {limit}")
        if name in self._files.get(finetune.id, ()):
            raise Conflict(
                f"the finetune has its {name} already, and files do not change: make another one, or delete it"
            )
        own = self._root / finetune.id
        adapter = path.parent / "adapter"
        await asyncio.to_thread(_gather, path, name, own, adapter)
        if all((adapter / file).is_file() for file in ADAPTER_FILES):
            try:
                await self._check(finetune, adapter)
            except InvalidInput:
                await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)
                self._files[finetune.id] = frozenset()
                raise

        async def publish() -> None:
            if finetune.id not in self._finetunes:
                raise UnknownFinetune("the finetune was deleted while its file was uploaded")
            await asyncio.to_thread(_publish, adapter / name, own)
            self._files[finetune.id] = self._files_of(finetune.id)
            now = now_us()
            await self._write(_TOUCH, {"id": finetune.id, "now": now})
            self._finetunes[finetune.id] = msgspec.structs.replace(finetune, modified_at=now)

        await self._whole(publish)

    async def delete(self, account: str, label: str) -> Finetune:
        """Remove a finetune; calls that use it go on. Raises what `find` does, and DiskFull."""
        finetune = self.find(account, label)

        async def delete() -> None:
            self.find(account, finetune.id)  # somebody else may have deleted it meanwhile
            await self._write(_DELETE, {"id": finetune.id})
            del self._finetunes[finetune.id]
            self._files.pop(finetune.id, None)
            await asyncio.to_thread(shutil.rmtree, self._root / finetune.id, ignore_errors=True)

        await self._whole(delete)
        return finetune

    # -- helpers -------------------------------------------------------------------------------------------

    def _missing(self, finetune: Finetune) -> list[str]:
        return [name for name in ADAPTER_FILES if name not in self._files.get(finetune.id, ())]

    def _files_of(self, id: str) -> frozenset[str]:
        return frozenset(name for name in ADAPTER_FILES if (self._root / id / name).is_file())

    async def _whole(self, change: Callable[[], Awaitable[None]]) -> None:
        """Make `change`, one at a time, to its end even if the caller does not wait for that."""

        async def make() -> None:
            async with self._writes:
                await change()

        task = asyncio.create_task(make())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _write(self, statement: str, values: dict[str, Any]) -> None:
        def write() -> None:
            with sqlite.transaction(self._database):
                self._database.execute(statement, values)

        try:
            await asyncio.to_thread(write)
        except sqlite3.IntegrityError as error:
            raise Conflict("the account has a finetune of this name already, made by another process") from error
        except sqlite3.Error as error:
            raise DiskFull(f"the finetune could not be written: {error}") from error

    async def _check(self, finetune: Finetune, folder: Path) -> None:
        """Refuse what engines would refuse of the adapter in `folder`."""
        try:
            model = self._models.path(finetune.served_by)
        except ModelStoreError as error:
            raise UnknownModel(
                f"the model {finetune.model!r}, for which the finetune is, is not installed any more"
            ) from error
        command = (sys.executable, "-P", "-m", "edge.weights.adapter", str(model.absolute()), str(folder.absolute()))
        async with self._checks:  # each takes a core and the memory of torch
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
            )
            try:
                async with asyncio.timeout(_CHECK_TIMEOUT_S):
                    output, _ = await process.communicate()
            except TimeoutError:
                raise InvalidInput(f"the adapter could not be read within {_CHECK_TIMEOUT_S:g} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode == WeightsError.exit_code and output:
            reason = output.decode(errors="replace").strip().replace(f"{folder.absolute()}{os.sep}", "")
            raise InvalidInput(f"the adapter cannot be used, and its files were dropped: {reason}", param="file")
        if process.returncode != 0:
            raise EdgeError(f"the adapter could not be checked: the check ended with code {process.returncode}")


def _is_orphan(folder: Path) -> bool:
    """Whether nothing was changed in `folder` for `_ORPHAN_S`."""
    with contextlib.suppress(FileNotFoundError):
        newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        return newest < time.time() - _ORPHAN_S
    return False


def _gather(path: Path, name: str, own: Path, folder: Path) -> None:
    """Put the new file and those that are there into `folder`."""
    folder.mkdir()
    path.rename(folder / name)
    for file in ADAPTER_FILES:
        if (own / file).is_file():
            os.link(own / file, folder / file)


def _publish(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)
    for changed in (folder, folder.parent):
        descriptor = os.open(changed, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _full_disk_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "the node's disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"{error.strerror}"
        raise DiskFull(f"the file could not be stored: {what}") from error


# -- the database ------------------------------------------------------------------------------------------

_INSERT = (
    f"INSERT INTO finetunes ({', '.join(Finetune.__struct_fields__)}) "
    f"VALUES ({', '.join(f':{name}' for name in Finetune.__struct_fields__)})"
)
_TOUCH = "UPDATE finetunes SET modified_at = :now WHERE id = :id"
_DELETE = "DELETE FROM finetunes WHERE id = :id"


def _m1_finetunes(database: sqlite3.Connection) -> None:
    database.execute(
        """
        CREATE TABLE finetunes (
            id TEXT PRIMARY KEY NOT NULL,
            account TEXT NOT NULL,
            model TEXT NOT NULL,
            served_by TEXT NOT NULL,
            name TEXT NOT NULL,
            description TEXT NOT NULL,
            public INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            modified_at INTEGER NOT NULL,
            UNIQUE (account, name)
        ) STRICT
        """
    )


_MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_m1_finetunes]
