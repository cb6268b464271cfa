"""How an error is answered: the one place where an exception becomes a response, in the form that its reader knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.responses import Response

from edge.ai.answers import error_body, error_message
from edge.errors import (
    EdgeError,
    MethodNotAllowed,
    RequestAborted,
    Unauthorized,
    UnknownAccount,
    UnknownModel,
    UnknownRoute,
    UrlTooLong,
)
from edge.node.api.responses import json_response

ErrorStyle = Literal["native", "openai", "binding"]
"""Who reads it: clients of Workers AI's REST API, those of OpenAI's, or the `env.AI` of another runtime."""

_PLATFORM_ERRORS = (Unauthorized, UnknownAccount, UnknownRoute, MethodNotAllowed, UrlTooLong)
"""Those that have nothing to do with a model."""


def error_response(error: EdgeError, style: ErrorStyle, request_id: str, headers: Mapping[str, str]) -> Response:
    """The response to a request that failed with `error`, with `headers` beside its own.

    It says in `x-should-retry` whether to try again, which clients otherwise guess from the status.
    """
    status = 404 if style == "openai" and isinstance(error, UnknownModel) else error.status
    own = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable or error.retry_after_s:
        own["retry-after"] = str(error.retry_after_s or 1)
    if isinstance(error, RequestAborted):  # what still comes would be taken for the next request
        own["connection"] = "close"
    return json_response(_body(error, style, request_id), status=status, headers={**headers, **own})


def _body(error: EdgeError, style: ErrorStyle, request_id: str) -> dict[str, Any]:
    match style:
        case "openai":
            return error_body(error, request_id)
        case "binding":
            text = error_message(error, request_id)
            message = f"{error.name}: {text}"
            flat = {"internalCode": error.code, "name": error.name, "message": message, "description": text}
            # Its helpers beside `run` read an envelope.
            return flat | {"success": False, "result": None, "errors": [{"code": error.code, "message": text}]}
        case "native":
            is_platform = isinstance(error, _PLATFORM_ERRORS)
            text = error.message if is_platform else error_message(error, request_id)
            errors = [{"code": error.code, "message": text}]
            return {"result": None, "success": False, "errors": errors, "messages": []}
