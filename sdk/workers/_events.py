"""What handlers of `scheduled` and `queue` events get, and what they decide through it. It knows nothing of frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from workers import _rpc
from workers.values import plain

MAX_DELAY_S = 12 * 60 * 60


class ScheduledController:
    """The first argument of `scheduled(controller, env, ctx)`."""

    type = "scheduled"

    def __init__(self, cron: str, scheduled_time_ms: int) -> None:
        self.cron = cron
        self.scheduledTime = scheduled_time_ms
        """When the event was due, in ms since 1970."""
        self.is_final = False

    @property
    def scheduled_time(self) -> int:
        """The same as `scheduledTime`."""
        return self.scheduledTime

    def noRetry(self) -> None:
        """Do not run this event again if the handler fails."""
        self.is_final = True

    def __repr__(self) -> str:
        return f"ScheduledController(cron={self.cron!r}, scheduledTime={self.scheduledTime})"


class Message:
    """One message of a batch. The last of `ack()` and `retry()` counts; a message without either follows the handler:
    done if it returns, to be delivered again if it raises."""

    def __init__(self, id: str, timestamp_ms: int, body: bytes, attempts: int) -> None:
        self.id = id
        self.timestamp = datetime.fromtimestamp(timestamp_ms / 1000)
        """When it was sent; naive and local, as all times in messages are."""
        self.attempts = attempts
        """How many times it was delivered, this one included."""
        self._packed = body
        self._body: Any = None
        self._outcome: tuple[str, int | None] | None = None

    @property
    def body(self) -> Any:
        """What was sent. Raises ValueError if it cannot be read."""
        if self._packed:
            self._body, self._packed = _rpc.unpack(self._packed), b""
        return self._body

    def ack(self) -> None:
        """This message is done, whatever becomes of the others."""
        self._outcome = ("ack", None)

    def retry(self, options: Mapping[str, Any] | None = None, **more_options: Any) -> None:
        """Deliver this message again, after `delaySeconds` if given.

        Raises:
            TypeError: an unknown option, or a delay that is no whole number.
            ValueError: a delay below 0 or over 12 hours.
        """
        self._outcome = ("retry", delay_of(options, more_options, "retry()"))

    def __repr__(self) -> str:
        return f"Message(id={self.id!r}, attempts={self.attempts})"


class MessageBatch:
    """The first argument of `queue(batch, env, ctx)`: iterable, with `len()`."""

    def __init__(self, queue: str, messages: list[Message]) -> None:
        self.queue = queue
        """The name of the queue."""
        self.messages = messages
        self._outcome: tuple[str, int | None] | None = None

    def ackAll(self) -> None:
        """All messages are done, but those on which `retry()` was called."""
        self._outcome = ("ack", None)

    def retryAll(self, options: Mapping[str, Any] | None = None, **more_options: Any) -> None:
        """Deliver all messages again, but those on which `ack()` was called. Raises as `Message.retry()`."""
        self._outcome = ("retry", delay_of(options, more_options, "retryAll()"))

    ack_all = ackAll
    retry_all = retryAll

    def outcome(self) -> tuple[list[str], list[tuple[str, int | None]]]:
        """Ids of the messages that are done, and (id, delay in s or None) of those to be delivered again."""
        acks, retries = [], []
        for message in self.messages:
            match message._outcome or self._outcome:
                case ("ack", _):
                    acks.append(message.id)
                case ("retry", delay_s):
                    retries.append((message.id, delay_s))
        return acks, retries

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    def __repr__(self) -> str:
        return f"MessageBatch(queue={self.queue!r}, {len(self.messages)} messages)"


def delay_of(options: Mapping[str, Any] | None, more_options: Mapping[str, Any], where: str) -> int | None:
    """The delay that the options of `where` ask for, in s.

    Raises:
        TypeError: another option, or a delay that is no whole number.
        ValueError: a delay below 0 or over `MAX_DELAY_S`.
    """
    given = {**plain(options or {}, f"the options of {where}"), **more_options}
    delay = given.pop("delaySeconds", given.pop("delay_seconds", None))
    if given:
        raise TypeError(f"{where} has no option {', '.join(map(str, given))}; it has delaySeconds")
    if delay is None:
        return None
    if isinstance(delay, bool) or not isinstance(delay, int | float) or delay != int(delay):
        raise TypeError(f"{where}: delaySeconds must be a whole number, not {delay!r}")
    if not 0 <= delay <= MAX_DELAY_S:
        raise ValueError(f"{where}: delaySeconds must be 0 to {MAX_DELAY_S}, not {delay}")
    return int(delay)
