"""`env.NAME` of a KV namespace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workers.bindings._calls import BindingCalls
from workers.bindings._options import content_of, merged, split_content
from workers.streams import ReadableStream
from workers.values import JsBytes, JsDict, plain, wrap

_TYPES = ("text", "json", "arrayBuffer", "stream")


class KvNamespace:
    """Keys and values. A write is on the node's disk when the call returns, and every read from then on sees it.

    Options are a trailing dict or are given by name. Raises BindingError if the node refuses a call, for example a key
    or value that is too long, TypeError for arguments of wrong types.
    """

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def get(self, key: Any, type: Any = None, **options: Any) -> Any:
        """The value of `key`, or None; for a list of keys a dict with the value, or None, of each.

        Args:
            type: `text` (the default: a str), `json`, `arrayBuffer` (bytes) or `stream`; or options with `type`.

        Raises:
            ValueError: a value is no JSON, with type `json`.
        """
        kind = _kind(type, options, "get()")
        if not isinstance(key, str):
            return JsDict({name: found.value for name, found in (await self._get_many(key, kind)).items()})
        return (await self._get(key, kind)).value

    async def getWithMetadata(self, key: Any, type: Any = None, **options: Any) -> JsDict:
        """The same as an object with `value`, `metadata` (None: it has none) and `cacheStatus`."""
        kind = _kind(type, options, "getWithMetadata()")
        if not isinstance(key, str):
            return JsDict(await self._get_many(key, kind))
        return await self._get(key, kind)

    async def put(self, key: str, value: Any, options: Any = None, **more_options: Any) -> None:
        """Store `value`: a str, a buffer, or a stream or iterator of these.

        Options: `expirationTtl` (seconds, at least 60) or `expiration` (seconds since 1970), after which the key is
        gone; `metadata`, a JSON value of at most 1024 bytes.
        """
        if isinstance(value, dict | list) or value is None:
            raise TypeError(
                f"put() stores str, bytes and streams, not {type(value).__name__}; json.dumps() makes a str of a value"
            )
        given = merged(options, more_options, "put()")
        data, body = split_content(content_of(value, "put()"))
        await self._calls.call("put", _key(key), data, given, body=body)

    async def delete(self, key: str) -> None:
        """Remove `key`; that it is not there is no error."""
        await self._calls.call("delete", _key(key))

    async def list(self, options: Any = None, **more_options: Any) -> JsDict:
        """Keys in the order of their UTF-8 bytes: `keys` (`name`, `expiration`, `metadata`), `list_complete`, `cursor`.

        Options: `prefix`; `limit`, at most 1000, the default; `cursor`, that of the list before.
        """
        found: JsDict = wrap(await self._calls.call("list", merged(options, more_options, "list()")))
        found["cacheStatus"] = None
        return found

    def __repr__(self) -> str:
        return f"KvNamespace({self._name!r})"

    async def _get(self, key: str, kind: str) -> JsDict:
        found = await self._calls.call("get", key)
        if found is None:
            return _entry(None, None)
        if "value" in found and kind != "stream":
            return _entry(_CONVERTERS[kind](found["value"]), found["metadata"])
        if "value" in found:
            return _entry(ReadableStream(iter([found["value"]])), found["metadata"])
        head, stream = await self._calls.stream("read", key)
        if head.status == 404 or stream is None:  # deleted in the meantime
            return _entry(None, None)
        if kind == "stream":
            return _entry(stream, head.info.get("metadata"))
        data = b"".join([chunk async for chunk in stream])
        return _entry(_CONVERTERS[kind](data), head.info.get("metadata"))

    async def _get_many(self, keys: Any, kind: str) -> dict[str, JsDict]:
        if kind not in ("text", "json"):
            raise TypeError(f"get() of several keys gives text or json, not {kind}")
        names = [_key(key) for key in (plain(keys, "keys") if not isinstance(keys, Iterable) else keys)]
        entries = {}
        for name, found in zip(names, await self._calls.call("get_many", names), strict=True):
            entries[name] = (
                _entry(None, None) if found is None else _entry(_CONVERTERS[kind](found["value"]), found["metadata"])
            )
        return entries


def _entry(value: Any, metadata: Any) -> JsDict:
    return JsDict(value=value, metadata=wrap(metadata), cacheStatus=None)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _json(data: bytes) -> Any:
    return wrap(json.loads(data))


_CONVERTERS: dict[str, Callable[[bytes], Any]] = {"text": _text, "json": _json, "arrayBuffer": JsBytes}


def _kind(type_or_options: Any, options: Mapping[str, Any], where: str) -> str:
    given: dict[str, Any] = (
        {"type": type_or_options} if isinstance(type_or_options, str) else merged(type_or_options, {}, where)
    )
    kind = {**given, **options}.get("type") or "text"
    if kind not in _TYPES:
        raise TypeError(f"{where}: type must be one of {', '.join(_TYPES)}, not {kind!r}")
    return str(kind)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {type(key).__name__}")
    return key
