"""The exception tree: each class carries its Workers AI code, HTTP status, exit code and whether to retry.

Codes, names and statuses follow Cloudflare's published Workers AI error table where it has one. A message
says what failed, why, and the command or setting that fixes it. A class that a caller of the API can meet also says
what brings it about (`cause`) and what to do (`remedy`): docs/errors.md and `edge errors` are made from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class EdgeError(Exception):
    """Base of every error that is shown to a caller or an operator."""

    code: ClassVar[int] = 1000
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    name: ClassVar[str] = "InternalError"
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False
    cause: ClassVar[str] = "A bug of the node."
    """What brings it about. Classes that only an operator or a handler meets have none of their own."""
    remedy: ClassVar[str] = "Report it; the node's log has the reason under the request's id."
    """What to do about it."""

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
    cause = "The model's file is damaged, or of a kind that cannot be run."
    remedy = "The operator: `edge models list` and the message say which; remove it and add it again."


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
    cause = "The body is empty, is not JSON, or is not a JSON object."
    remedy = "Send a JSON object with `Content-Type: application/json`."


class InvalidInput(ApiError):
    """An input is missing, unknown, of the wrong type or out of range."""

    code = 5006
    name = "InvalidInput"
    cause = "A field is missing, of the wrong type, out of range, or not supported."
    remedy = "The message lists each problem with its path and what is allowed: send that."


class UnknownModel(ApiError):
    """No such model, or its task is not supported here."""

    code = 5007
    name = "NoSuchModel"
    cause = "No model of that id is installed or has a stand-in, or its task is not served."
    remedy = "`GET ai/models/search` lists the models. The operator: `edge models add`, or a line under [ai.models]."


class InvalidModelId(UnknownModel):
    """What was given cannot be the id of a model."""

    code = 3042
    status = 404
    name = "InvalidModelId"
    cause = (
        "The model id is malformed: neither `@cf/AUTHOR/NAME`, `@hf/AUTHOR/NAME` nor the name of an installed model."
    )
    remedy = "Check how the id is put together; `GET ai/models/search` lists the ids under `name`."


class LoraUnsupported(ApiError):
    """The model cannot be run with a LoRA adapter."""

    code = 5005
    status = 405
    name = "LoraUnsupported"
    cause = "`lora` was given for a model that takes no adapters."
    remedy = "Leave `lora` out, or use a model whose properties in `ai/models/search` say `lora`."


class FinetuneMissingFiles(ApiError):
    """The finetune has no files yet, or not all of them."""

    code = 3039
    name = "FinetuneMissingFiles"
    cause = "The finetune lacks `adapter_config.json` or `adapter_model.safetensors`."
    remedy = "Upload both files to `ai/finetunes/ID/finetune-assets`."


class PromptTooLong(ApiError):
    """Prompt and requested output do not fit the model's context."""

    code = 5021
    status = 413
    name = "PromptTooLong"
    cause = "The prompt, with `max_tokens`, has more tokens than the model's context."
    remedy = "Shorten the prompt or lower `max_tokens`."


class RequestTooLarge(ApiError):
    """The body is over the size limit."""

    code = 3006
    status = 413
    name = "RequestTooLarge"
    cause = "The body is over 10 MiB or of too many parts, or does not fit the engine's frame."
    remedy = "Send less at once."


class TextTooLong(ApiError):
    """A text, or all texts of a call together, have more tokens than an embedding model takes."""

    code = 3030
    name = "TextTooLong"
    cause = "A text is longer than the model reads and must not be cut, or all texts of the call are too long together."
    remedy = "Set `truncate_inputs` to true, shorten the text, or send the texts in several calls."


class UrlTooLong(ApiError):
    """Path and query are over the size limit."""

    code = 3006
    status = 414
    name = "UrlTooLong"
    cause = "Path and query together are over 32 KiB."
    remedy = "Send the values in the body."


class Unauthorized(ApiError):
    """The bearer token is missing or wrong."""

    code = 10000
    status = 401
    name = "AuthenticationError"
    openai_type = "authentication_error"
    cause = "The bearer token is missing, unknown, expired or revoked."
    remedy = "Send `Authorization: Bearer TOKEN`; `edge tokens create` makes one, `edge dev` prints its own."


class MissingScope(Unauthorized):
    """The token is right, but may not do this."""

    status = 403
    name = "MissingScope"
    openai_type = "permission_error"
    cause = "The token lacks a scope, which the message names."
    remedy = "Use a token with that scope: `edge tokens create --scope SCOPE`."


class UnknownToken(ApiError):
    """The account has no token of that id."""

    code = 1003
    status = 404
    name = "UnknownToken"
    cause = "The account has no token of that id."
    remedy = "List the tokens, in the API or with `edge tokens list`."


class TokenStoreUnavailable(EdgeError):
    """The tokens cannot be read or written, so that nobody can be let in."""

    code = 10001
    status = 503
    name = "TokenStoreUnavailable"
    retryable = True
    cause = "The file with the node's tokens cannot be read or written."
    remedy = "Try again later. The operator: look after `tokens.sqlite` in `state_dir`."


class UnknownAccount(ApiError):
    """The token has no access to the account in the path."""

    code = 7003
    status = 404
    name = "UnknownAccount"
    cause = "The account in the path does not exist, or is not the token's."
    remedy = "Use the account id that belongs to the token."


class UnknownRoute(ApiError):
    """There is no such API route."""

    code = 7000
    status = 404
    name = "UnknownRoute"
    cause = "There is no such route."
    remedy = "Check the base URL and the path."


class MethodNotAllowed(ApiError):
    """The API route exists, but not for this HTTP method."""

    code = 7001
    status = 405
    name = "MethodNotAllowed"
    cause = "The route exists, but not for this HTTP method."
    remedy = "Use a method of the `Allow` header."


class OutOfCapacity(EdgeError):
    """There is no room for the call now."""

    code = 3040
    status = 429
    name = "OutOfCapacity"
    openai_type = "rate_limit_error"
    retryable = True
    cause = "Too many calls are running and waiting, or the option `rejectIfBusy` was given."
    remedy = "Try again after `Retry-After`. The operator: `max_batch_size` and `max_waiting` under [engine]."


class TooManyRequests(OutOfCapacity):
    """More requests for a worker than its processes can take, or than a limit lets through."""

    code = 1015
    name = "RateLimited"
    cause = (
        "The account made more calls of a task within a minute than it may, or a worker has more requests than its "
        "processes can take."
    )
    remedy = "Wait for `Retry-After`. The operator: [api.requests_per_minute], or [limits] and [isolates] for workers."


class CallTimeout(EdgeError):
    """A model call took longer than calls may."""

    code = 3007
    status = 408
    name = "Timeout"
    openai_type = "timeout_error"
    retryable = True
    cause = "The call took longer than `call_timeout_s`, waiting included."
    remedy = "Ask for fewer tokens (`max_tokens`) or stream. The operator: `call_timeout_s` under [api]."


class RequestAborted(EdgeError):
    """The request's body stopped coming."""

    code = 3008
    status = 408
    name = "Aborted"
    openai_type = "timeout_error"
    retryable = True
    cause = "The request's body stopped coming or came too slowly, or its batch ended before it was made."
    remedy = "Send the request again."


class EngineLost(EdgeError):
    """The engine process died or could not be reached; a new one is being started."""

    code = 3043
    status = 503
    name = "EngineLost"
    retryable = True
    cause = "The engine process died, is starting, or the node is shutting down."
    remedy = "Try again after `Retry-After`; the node starts a new engine by itself."


class MeteringUnavailable(EdgeError):
    """The usage record could not be made durable, so that the call must not be answered."""

    code = 3044
    status = 503
    name = "MeteringUnavailable"
    retryable = True
    cause = "The usage record could not be written: the disk is full or fails."
    remedy = "Try again later. The operator: make room in `state_dir`."


class HandlerFailed(EdgeError):
    """The worker's handler raised an exception, which `type`, `message` and `traceback` describe."""

    code = 1101
    name = "WorkerThrewException"
    cause = "The worker's handler raised an exception."
    remedy = "The worker's author: the traceback is in the node's log."

    def __init__(self, message: str, *, type: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.type = type
        self.traceback = traceback


class WorkerStartFailed(EdgeError):
    """The worker's code could not be imported, or there is none to run; `traceback` is the handler author's."""

    code = 1101
    name = "WorkerStartFailed"
    cause = "The worker's code could not be imported."
    remedy = "The worker's author: the message has the traceback."

    def __init__(self, message: str, *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class ExceededResources(EdgeError):
    """An invocation used more than its limits allow."""

    code = 1102
    status = 503
    name = "WorkerExceededResources"
    cause = "An invocation took more CPU time, memory or time than its limits allow."
    remedy = "The worker's author: use less, or raise the limits under [limits]."


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
    cause = "An invocation made more calls to `fetch` and bindings than it may."
    remedy = "The worker's author: make fewer, or raise `subrequests` under [limits]."


class LoopDetected(EdgeError):
    """Workers called each other through more service bindings in a row than a node follows."""

    code = 1019
    status = 503
    name = "LoopDetected"
    cause = "Workers called each other in a circle through service bindings."
    remedy = "The worker's author: break the circle."


class UnknownWorker(ApiError):
    """No worker of that account has that name."""

    code = 10007
    status = 404
    name = "WorkerNotFound"
    cause = "No worker of the account has that name."
    remedy = "Check the name; `edge dev` lists the workers it serves."


class IsolateLost(EdgeError):
    """The handler process died while it served the request."""

    code = 1101
    status = 500
    name = "WorkerCrashed"
    retryable = True
    cause = "The process that ran the handler died."
    remedy = "Try again; a new process takes its place."


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


class UnsupportedContent(ApiError):
    """The body is of a content type or encoding that the route or the model does not take."""

    code = 1004
    status = 415
    name = "UnsupportedContent"
    cause = "The body is compressed, or of a content type that the route or the model's task does not take."
    remedy = "Send it uncompressed, as the content type that the message names."


class UnknownFinetune(ApiError):
    """The account has no finetune of that id or name."""

    code = 1005
    status = 404
    name = "UnknownFinetune"
    cause = "The account has no finetune of that id or name, and none of that id is public."
    remedy = "`GET ai/finetunes` lists those of the account."


class Conflict(ApiError):
    """What is to be made is there already, or there is no place for more."""

    code = 1006
    status = 409
    name = "Conflict"
    cause = "The name is taken, the file was uploaded before, or the account has as many as it may."
    remedy = "Choose another name, or delete what is there first."


class DiskFull(EdgeError):
    """What was sent could not be stored."""

    code = 1007
    status = 507
    name = "DiskFull"
    cause = "The node's disk is full or fails."
    remedy = "Try again later. The operator: make room in `state_dir`."


class NotSupported(ApiError):
    """A part of the service that a node does not have."""

    code = 1008
    name = "NotSupported"
    cause = "The call is for AI Gateway, AI Search or document conversion, which a node does not have."
    remedy = "Leave the option out, or use what the message names instead."


class UnknownBatch(ApiError):
    """The account has no batch of that id."""

    code = 1009
    status = 404
    name = "UnknownBatch"
    cause = "The account has no batch of that id, or it ended longer ago than `retention_days` under [batches]."
    remedy = "Fetch results in time; `GET ai/batches` and `GET ai/v1/batches` list those that are there."


class UnknownFile(ApiError):
    """The account has no file of that id."""

    code = 1010
    status = 404
    name = "UnknownFile"
    cause = "The account has no file of that id, or it is older than `retention_days` under [batches]."
    remedy = "`GET ai/v1/files` lists those that are there."


class TunnelUnauthorized(Unauthorized):
    """The bearer token of a call through the tunnel of a binding is missing or wrong."""

    code = 1031
    status = 403
    name = "TunnelUnauthorized"
    cause = "A call to `ai/run/proxy` came without a token of the node."
    remedy = "Send `Authorization: Bearer TOKEN`; `edge tokens create` makes one, `edge dev` prints its own."


BY_CODE: dict[int, type[EdgeError]] = {
    cls.code: cls
    for cls in (
        EdgeError,
        ApiError,
        InvalidJson,
        InvalidInput,
        UnknownModel,
        LoraUnsupported,
        TextTooLong,
        PromptTooLong,
        RequestTooLarge,
        OutOfCapacity,
        EngineLost,
        MeteringUnavailable,
    )
}
"""The classes that can travel from an engine to a caller, by code."""


def catalogue() -> list[type[EdgeError]]:
    """All errors that a caller of the API can meet, by code; the table of docs/errors.md."""
    found = [kind for kind in _tree(EdgeError) if "cause" in vars(kind)]
    return sorted(found, key=lambda kind: (kind.code, kind.status))


def _tree(kind: type[EdgeError]) -> Iterator[type[EdgeError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == __name__:  # those of tests are not ours
            yield from _tree(child)
