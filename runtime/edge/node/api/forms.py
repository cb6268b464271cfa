"""Forms (`multipart/form-data`, RFC 7578), read as they come: small fields, and files in memory or on disk.

How many bytes come is for the caller to bound; what is bounded here is what a few bytes can make of themselves:
parts, headers and fields. This module knows nothing about what the fields mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from edge.ai.batch_disk import check_space
from edge.errors import InvalidInput, RequestTooLarge

MAX_PARTS = 100
MAX_FIELDS_BYTES = 1 << 20
"""Of all parts that are no files, together."""
_MAX_HEADERS = 16
_MAX_HEADER_BYTES = 8 << 10
_MAX_BOUNDARIES = 1000
"""Those between parts, and those in the content after which no part comes: the parser takes long for each of them."""
_PIECE_BYTES = 1 << 20
"""What is read of a body before it is taken apart."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a form: its bytes are `data`, or in the file `path`."""

    name: str
    filename: str
    content_type: str
    data: bytes = b""
    path: Path | None = None


class Form(msgspec.Struct, frozen=True):
    """The fields of a form, the last of each name, and its files in order."""

    fields: dict[str, str]
    files: list[Upload]


async def read_form(
    chunks: AsyncIterator[bytes],
    content_type: str,
    folder: Path | None = None,
    reserve: Callable[[int], Awaitable[None]] | None = None,
) -> Form:
    """The form that `chunks` are; its files are in memory, or in new files in `folder`, which are on disk then.

    What is in `folder` after an error is for the caller to remove. `reserve` is called with a number of bytes before
    so many more are written there, and raises if they may not be.

    Raises:
        InvalidInput: it is no such form.
        RequestTooLarge: it has too many parts, or too much in those that are no files.
        DiskFull: its files would take of the disk what the node needs for itself.
        OSError: a file cannot be written.
    """
    reader = _Reader(folder)
    parser = _parser(reader, content_type)
    try:
        async for piece in _pieces(chunks):
            if reserve is not None:
                await reserve(len(piece))
            await asyncio.to_thread(_write, reader, parser, piece, folder)  # the parser can be slow, and so can disks
        await asyncio.to_thread(reader.sync)
    except FormParserError as error:
        raise InvalidInput(f"the body is no form with the boundary in its Content-Type: {error}") from error
    finally:
        reader.close()
    if not reader.is_over:
        raise InvalidInput("the form ends before its closing boundary: the request was cut short")
    return Form(reader.fields, reader.files)


def _write(reader: _Reader, parser: MultipartParser, piece: bytes, folder: Path | None) -> None:
    if folder is not None:
        check_space(folder)
    reader.found(piece.count(parser.boundary))
    parser.write(piece)


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    piece = bytearray()
    async for chunk in chunks:
        piece += chunk
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _parser(reader: _Reader, content_type: str) -> MultipartParser:
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise InvalidInput("the Content-Type multipart/form-data names no boundary: let the HTTP client write it")
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": reader.begin,
                "on_header_field": reader.header_name,
                "on_header_value": reader.header_value,
                "on_header_end": reader.header_end,
                "on_headers_finished": reader.headers_end,
                "on_part_data": reader.data,
                "on_part_end": reader.end,
                "on_end": reader.over,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
    except FormParserError as error:
        raise InvalidInput(f"the boundary in the Content-Type cannot be used: {error}") from error


class _Reader:
    """What the parser calls: gathers one part at a time."""

    def __init__(self, folder: Path | None) -> None:
        self.fields: dict[str, str] = {}
        self.files: list[Upload] = []
        self.is_over = False
        self._folder = folder
        self._opened: list[BinaryIO] = []
        self._num_parts = 0
        self._num_field_bytes = 0
        self._num_boundaries = 0
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._filename: str | None = None
        self._path: Path | None = None
        self._content = bytearray()

    def found(self, num_boundaries: int) -> None:
        self._num_boundaries += num_boundaries
        if self._num_boundaries > _MAX_BOUNDARIES:
            raise InvalidInput(
                f"the boundary is in the form over {_MAX_BOUNDARIES} times: choose one that is not in the files"
            )

    def begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestTooLarge(f"the form has more than {MAX_PARTS} parts")
        self._headers = {}
        self._path = None
        self._content = bytearray()

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0] += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1] += data[start:end]

    def header_end(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise InvalidInput("a part of the form has no name in its Content-Disposition")
        self._name = _text(options[b"name"], "the name of a part")
        self._filename = _text(options[b"filename"], "the name of a file") if b"filename" in options else None
        if self._filename is not None and self._folder is not None:
            self._path = self._folder / f"part-{self._num_parts}"
            self._opened.append(self._path.open("xb"))

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._path is not None:
            self._opened[-1].write(memoryview(data)[start:end])
            return
        self._content += memoryview(data)[start:end]
        if self._filename is None:
            self._num_field_bytes += end - start
            if self._num_field_bytes > MAX_FIELDS_BYTES:
                raise RequestTooLarge(f"the fields of the form that are no files have over {MAX_FIELDS_BYTES} bytes")

    def end(self) -> None:
        if self._filename is None:
            self.fields[self._name] = _text(self._content, f"the field {self._name[:40]!r}")
            return
        self.files.append(
            Upload(
                name=self._name,
                filename=self._filename,
                content_type=self._headers.get(b"content-type", b"application/octet-stream").decode("latin-1"),
                data=bytes(self._content),
                path=self._path,
            )
        )

    def over(self) -> None:
        self.is_over = True

    def sync(self) -> None:
        for file in self._opened:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._opened:
            with contextlib.suppress(OSError):  # what it could not write has been said
                file.close()


def _text(data: bytes | bytearray, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{what} in the form is not UTF-8") from error
