"""`FormData`, and the two forms in which HTTP carries it: `multipart/form-data` and URL-encoded.

Names and values are written and read as the standards of the web say: a quote or line break in a name is
percent-encoded, line breaks in text values become CRLF. A form is whole in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from workers.blob import Blob, File
from workers.values import JsClass

FormDataValue = str | File

MAX_FIELDS = 1000
MAX_PART_HEADER_BYTES = 16 << 10

_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))""", re.IGNORECASE)
_NAME = re.compile(r"""[;\s]name="([^"]*)\"""", re.IGNORECASE)
_FILENAME = re.compile(r"""[;\s]filename="([^"]*)\"""", re.IGNORECASE)


class FormData(MutableMapping[str, Any]):
    """The fields of a form in order, several of one name included; values are str or `File`.

    As a mapping, `form[name]` is the first value (None if there is none), and assigning replaces all of that name.
    Iteration goes over every field. Raises TypeError for a value of another type.
    """

    constructor = JsClass("FormData")

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self._fields: list[tuple[str, FormDataValue]] = []
        if isinstance(fields, FormData):
            self._fields += fields._fields
        else:
            for name, value in (fields or {}).items():
                self[name] = value

    @property
    def js_object(self) -> FormData:
        """Itself: there is no JavaScript object behind it."""
        return self

    def append(self, key: str, value: Any, filename: str | None = None) -> None:
        """Add a field after those of the same name. `filename` names a Blob or File."""
        self._fields.append((_checked_name(key), _checked_value(value, filename)))

    def delete(self, key: str) -> None:
        """Remove all fields of a name; none is fine."""
        self._fields = [field for field in self._fields if field[0] != key]

    def get_all(self, key: str) -> list[FormDataValue]:
        """All values of a name, in order."""
        return [value for name, value in self._fields if name == key]

    getAll = get_all

    def has(self, key: str) -> bool:
        """Whether there is a field of that name."""
        return key in self

    def set(self, key: str, value: Any, filename: str | None = None) -> None:
        """Replace all fields of a name by one, at the place of the first."""
        field = (_checked_name(key), _checked_value(value, filename))
        first = next((at for at, (name, _) in enumerate(self._fields) if name == key), len(self._fields))
        self._fields[first:] = [field, *(other for other in self._fields[first:] if other[0] != key)]

    def keys(self) -> Iterator[str]:  # type: ignore[override]
        """The name of every field."""
        return (name for name, _ in self._fields)

    def values(self) -> Iterator[FormDataValue]:  # type: ignore[override]
        """The value of every field."""
        return (value for _, value in self._fields)

    def items(self) -> Iterator[tuple[str, FormDataValue]]:  # type: ignore[override]
        """Every field as (name, value)."""
        return iter(list(self._fields))

    entries = items

    def __getitem__(self, key: str) -> FormDataValue | None:
        return next((value for name, value in self._fields if name == key), None)

    def __setitem__(self, key: str, value: Any) -> None:
        self.set(key, value)

    def __delitem__(self, key: str) -> None:
        self.delete(key)

    def __contains__(self, key: object) -> bool:
        return any(name == key for name, _ in self._fields)

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FormData) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"FormData({self._fields!r})"

    def _as_body(self) -> tuple[bytes, str | None]:
        boundary = f"----edge{os.urandom(16).hex()}"
        return encode_multipart(self, boundary), f"multipart/form-data; boundary={boundary}"


def parse_form(body: bytes, content_type: str | None) -> FormData:
    """The form that a body of `content_type` carries.

    Raises:
        TypeError: the content type is of no form.
        ValueError: the body is broken, or has more than `MAX_FIELDS` fields.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/x-www-form-urlencoded":
        return _parse_urlencoded(body)
    if kind == "multipart/form-data":
        match = _BOUNDARY.search(content_type or "")
        if match is None:
            raise ValueError("the content type multipart/form-data has no boundary")
        return _parse_multipart(body, (match[1] or match[2]).encode("utf-8", "replace"))
    raise TypeError(
        f"the body is no form: its content type is {content_type or 'missing'}, "
        "and forms have multipart/form-data or application/x-www-form-urlencoded"
    )


def encode_multipart(form: FormData, boundary: str) -> bytes:
    """`form` as the body of `multipart/form-data` with this boundary."""
    pieces: list[bytes] = []
    for name, value in form._fields:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(_crlf(name))}"'
        if isinstance(value, File):
            kind = _LINE_BREAK.sub(" ", value.content_type) or "application/octet-stream"
            head += f'; filename="{_quoted(value.name)}"\r\nContent-Type: {kind}'
            data = value._data
        else:
            data = _crlf(value).encode("utf-8", "replace")
        pieces += [f"{head}\r\n\r\n".encode("utf-8", "replace"), data, b"\r\n"]
    return b"".join([*pieces, f"--{boundary}--\r\n".encode()])


def _parse_urlencoded(body: bytes) -> FormData:
    form = FormData()
    text = body.decode("utf-8", "replace")
    try:
        fields = parse_qsl(text, keep_blank_values=True, errors="replace", max_num_fields=MAX_FIELDS)
    except ValueError:
        raise _too_many() from None
    form._fields += fields
    return form


def _parse_multipart(body: bytes, boundary: bytes) -> FormData:
    form = FormData()
    delimiter = b"\r\n--" + boundary
    body = b"\r\n" + body  # the first delimiter needs no line break before it
    at = _find(body, delimiter, 0)
    while True:
        at += len(delimiter)
        if body.startswith(b"--", at):
            return form
        if len(form) == MAX_FIELDS:
            raise _too_many()
        line_end = body.find(b"\r\n", at)
        if line_end < 0 or body[at:line_end].strip(b" \t"):
            raise ValueError("broken form: a boundary is followed by something else than a line break")
        # The head is searched from its line break on, so that a part without any headers is found to be one.
        head_end = body.find(b"\r\n\r\n", line_end, line_end + MAX_PART_HEADER_BYTES)
        if head_end < 0:
            raise ValueError(f"broken form: a part's headers do not end within {MAX_PART_HEADER_BYTES} bytes")
        start = head_end + 4
        at = _find(body, delimiter, head_end + 2)
        form._fields.append(_field(body[line_end:head_end].decode("utf-8", "replace"), body[start:at]))


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    at = body.find(delimiter, start)
    if at < 0:
        raise ValueError("broken form: it ends before its last boundary")
    return at


def _field(head: str, data: bytes) -> tuple[str, FormDataValue]:
    headers = {}
    for line in head.split("\r\n"):
        header, _, value = line.partition(":")
        headers[header.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    name = _NAME.search(disposition)
    if name is None or not disposition.lower().startswith("form-data"):
        raise ValueError('broken form: a part has no header Content-Disposition: form-data; name="…"')
    filename = _FILENAME.search(disposition)
    if filename is None:
        return _unquoted(name[1]), data.decode("utf-8", "replace")
    file = File(data, _unquoted(filename[1]), headers.get("content-type", "text/plain"))
    return _unquoted(name[1]), file


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a form's field must be str, not {type(name).__name__}")
    return name


def _checked_value(value: Any, filename: str | None) -> FormDataValue:
    if isinstance(value, Blob):
        if isinstance(value, File) and filename is None:
            return value
        return File(value, filename or "blob")
    if filename is not None:
        raise TypeError(f"a filename goes with a Blob or File, not with {type(value).__name__}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise TypeError(f"Unsupported type in FormData: {type(value).__name__}; give str, Blob or File")


def _quoted(text: str) -> str:
    return text.replace("\n", "%0A").replace("\r", "%0D").replace('"', "%22")


def _unquoted(text: str) -> str:
    return text.replace("%0A", "\n").replace("%0D", "\r").replace("%22", '"')


def _crlf(text: str) -> str:
    return _LINE_BREAK.sub("\r\n", text)


def _too_many() -> ValueError:
    return ValueError(f"a form may have at most {MAX_FIELDS} fields")
