"""What R2 buckets have in common, wherever they keep objects: options, records, conditions, ranges and limits.

A `record` is {key, version, size, etag, uploaded (ms), checksums, httpMetadata, customMetadata, storageClass}. What is
parsed here comes from untrusted code.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from edge.errors import InvalidInput, RequestTooLarge
from edge.isolates.base import StreamAnswer

MAX_KEY_BYTES = 1024
MAX_PUT_BYTES = 5 << 30
MAX_METADATA_BYTES = 8192
MAX_KEYS_PER_CALL = 1000
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20

Record = dict[str, Any]
Content = bytes | AsyncIterator[bytes]


class HttpMetadata(msgspec.Struct, omit_defaults=True):
    """What an object's data is served with."""

    contentType: str | None = None
    contentLanguage: str | None = None
    contentDisposition: str | None = None
    contentEncoding: str | None = None
    cacheControl: str | None = None
    cacheExpiry: float | None = None
    """Milliseconds since 1970."""


class Conditions(msgspec.Struct):
    """`etagMatches` and `etagDoesNotMatch` are lists of etags or "*"; times are in milliseconds since 1970."""

    etagMatches: list[str] | None = None
    etagDoesNotMatch: list[str] | None = None
    uploadedBefore: float | None = None
    uploadedAfter: float | None = None
    secondsGranularity: bool = False


class Range(msgspec.Struct):
    """Which bytes: from `offset` on, `length` of them; or the last `suffix`."""

    offset: int | None = None
    length: int | None = None
    suffix: int | None = None


class GetOptions(msgspec.Struct):
    """Of `get`."""

    onlyIf: Conditions | None = None
    range: Range | None = None


class PutOptions(msgspec.Struct):
    """Of `put` and `createMultipartUpload`."""

    onlyIf: Conditions | None = None
    httpMetadata: HttpMetadata = msgspec.field(default_factory=HttpMetadata)
    customMetadata: dict[str, str] = {}
    storageClass: str = "Standard"
    checksums: dict[str, str] = {}
    """At most one: `md5`, `sha1`, `sha256`, `sha384` or `sha512`, in hex."""


class ListOptions(msgspec.Struct):
    """Of `list`."""

    prefix: str | None = None
    limit: int | None = None
    cursor: str | None = None
    delimiter: str | None = None
    startAfter: str | None = None
    include: list[str] = []


class Part(msgspec.Struct):
    """A part as `complete_upload` names it."""

    partNumber: int
    etag: str


class StoredPart(NamedTuple):
    """A part of an upload. `size` is in bytes; `file` is its name where parts are files."""

    number: int
    size: int
    etag: str
    file: str = ""


class Bucket(Protocol):
    """One bucket of one account. The methods are those that a handler calls (see `edge.bindings.r2`, which has checked
    what the `check_…` functions here check).

    Raises:
        InvalidInput, RequestTooLarge: arguments that cannot be served.
        StorageUnavailable: what the bucket keeps cannot be used; the log has the reason.
    """

    async def head(self, key: str) -> Record | None:
        """The object's record; None: there is none."""
        ...

    async def get(self, key: str, options: GetOptions) -> dict[str, Any] | None:
        """{record, range, data}, without `data` if that is long, or {record, failed} if a condition does not hold."""
        ...

    async def read(self, key: str, version: str, offset: int, length: int) -> StreamAnswer:
        """A range of the version that `get` told of; 404: another one has taken its place."""
        ...

    async def put(self, key: str, content: Content, options: PutOptions) -> Record | None:
        """Store an object; None: a condition does not hold."""
        ...

    async def delete(self, keys: list[str]) -> None:
        """Remove objects; that one is not there is no error."""
        ...

    async def list_objects(self, options: ListOptions) -> dict[str, Any]:
        """One page: {objects, delimitedPrefixes, truncated, cursor}."""
        ...

    async def create_upload(self, key: str, options: PutOptions) -> str:
        """Begin an upload in parts; its id."""
        ...

    async def put_part(self, key: str, upload: str, number: int, content: Content) -> dict[str, Any]:
        """Store a part of an upload, instead of one of the same number; {partNumber, etag}."""
        ...

    async def complete_upload(self, key: str, upload: str, parts: list[Part]) -> Record:
        """Make parts the object; its record."""
        ...

    async def abort_upload(self, key: str, upload: str) -> None:
        """Give an upload up, with its parts."""
        ...


# -- arguments ---------------------------------------------------------------------------------------------


def check_key(what: str, key: str) -> None:
    """Raises InvalidInput if `key` is empty or too long; `what` is the method's name, for the message."""
    num_bytes = len(key.encode())
    if not 1 <= num_bytes <= MAX_KEY_BYTES:
        raise InvalidInput(
            f"{what}: The specified object name is not valid: it has {num_bytes} bytes and may have 1 to "
            f"{MAX_KEY_BYTES}. (10020)"
        )


def check_keys(keys: list[str]) -> None:
    """Raises InvalidInput if one `delete` may not name these keys."""
    if len(keys) > MAX_KEYS_PER_CALL:
        raise InvalidInput(f"delete: at most {MAX_KEYS_PER_CALL} keys at a time, not {len(keys)}")
    for key in keys:
        check_key("delete", key)


def limit_of(options: ListOptions) -> int:
    """How many entries a page of a list may have. Raises InvalidInput if it is out of range."""
    limit = MAX_KEYS_PER_CALL if options.limit is None else options.limit
    if not 1 <= limit <= MAX_KEYS_PER_CALL:
        raise InvalidInput(f"list: MaxKeys params must be positive integer <= {MAX_KEYS_PER_CALL}. (10022)")
    return limit


def cursor_of(last: bytes) -> str:
    """What a handler gives back to go on after `last`."""
    return base64.urlsafe_b64encode(last).decode()


def last_of(cursor: str | None) -> bytes:
    """What `cursor_of` made a cursor of; nothing for None. Raises InvalidInput if it did not make it."""
    try:
        return base64.b64decode(cursor or "", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(WRONG_CURSOR) from error


WRONG_CURSOR = "list: The cursor is invalid: use the one that the last list() gave"


def check_part_number(number: int) -> None:
    """Raises InvalidInput if an upload cannot have a part of that number."""
    if not 1 <= number <= MAX_PARTS:
        raise InvalidInput(f"uploadPart: Part number must be between 1 and {MAX_PARTS}, inclusive, not {number}")


def check_metadata(what: str, options: PutOptions) -> None:
    """Refuse what no bucket keeps.

    Raises:
        InvalidInput: an unknown storage class.
        RequestTooLarge: more metadata than `MAX_METADATA_BYTES`.
    """
    if options.storageClass not in ("Standard", "InfrequentAccess"):
        raise InvalidInput(f"{what}: storageClass is {options.storageClass!r}; use Standard or InfrequentAccess")
    check_metadata_size(
        what, len(msgspec.json.encode(options.httpMetadata)) + size_of(options.customMetadata), MAX_METADATA_BYTES
    )


def check_metadata_size(what: str, size_bytes: int, max_bytes: int, where: str = "") -> None:
    """Raises RequestTooLarge if there is more metadata than `max_bytes`, which is what `where` takes."""
    if size_bytes > max_bytes:
        raise RequestTooLarge(
            f"{what}: Your metadata headers exceed the maximum allowed metadata size: {size_bytes} of {max_bytes} "
            f"bytes{where}. (10012)"
        )


def size_of(metadata: Mapping[str, str]) -> int:
    """Bytes of names and values."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in metadata.items())


_DIGEST_CHARACTERS = {"md5": 32, "sha1": 40, "sha256": 64, "sha384": 96, "sha512": 128}


def wanted_checksum(checksums: dict[str, str]) -> dict[str, str]:
    """The checksum that the caller gave, by algorithm, in lowercase hex. Raises InvalidInput."""
    if len(checksums) > 1:
        raise InvalidInput("put: You cannot specify multiple hashing algorithms. (10037)")
    for algorithm, digest in checksums.items():
        if algorithm not in _DIGEST_CHARACTERS:
            raise InvalidInput(f"put: {algorithm!r} is no checksum; use one of {', '.join(_DIGEST_CHARACTERS)}")
        if len(digest) != _DIGEST_CHARACTERS[algorithm]:
            raise InvalidInput(f"put: {algorithm} has {_DIGEST_CHARACTERS[algorithm]} digits in hex, not {len(digest)}")
    return {algorithm: digest.lower() for algorithm, digest in checksums.items()}


def check_checksum(wanted: dict[str, str], found: Mapping[str, str]) -> None:
    """Raises InvalidInput if the data has not the checksum that the caller gave."""
    for algorithm, digest in wanted.items():
        if found[algorithm] != digest:
            raise InvalidInput(
                f"put: The {algorithm} checksum you specified did not match what we received. You provided "
                f"{digest}, actual {found[algorithm]} (10037)"
            )


def too_long(what: str) -> RequestTooLarge:
    """What an upload of more than `MAX_PUT_BYTES` is answered with."""
    return RequestTooLarge(
        f"{what}: Your proposed upload exceeds the maximum allowed size of {MAX_PUT_BYTES} bytes. (100100)"
    )


def no_upload(what: str) -> InvalidInput:
    """What a call about an upload that is not there is answered with."""
    return InvalidInput(f"{what}: The specified multipart upload does not exist. (10024)")


def holds(conditions: Conditions, record: Record | None) -> bool:
    """Whether an object, or that there is none, meets the conditions (RFC 9110, 13.2.2: etags go before times)."""
    if record is None:
        return conditions.etagMatches is None and conditions.uploadedAfter is None
    etag, uploaded = record["etag"], record["uploaded"]
    if conditions.secondsGranularity:
        uploaded = uploaded // 1000 * 1000
    if conditions.etagMatches is not None:
        if not _is_among(etag, conditions.etagMatches):
            return False
    elif conditions.uploadedBefore is not None and not uploaded < conditions.uploadedBefore:
        return False
    if conditions.etagDoesNotMatch is not None:
        return not _is_among(etag, conditions.etagDoesNotMatch)
    return conditions.uploadedAfter is None or uploaded > conditions.uploadedAfter


def _is_among(etag: str, etags: list[str]) -> bool:
    return any(each == "*" or each.removeprefix("W/").strip('"') == etag for each in etags)


def resolve(wanted: Range | None, size: int) -> tuple[int, int]:
    """Offset and length of a range within an object of `size` bytes. Raises InvalidInput."""
    if wanted is None:
        return 0, size
    offset, length, suffix = wanted.offset, wanted.length, wanted.suffix
    if suffix is not None:
        if offset is not None or length is not None or suffix <= 0:
            raise InvalidInput("get: range takes a suffix above 0, or offset and length. (10039)")
        offset = max(size - suffix, 0)
        length = size - offset
    offset = offset or 0
    if offset < 0 or (length is not None and length <= 0) or offset >= max(size, 1):
        raise InvalidInput(
            f"get: The requested range is not satisfiable: offset {offset}, length {length}, of {size} bytes. (10039)"
        )
    return offset, size - offset if length is None else min(length, size - offset)


def chosen_parts(parts: list[Part], found: Mapping[int, StoredPart]) -> list[StoredPart]:
    """The parts that make up an object, in order, out of those that were found, by number.

    Raises:
        InvalidInput: there is none, one is missing or there twice, or one but the last is too short.
    """
    what = "completeMultipartUpload"
    numbers = sorted(part.partNumber for part in parts)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InvalidInput(f"{what}: there must be parts, each once. (10025)")
    etags = {part.partNumber: part.etag.strip('"') for part in parts}
    for number in numbers:
        if number not in found or found[number].etag != etags[number]:
            raise InvalidInput(f"{what}: One or more of the specified parts could not be found: part {number}. (10025)")
    chosen = [found[number] for number in numbers]
    for part in chosen[:-1]:
        if part.size < MIN_PART_BYTES:
            raise InvalidInput(
                f"{what}: Your proposed upload is smaller than the minimum allowed object size: part {part.number} has "
                f"{part.size} bytes, and all but the last need {MIN_PART_BYTES}. (10011)"
            )
        if part.size != chosen[0].size:
            raise InvalidInput(f"{what}: All non-trailing parts must have the same length: part {part.number}. (10048)")
    return chosen
