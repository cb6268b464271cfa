"""R2 buckets, in files below the state directory, or in S3 where the configuration says so.

Methods that a handler calls (`workers.bindings.r2` does it for the documented API); what a `record` is, is said in
`edge.bindings.r2.objects`:

* `head(key)` gives a record or None; `delete(keys)`; `list(options)` gives {objects, truncated, cursor,
  delimitedPrefixes}.
* `get(key, {onlyIf, range})` gives None, {record, failed: true} where a condition does not hold, or {record, range,
  data}; without `data` if that is longer than `INLINE_BYTES`: `read(key, version, offset, length)` then streams it, or
  answers 404 if another version has taken its place.
* `put(key, data or None, options)` stores data, or the body where it is None; gives the record, or None where a
  condition does not hold.
* `create_upload(key, options)` gives an id; `put_part(key, upload, number, data or None)` gives {partNumber, etag};
  `complete_upload(key, upload, parts)` gives a record; `abort_upload(key, upload)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.bindings.base import parse
from edge.bindings.r2.files import MIGRATIONS, FileBucket
from edge.bindings.r2.objects import (
    Bucket,
    GetOptions,
    ListOptions,
    Part,
    PutOptions,
    check_key,
    check_keys,
    check_metadata,
    check_part_number,
)
from edge.bindings.storage import Databases, content_of
from edge.config import S3Config
from edge.errors import ConfigError, InvalidInput
from edge.isolates.base import Binding, Bundle, JsonAnswer, StreamAnswer, WorkerKey

if TYPE_CHECKING:
    from edge.bindings.r2.s3 import S3


class R2:
    """All R2 buckets of a node."""

    def __init__(self, state_dir: Path, clock: Callable[[], float] = time.time) -> None:
        """Keep state below `state_dir`. `clock` gives seconds since 1970."""
        self._state_dir = state_dir
        self._databases = Databases("r2", state_dir, MIGRATIONS)
        self._clock = clock
        self._sweeps: dict[Path, asyncio.Task[None]] = {}
        self._places: dict[WorkerKey, Mapping[str, S3Config]] = {}
        self._s3: S3 | None = None

    def use_s3(self, worker: WorkerKey, places: Mapping[str, S3Config]) -> None:
        """Have those buckets of `worker` in S3, by id, and all others in files.

        Raises:
            ConfigError: the library for it is not installed.
        """
        if places and self._s3 is None:
            try:
                from edge.bindings.r2.s3 import S3
            except ImportError as error:
                raise ConfigError(
                    f"r2_buckets: `s3` needs a library that is not installed ({error}): "
                    "pip install 'edge-workers-ai[s3]'"
                ) from error
            self._s3 = S3(self._state_dir / "r2")
        self._places[worker] = places

    @contextlib.contextmanager
    def new_places(self, worker: WorkerKey, places: Mapping[str, S3Config]) -> Iterator[None]:
        """`use_s3`, taken back if the block raises."""
        before = self._places.get(worker, {})
        self.use_s3(worker, places)
        try:
            yield
        except BaseException:
            self._places[worker] = before
            raise

    async def call(
        self, caller: Bundle, binding: Binding, method: str, args: list[Any], body: AsyncIterator[bytes] | None
    ) -> JsonAnswer | StreamAnswer:
        """One call of a handler: see the head of this module. Raises as `Provider.call`."""
        bucket = self._bucket(caller, str(binding.props.get("id", "")))
        match method:
            case "head":
                return JsonAnswer(await bucket.head(*_parsed("head", args, tuple[str])))
            case "get":
                return JsonAnswer(await bucket.get(*_parsed("get", args, tuple[str, GetOptions])))
            case "read":
                return await bucket.read(*_parsed("get", args, tuple[str, str, int, int]))
            case "put":
                key, data, options = _parsed("put", args, tuple[str, bytes | None, PutOptions])
                check_metadata("put", options)
                return JsonAnswer(await bucket.put(key, content_of("put", data, body), options))
            case "delete":
                (keys,) = parse("delete", args, tuple[list[str]])
                check_keys(keys)
                await bucket.delete(keys)
                return JsonAnswer(None)
            case "list":
                return JsonAnswer(await bucket.list_objects(*parse("list", args, tuple[ListOptions])))
            case "create_upload":
                key, options = _parsed("createMultipartUpload", args, tuple[str, PutOptions])
                check_metadata("createMultipartUpload", options)
                return JsonAnswer(await bucket.create_upload(key, options))
            case "put_part":
                key, upload, number, data = _parsed("uploadPart", args, tuple[str, str, int, bytes | None])
                check_part_number(number)
                content = content_of("uploadPart", data, body)
                return JsonAnswer(await bucket.put_part(key, upload, number, content))
            case "complete_upload":
                shape_of_parts = tuple[str, str, list[Part]]
                arguments = _parsed("completeMultipartUpload", args, shape_of_parts)
                return JsonAnswer(await bucket.complete_upload(*arguments))
            case "abort_upload":
                await bucket.abort_upload(*_parsed("abortMultipartUpload", args, tuple[str, str]))
                return JsonAnswer(None)
            case _:
                raise InvalidInput(f"an R2 bucket has no method {method!r}")

    async def close(self) -> None:
        """Finish what is being written, close all files and connections."""
        for sweep in self._sweeps.values():
            sweep.cancel()
        await asyncio.gather(*self._sweeps.values(), return_exceptions=True)
        await self._databases.close()
        if self._s3 is not None:
            await self._s3.close()

    def _bucket(self, caller: Bundle, id: str) -> Bucket:
        place = self._places.get(caller.key, {}).get(id)
        if place is not None and self._s3 is not None:
            return self._s3.bucket(caller.account, place)
        database = self._databases.of(caller, id)
        bucket = FileBucket(database, self._clock)
        if database.folder not in self._sweeps:
            self._sweeps[database.folder] = asyncio.create_task(bucket.sweep())
        return bucket


def _parsed(method: str, args: list[Any], shape: Any) -> Any:
    """The arguments of a method whose first one is a key."""
    arguments = parse(method, args, shape)
    check_key(method, arguments[0])
    return arguments
