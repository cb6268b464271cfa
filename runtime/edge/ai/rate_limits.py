"""Rate limits of model calls: how many of a task, or of a model, one account may make within a minute.

The window slides: within no minute are there more than the limit, and how long a refused caller has to wait is exact. A
call that is refused costs nothing and does not count. Kept is the time of each call of the last minute, in memory only.
This module knows nothing about HTTP.
"""

from __future__ import annotations

import difflib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping

from edge.ai.call_report import CallReport, RateStatus
from edge.ai.catalogue import TASKS
from edge.config import ApiConfig
from edge.errors import ConfigError, InvalidInput, TooManyRequests

WINDOW_S = 60.0

DEFAULTS: Mapping[str, int] = {
    "text-generation": 300,
    "text-embeddings": 3000,
    "text-classification": 2000,
    "summarization": 1500,
    "translation": 720,
    "automatic-speech-recognition": 720,
    "image-to-text": 720,
    "text-to-image": 720,
    "image-classification": 3000,
    "object-detection": 3000,
    "@cf/baai/bge-large-en-v1.5": 1500,
    "@cf/runwayml/stable-diffusion-v1-5-img2img": 1500,
}
"""Calls a minute by task, or by model where one has its own limit: Workers AI's published ones."""


def of(config: ApiConfig, models: Collection[str]) -> RateLimits:
    """The rate limits that `config` asks for, by task or by one of the ids `models`.

    Raises:
        ConfigError: it has a limit for something else, which would limit nothing.
    """
    known = {*TASKS, *DEFAULTS, *models}
    for key in config.requests_per_minute:
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"tasks are {', '.join(TASKS)}"
            raise ConfigError(
                f"[api.requests_per_minute] has a limit for {key[:100]!r}, which is no task, and no model that is "
                f"installed, has a price or is named under [ai.models]; {hint}"
            )
    return RateLimits({**DEFAULTS, **config.requests_per_minute} if config.rate_limits == "on" else {})


class RateLimits:
    """Counts the calls of all accounts."""

    def __init__(self, per_minute: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute` is by task or model id; 0, or no entry: any number. `clock` gives seconds, never goes back."""
        self._per_minute = per_minute
        self._clock = clock
        self._windows: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        """When the calls of the last minute were made, by account and limit; the one used last is last."""

    def admit(self, account: str, task: str, model: str, report: CallReport, num_calls: int = 1) -> None:
        """Count `num_calls` of `model`, and note in `report` where the account stands.

        Raises:
            TooManyRequests: they would be too many. None of them is counted.
            InvalidInput: they are more than the limit, and never can be made together.
        """
        what = model if model in self._per_minute else task
        limit = self._per_minute.get(what, 0)
        if not limit:
            return
        if num_calls > limit:
            raise InvalidInput(
                f"the request asks for {num_calls} answers, and {limit} calls of {what} may be made within a minute: "
                "ask for fewer at a time"
            )
        now_s = self._clock()
        self._forget_idle(now_s)
        window = self._windows.setdefault((account, what), deque())
        self._windows.move_to_end((account, what))
        while window and window[0] + WINDOW_S <= now_s:
            window.popleft()
        num_excess = len(window) + num_calls - limit
        if num_excess <= 0:
            window.extend([now_s] * num_calls)
        # When enough of the oldest calls are a minute old: for these calls, or for one more.
        report.rate = RateStatus(limit, limit - len(window), window[max(0, num_excess - 1)] + WINDOW_S - now_s)
        if num_excess > 0:
            raise _refusal(account, what, report.rate, num_calls)

    def _forget_idle(self, now_s: float) -> None:
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if window and window[-1] + WINDOW_S > now_s:
                return
            del self._windows[key]


def _refusal(account: str, what: str, rate: RateStatus, num_calls: int) -> TooManyRequests:
    retry_after_s = max(1, math.ceil(rate.reset_s))  # whoever waits for that long is let through
    following = "the next" if num_calls == 1 else f"the {num_calls} of this request"
    return TooManyRequests(
        f"the account {account!r} has made {rate.limit - rate.remaining} calls of {what} within a minute, of "
        f"{rate.limit} that it may make; {following} may be made in {retry_after_s} s. The operator sets the limit "
        "under [api.requests_per_minute]",
        retry_after_s=retry_after_s,
    )
