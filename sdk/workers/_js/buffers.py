"""JavaScript's buffers: `ArrayBuffer`, the typed arrays, `TextEncoder` and `TextDecoder`, `atob` and `btoa`."""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from workers._js.objects import Constructor, JsProxy
from workers._js_exception import JsException
from workers.values import JsClass


class Buffer:
    """What `ArrayBuffer` and the typed arrays have in common: bytes that can change, and can be a body."""

    constructor: JsClass
    _bytes: memoryview

    def __init_subclass__(cls) -> None:
        cls.constructor = JsClass(cls.__name__)

    @property
    def byteLength(self) -> int:
        """Bytes in it."""
        return self._bytes.nbytes

    def to_bytes(self) -> bytes:
        """The bytes, as they are now."""
        return self._bytes.tobytes()

    __bytes__ = to_bytes

    def to_py(self, **_options: Any) -> memoryview:
        """A view of the bytes."""
        return self._bytes

    def to_memoryview(self) -> memoryview:
        """A view of the bytes."""
        return self._bytes

    def to_string(self, encoding: str = "utf-8") -> str:
        """The bytes as text."""
        return self.to_bytes().decode(encoding)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Buffer):
            return self.to_bytes() == other.to_bytes()
        return isinstance(other, bytes | bytearray | memoryview) and self.to_bytes() == bytes(other)

    __hash__ = None  # type: ignore[assignment]

    def _as_body(self) -> tuple[bytes, str | None]:
        return self.to_bytes(), None


class ArrayBuffer(Buffer):
    """`byteLength` bytes, all zero, or those of another buffer, shared with it."""

    def __init__(self, size: int | memoryview) -> None:
        self._bytes = size if isinstance(size, memoryview) else memoryview(bytearray(size))

    def slice(self, start: int = 0, end: int | None = None) -> ArrayBuffer:
        """A copy of the bytes from `start` to before `end`."""
        return ArrayBuffer(memoryview(bytearray(self._bytes[start:end])))

    def __len__(self) -> int:
        return self.byteLength

    def __repr__(self) -> str:
        return f"ArrayBuffer({self.byteLength})"


class TypedArray(Buffer):
    """Numbers of one type: `new(length)`, `new(numbers)`, or a view `new(buffer, byteOffset, length)`."""

    typecode = "B"

    def __init__(self, source: Any = 0, offset: int = 0, length: int | None = None) -> None:
        size = array(self.typecode).itemsize
        if isinstance(source, ArrayBuffer):
            end = None if length is None else offset + length * size
            self._bytes = source._bytes[offset:end]
        elif isinstance(source, int):
            self._bytes = memoryview(bytearray(source * size))
        elif self.typecode == "B" and isinstance(source, bytes | bytearray | memoryview):
            self._bytes = memoryview(bytearray(source))
        else:
            self._bytes = memoryview(bytearray(array(self.typecode, [self._fit(item) for item in source])))
        self._items: memoryview[Any] = self._bytes.cast(self.typecode)  # type: ignore[call-overload]

    @property
    def length(self) -> int:
        """Numbers in it."""
        return len(self._items)

    @property
    def buffer(self) -> ArrayBuffer:
        """The bytes below, shared with this."""
        return ArrayBuffer(self._bytes)

    def set(self, source: Iterable[Any], offset: int = 0) -> None:
        """Copy numbers in, from the place `offset` on."""
        for index, item in enumerate(source, offset):
            self[index] = item

    def slice(self, start: int = 0, end: int | None = None) -> TypedArray:
        """A copy of the numbers from `start` to before `end`."""
        return type(self)(self._items[start:end].tolist())

    def subarray(self, start: int = 0, end: int | None = None) -> TypedArray:
        """A view of the numbers from `start` to before `end`."""
        return type(self)(ArrayBuffer(self._items[start:end].cast("B")))

    def fill(self, value: Any) -> TypedArray:
        """Set all numbers to `value`; gives the array."""
        self.set([value] * self.length)
        return self

    def assign(self, source: Any) -> None:
        """Copy a buffer of the same length in, as Pyodide does."""
        self._bytes[:] = memoryview(source.to_bytes() if isinstance(source, Buffer) else source).cast("B")

    def to_py(self, **_options: Any) -> memoryview:
        """A view of the numbers."""
        return self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._items[index] = self._fit(value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items.tolist()})"

    def _fit(self, value: Any) -> Any:
        """`value` as the type has room for it: integers wrap around."""
        if self.typecode in "fd":
            return float(value)
        bits = array(self.typecode).itemsize * 8
        number: int = int(value) & ((1 << bits) - 1)
        return number - (1 << bits) if self.typecode.islower() and number >> (bits - 1) else number


class Uint8Array(TypedArray):
    """Bytes."""


class Uint8ClampedArray(TypedArray):
    """Bytes; numbers out of range become 0 or 255."""

    def _fit(self, value: Any) -> Any:
        return max(0, min(255, round(value)))


class Int8Array(TypedArray):
    """Signed bytes."""

    typecode = "b"


class Uint16Array(TypedArray):
    """16-bit integers."""

    typecode = "H"


class Int16Array(TypedArray):
    """Signed 16-bit integers."""

    typecode = "h"


class Uint32Array(TypedArray):
    """32-bit integers."""

    typecode = "I"


class Int32Array(TypedArray):
    """Signed 32-bit integers."""

    typecode = "i"


class Float32Array(TypedArray):
    """32-bit floating point numbers."""

    typecode = "f"


class Float64Array(TypedArray):
    """64-bit floating point numbers."""

    typecode = "d"


JsProxy.register(Buffer)

TYPED_ARRAYS: dict[str, type[TypedArray]] = {
    cls.__name__: cls
    for cls in (
        Uint8Array,
        Uint8ClampedArray,
        Int8Array,
        Uint16Array,
        Int16Array,
        Uint32Array,
        Int32Array,
        Float32Array,
        Float64Array,
    )
}


class _Encoder:
    encoding = "utf-8"

    def encode(self, text: str = "") -> Uint8Array:
        return Uint8Array(text.encode("utf-8", "replace"))


class _Decoder:
    def __init__(self, label: str = "utf-8", options: Any = None, **more: Any) -> None:
        import codecs

        settings = {**(options or {}), **more}
        self.encoding = label
        self.fatal = bool(settings.get("fatal", False))
        errors = "strict" if self.fatal else "replace"
        try:
            self._new = codecs.getincrementaldecoder(label)
        except LookupError:
            raise JsException(f"TextDecoder does not know the encoding {label!r}", name="RangeError") from None
        self._errors = errors
        self._decoder = self._new(errors)

    def decode(self, data: Any = b"", options: Any = None, **more: Any) -> str:
        is_more_to_come = bool({**(options or {}), **more}.get("stream", False))
        raw = data.to_bytes() if callable(getattr(data, "to_bytes", None)) else bytes(data or b"")
        try:
            text = self._decoder.decode(raw, final=not is_more_to_come)
        except UnicodeDecodeError as error:
            raise JsException(str(error), name="TypeError") from error
        if not is_more_to_come:
            self._decoder = self._new(self._errors)
        return text.removeprefix("\ufeff")


TextEncoder = Constructor("TextEncoder", _Encoder, kind=_Encoder)
TextDecoder = Constructor("TextDecoder", _Decoder, kind=_Decoder)


def atob(text: str) -> str:
    """The bytes that `text` is the Base64 of, as text of Latin-1."""
    try:
        padded = text.strip() + "=" * (-len(text.strip()) % 4)
        return base64.b64decode(padded, validate=True).decode("latin-1")
    except (binascii.Error, ValueError) as error:
        raise JsException(f"atob() needs Base64: {error}", name="InvalidCharacterError") from error


def btoa(text: str) -> str:
    """The Base64 of text of Latin-1."""
    try:
        return base64.b64encode(text.encode("latin-1")).decode()
    except UnicodeEncodeError as error:
        raise JsException(f"btoa() takes characters up to U+00FF: {error}", name="InvalidCharacterError") from error
