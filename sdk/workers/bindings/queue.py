"""`env.NAME` of a queue that a worker sends to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from workers import _rpc
from workers._events import delay_of
from workers.bindings._calls import BindingCalls
from workers.values import plain

_CONTENT_TYPES = ("json", "text", "bytes", "v8")


class Queue:
    """Sends messages: what RPC can carry. They are on the node's disk when the call returns.

    Raises BindingError if the node refuses them, TypeError and ValueError for wrong options and bodies.
    """

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    async def send(self, body: Any, options: Mapping[str, Any] | None = None, **more_options: Any) -> None:
        """Send one message.

        Options: `contentType`: `json` (the default), `v8`, `text` (for a str) or `bytes`; `delaySeconds`.
        """
        given = {**plain(options or {}, "the options of send()"), **more_options}
        await self._calls.call("send", [await _message(body, given, "send()")])

    async def sendBatch(
        self, messages: Iterable[Mapping[str, Any]], options: Mapping[str, Any] | None = None, **more_options: Any
    ) -> None:
        """Send several messages at once, `{"body": …}` each, with options of its own beside `body`.

        Option: `delaySeconds`, for messages that do not say their own.
        """
        delay_s = delay_of(options, more_options, "sendBatch()")
        sent = []
        for message in messages:
            if not isinstance(message, Mapping) or "body" not in message:
                raise TypeError('sendBatch() needs messages of the form {"body": …}')
            given = {key: value for key, value in message.items() if key != "body"}
            sent.append(await _message(message["body"], given, "sendBatch()"))
        for one in sent:
            one["delay_s"] = delay_s if one["delay_s"] is None else one["delay_s"]
        await self._calls.call("send", sent)

    send_batch = sendBatch

    def __repr__(self) -> str:
        return f"Queue({self._name!r})"


async def _message(body: Any, options: dict[str, Any], where: str) -> dict[str, Any]:
    content_type = options.pop("contentType", options.pop("content_type", "json"))
    if content_type not in _CONTENT_TYPES:
        raise TypeError(f"{where}: contentType must be one of {', '.join(_CONTENT_TYPES)}, not {content_type!r}")
    if content_type == "text" and not isinstance(body, str):
        raise TypeError(f"{where}: a body of contentType text must be str, not {type(body).__name__}")
    if content_type == "bytes" and not isinstance(body, bytes | memoryview):
        raise TypeError(f"{where}: a body of contentType bytes must be bytes, not {type(body).__name__}")
    if content_type == "json":
        body = _as_json(body, where)
    return {
        "body": _rpc.pack(await _rpc.buffered(body)),
        "delay_s": delay_of(options, {}, where),
        "content_type": content_type,
    }


def _as_json(body: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(body))
    except TypeError as error:
        error.add_note(f"{where}: contentType='v8' carries bytes, sets and times as well.")
        raise
