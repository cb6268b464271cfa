"""The exception tree: each class carries its Workers AI code, HTTP status, exit code and whether to retry.

Codes, names and statuses follow Cloudflare's published Workers AI error table where it has one. A message
says what failed, why, and the command or setting that fixes it.
"""

from __future__ import annotations

from typing import ClassVar


class EdgeError(Exception):
    """Base of every error that is shown to a caller or an operator."""

    code: ClassVar[int] = 1000
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    name: ClassVar[str] = "InternalError"
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        """Seconds for the `Retry-After` header."""
        self.param = param
        """The input that is at fault, for OpenAI's `error.param`."""


# -- what an operator sees ---------------------------------------------------------------------------------


class UsageError(EdgeError):
    """A command was called wrongly."""

    exit_code = 2
    name = "UsageError"


class ConfigError(UsageError):
    """The configuration file is missing, unreadable or wrong."""

    name = "ConfigError"


class PortInUse(EdgeError):
    """Another process listens on the port."""

    name = "PortInUse"


class ModelStoreError(EdgeError):
    """A model could not be fetched, imported or removed."""

    name = "ModelStoreError"


class DependenciesFailed(EdgeError):
    """The packages that a worker depends on could not be installed."""

    name = "DependenciesFailed"


class WeightsError(EdgeError):
    """A weights file is corrupt or of a kind that is not supported."""

    name = "WeightsError"


# -- what a caller of the API sees -------------------------------------------------------------------------


class ApiError(EdgeError):
    """The request cannot be served as it is."""

    code = 1001
    status = 400
    name = "InvalidInput"
    openai_type = "invalid_request_error"


class InvalidJson(ApiError):
    """The body is not JSON, or not a JSON object."""

    code = 3003
    name = "IncompleteRequest"


class InvalidInput(ApiError):
    """An input is missing, unknown, of the wrong type or out of range."""

    code = 5006
    name = "InvalidInput"


class UnknownModel(ApiError):
    """No such model, or its task is not supported here."""

    code = 5007
    name = "NoSuchModel"


class PromptTooLong(ApiError):
    """Prompt and requested output do not fit the model's context."""

    code = 5021
    status = 413
    name = "PromptTooLong"


class RequestTooLarge(ApiError):
    """The body is over the size limit."""

    code = 3006
    status = 413
    name = "RequestTooLarge"


class Unauthorized(ApiError):
    """The bearer token is missing or wrong."""

    code = 10000
    status = 401
    name = "AuthenticationError"
    openai_type = "authentication_error"


class UnknownAccount(ApiError):
    """The token has no access to the account in the path."""

    code = 7003
    status = 404
    name = "UnknownAccount"


class UnknownRoute(ApiError):
    """There is no such API route."""

    code = 7000
    status = 404
    name = "UnknownRoute"


class MethodNotAllowed(ApiError):
    """The API route exists, but not for this HTTP method."""

    code = 7001
    status = 405
    name = "MethodNotAllowed"


class OutOfCapacity(EdgeError):
    """There is no room for the call now."""

    code = 3040
    status = 429
    name = "OutOfCapacity"
    openai_type = "rate_limit_error"
    retryable = True


class TooManyRequests(OutOfCapacity):
    """More requests for a worker than its processes can take, or than a limit lets through."""

    code = 1015
    name = "RateLimited"


class EngineLost(EdgeError):
    """The engine process died or could not be reached; a new one is being started."""

    code = 3043
    status = 503
    name = "EngineLost"
    retryable = True


class MeteringUnavailable(EdgeError):
    """The usage record could not be made durable, so that the call must not be answered."""

    code = 3044
    status = 503
    name = "MeteringUnavailable"
    retryable = True


class HandlerFailed(EdgeError):
    """The worker's handler raised an exception, which `type`, `message` and `traceback` describe."""

    code = 1101
    name = "WorkerThrewException"

    def __init__(self, message: str, *, type: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type = type
        self.traceback = traceback


class WorkerStartFailed(EdgeError):
    """The worker's code could not be imported, or there is none to run; `traceback` is the handler author's."""

    code = 1101
    name = "WorkerStartFailed"

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class ExceededResources(EdgeError):
    """An invocation used more than its limits allow."""

    code = 1102
    status = 503
    name = "WorkerExceededResources"


class HandlerTimeout(ExceededResources):
    """The worker's handler did not answer in time."""


class ExceededCpu(ExceededResources):
    """An invocation used more CPU time than limits.cpu_ms."""


class ExceededMemory(ExceededResources):
    """The process that ran the invocation held more memory than limits.memory_mb."""


class TooManySubrequests(EdgeError):
    """An invocation made more calls to `fetch` and bindings than limits.subrequests."""

    code = 1102
    status = 503
    name = "TooManySubrequests"


class LoopDetected(EdgeError):
    """Workers called each other through more service bindings in a row than a node follows."""

    code = 1019
    status = 503
    name = "LoopDetected"


class UnknownWorker(ApiError):
    """No worker of that account has that name."""

    code = 10007
    status = 404
    name = "WorkerNotFound"


class IsolateLost(EdgeError):
    """The handler process died while it served the request."""

    code = 1101
    status = 500
    name = "WorkerCrashed"
    retryable = True


class SubrequestFailed(EdgeError):
    """A handler's outbound `fetch` got no response."""

    code = 0
    status = 502
    name = "NetworkError"
    retryable = True


class StorageUnavailable(EdgeError):
    """What a binding keeps could not be read or written."""

    code = 0
    status = 503
    name = "StorageUnavailable"
    retryable = True


BY_CODE: dict[int, type[EdgeError]] = {
    cls.code: cls
    for cls in (
        EdgeError,
        ApiError,
        InvalidJson,
        InvalidInput,
        UnknownModel,
        PromptTooLong,
        RequestTooLarge,
        OutOfCapacity,
        EngineLost,
        MeteringUnavailable,
    )
}
"""The classes that can travel from an engine to a caller, by code."""
