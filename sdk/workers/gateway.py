"""`BaseOptions`: what `asgi` and `wsgi` can be told, which they share as `Options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["BaseOptions", "EncodeBody"]

EncodeBody = Literal["automatic", "manual"]


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """Accepted, and without effect: this runtime compresses no bodies, so that `content-encoding` is always the
    application's own.

    Raises:
        ValueError: `encode_body` is neither `automatic` nor `manual`.
    """

    encode_body: EncodeBody = "automatic"

    def __post_init__(self) -> None:
        if self.encode_body not in get_args(EncodeBody):
            raise ValueError(f"encode_body must be one of {get_args(EncodeBody)}, not {self.encode_body!r}")
