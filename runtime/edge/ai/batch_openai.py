"""OpenAI's form of batches: a file with a request per line in, files with the answers and the errors out.

Formats: OpenAI's API reference, the batch and file objects, and the lines of their input, output and error files.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO, TYPE_CHECKING, Any

import msgspec

from edge.ai.answers import error_body
from edge.ai.batch_calls import CALLS, Slices, encoded, problem_of, problem_text
from edge.ai.batch_disk import write_file
from edge.ai.batch_native import counts
from edge.ai.batch_rows import NATIVE, Answered, Batch, NewRequest, Progress, StoredFile, new_batch_id
from edge.ai.fields import Choice, Custom, Fields, String, Table
from edge.ai.gate import Principal
from edge.errors import EdgeError, InvalidInput, UnknownFile

if TYPE_CHECKING:
    from edge.ai.batch import Batches

ENDPOINTS = tuple(endpoint for endpoint in CALLS if endpoint != NATIVE)
WINDOW_S = 86_400
MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 2 << 20
_MAX_ERRORS = 100
_MAX_CUSTOM_ID_CHARS = 512
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS, _MAX_METADATA_CHARS = 64, 512
_LINES_AT_A_TIME, _BYTES_AT_A_TIME = 200, 1 << 20
_ANSWERS_AT_A_TIME = 20
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_DROPPED = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "The batch was cancelled before this request began.",
}


# -- the objects of the API --------------------------------------------------------------------------------


async def create(batches: Batches, principal: Principal, body: Any) -> dict[str, Any]:
    """A new batch, as the `body` of OpenAI's `POST batches` says; it is validated in the background.

    Raises:
        InvalidJson, InvalidInput: all that is wrong with the body.
        UnknownFile: there is no such input file.
        DiskFull: it could not be stored.
    """
    fields = Fields(body, "the body", BATCH)
    file_id, endpoint, metadata = fields["input_file_id"], fields["endpoint"], fields["metadata"]
    fields.raise_problems()
    file = await batches.store.files.get(principal.account, file_id)
    if file.purpose != "batch":
        raise InvalidInput(
            f"bad input: $.input_file_id is a file of the purpose {file.purpose!r}, must be of batch",
            param="input_file_id",
        )
    batch = Batch(
        id=new_batch_id(is_native=False),
        account=principal.account,
        endpoint=endpoint,
        model=None,
        status="validating",
        created_at=batches.now,
        expires_at=batches.now + WINDOW_S,
        input_file=file.id,
        window="24h",
        metadata=metadata,
    )
    await batches.store.add(batch)
    batches.wake()
    return batch_object(batch, Progress())


def _read_metadata(fields: Fields, path: str, value: Any) -> dict[str, str] | None:
    if isinstance(value, dict) and len(value) <= _MAX_METADATA and all(map(_is_entry, value.items())):
        return value
    fields.problem(
        path, f"must be an object of at most {_MAX_METADATA} strings of at most {_MAX_METADATA_CHARS} characters"
    )
    return None


def _is_entry(entry: tuple[str, Any]) -> bool:
    key, value = entry
    return len(key) <= _MAX_METADATA_KEY_CHARS and isinstance(value, str) and len(value) <= _MAX_METADATA_CHARS


BATCH: Table = {
    "input_file_id": String("The id of a file of calls.", required=True),
    "endpoint": Choice("What the calls are of.", required=True, values=ENDPOINTS),
    "completion_window": Choice("How long it may take.", required=True, values=("24h",)),
    "metadata": Custom(
        "Comes back with the batch.",
        json={
            "type": "object",
            "maxProperties": _MAX_METADATA,
            "propertyNames": {"maxLength": _MAX_METADATA_KEY_CHARS},
            "additionalProperties": {"type": "string", "maxLength": _MAX_METADATA_CHARS},
        },
        reader=_read_metadata,
    ),
}
"""The body with which a batch is made."""


def batch_object(batch: Batch, progress: Progress) -> dict[str, Any]:
    """A batch as OpenAI shows it."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if batch.errors is None else {"object": "list", "data": batch.errors},
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in _TIMES},
        "request_counts": counts(progress),
        "metadata": batch.metadata,
    }


def file_object(file: StoredFile, retention_s: int) -> dict[str, Any]:
    """A file as OpenAI shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.created_at + retention_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def page_object(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list, of which one item more than `limit` was looked for."""
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


# -- the lines of files ------------------------------------------------------------------------------------


class _Line(msgspec.Struct):
    """A line of an input file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


_line_decoder = msgspec.json.Decoder(_Line)


async def validate(batches: Batches, batch: Batch) -> None:
    """Store the requests in the input file of `batch`, which then begins, or what is wrong with them: it has failed."""
    await batches.store.restart_validation(batch.id)
    principal = Principal(account=batch.account, trigger="batch", request_id=batch.id)
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    num_requests = 0
    requests: list[NewRequest] = []
    slices = Slices()
    try:
        path = batches.store.files.path(await batches.store.files.get(batch.account, batch.input_file or ""))
        with await asyncio.to_thread(open, path, "rb") as file:
            number = 0
            while lines := await asyncio.to_thread(_lines, file):
                for text in lines:
                    number += 1
                    if not text.strip():
                        continue
                    await slices.next()
                    request = await _request(batches, principal, batch, text, seen)
                    if isinstance(request, EdgeError):
                        errors.append(problem_object(request, number))
                    else:
                        requests.append(request)
                if len(seen) > MAX_REQUESTS:
                    errors.append(problem_object(InvalidInput(f"the file has more than {MAX_REQUESTS} requests"), None))
                if len(errors) >= _MAX_ERRORS or len(seen) > MAX_REQUESTS:
                    break
                if not errors:
                    await batches.store.add_requests(batch, num_requests, requests)
                num_requests += len(requests)
                requests = []
        if not seen and not errors:
            errors.append(problem_object(InvalidInput("the file is empty: it needs a request per line"), None))
    except FileNotFoundError:
        errors.append(problem_object(UnknownFile("the input file was removed"), None))
    except EdgeError as error:
        if error.retryable or error.status >= 500:
            raise
        errors.append(problem_object(error, None))
    if errors:
        await batches.store.enter(
            batch.id, "failed", batches.now, only_from=("validating",), errors=errors[:_MAX_ERRORS]
        )
    else:
        await batches.store.enter(batch.id, "in_progress", batches.now, only_from=("validating",))


def _lines(file: IO[bytes]) -> list[bytes]:
    """The next lines; one that is too long comes cut off, and so as wrong JSON."""
    lines: list[bytes] = []
    num_bytes = 0
    while len(lines) < _LINES_AT_A_TIME and num_bytes < _BYTES_AT_A_TIME and (line := file.readline(MAX_LINE_BYTES)):
        lines.append(line)
        num_bytes += len(line)
    return lines


async def _request(
    batches: Batches, principal: Principal, batch: Batch, text: bytes, seen: set[str]
) -> NewRequest | EdgeError:
    """The request in one line of an input file, or what is wrong with it."""
    try:
        line = _line_decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return InvalidInput(f"the line is no request: {error}")
    if not 1 <= len(line.custom_id) <= _MAX_CUSTOM_ID_CHARS:
        return InvalidInput(f"$.custom_id must have 1 to {_MAX_CUSTOM_ID_CHARS} characters", param="custom_id")
    if line.custom_id in seen:
        return InvalidInput(f"$.custom_id {line.custom_id!r} is there twice in the file", param="custom_id")
    seen.add(line.custom_id)
    if line.method != "POST" or line.url != batch.endpoint:
        return InvalidInput(f"$.method and $.url must be POST and {batch.endpoint}, the batch's endpoint", param="url")
    problem = await problem_of(batches.gate, principal, batch.endpoint, "", line.body)
    if problem is not None:
        return InvalidInput(problem_text(problem, "$.body"), param=f"body.{problem.param}" if problem.param else None)
    return NewRequest(encoded(line.body), line.custom_id)


def problem_object(error: EdgeError, number: int | None) -> dict[str, Any]:
    """Why a batch has failed, as OpenAI shows it; `number` is that of a line of its input file, from 1."""
    return {"code": str(error.code), "message": error.message, "param": error.param, "line": number}


async def write_files(batches: Batches, batch_id: str) -> tuple[str | None, str | None]:
    """Write the output file and the error file of a batch whose requests are over; their ids, None for an empty one."""
    (batch,) = [each for each in await batches.store.in_status("finalizing", "cancelling") if each.id == batch_id]
    ids: list[str | None] = []
    async with batches.store.files.scratch() as folder:
        for name, is_output in (("output", True), ("error", False)):
            path = folder / name
            await write_file(path, _answer_lines(batches, batch, is_output=is_output))
            if path.stat().st_size == 0:
                ids.append(None)
                continue
            id = f"file-{batch.id.removeprefix('batch_')}-{name}"
            file_name = f"{batch.id}_{name}.jsonl"
            await batches.store.files.add(batch.account, file_name, "batch_output", batches.now, path, id=id)
            ids.append(id)
    return ids[0], ids[1]


async def _answer_lines(batches: Batches, batch: Batch, *, is_output: bool) -> AsyncIterator[bytes]:
    after = -1
    while page := await batches.store.answered(batch.id, after, _ANSWERS_AT_A_TIME):
        after = page[-1].number
        lines = [_answer_line(batch, each) for each in page if (each.state == "ok") == is_output]
        if lines:
            yield b"".join(lines)


def _answer_line(batch: Batch, answered: Answered) -> bytes:
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    if answered.state == "dropped":
        reason = "cancelled" if batch.status == "cancelling" else "expired"
        error = {"code": f"batch_{reason}", "message": _DROPPED[reason]}
    else:
        body = msgspec.Raw(answered.answer)
        response = {"status_code": answered.status_code, "request_id": answered.request_id, "body": body}
    line = {
        "id": f"batch_req_{batch.id.removeprefix('batch_')}_{answered.number}",
        "custom_id": answered.custom_id,
        "response": response,
        "error": error,
    }
    return encoded(line) + b"\n"


def error_answer(error: EdgeError, request_id: str) -> dict[str, Any]:
    """What is kept of a request that failed."""
    return {"error": error_body(error, request_id)["error"]}
