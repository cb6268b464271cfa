"""The native form of batches: `requests` in, `responses` out, through the same call that asks a model.

Formats: Cloudflare Workers AI, asynchronous batch API: submit with `queueRequest`, poll with `request_id`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from edge.ai.answers import error_message
from edge.ai.batch_calls import MAX_PROBLEMS, Slices, decoded, encoded, problem_of, problem_text, usage_sum
from edge.ai.batch_rows import NATIVE, Answered, Batch, NewRequest, Progress, new_batch_id
from edge.errors import EdgeError, InvalidInput, InvalidJson, RequestAborted, RequestTooLarge

if TYPE_CHECKING:
    from edge.ai.batch import Batches
    from edge.ai.gate import Principal

MAX_BYTES = 10 << 20
"""Of all requests of a batch together, as JSON."""
MAX_REQUESTS = 10_000
_MAX_REFERENCE_CHARS = 1000
_RUNNING = ("in_progress", "cancelling", "finalizing")
_GIVEN_UP = "the batch was {status} before this request began"


async def answer(batches: Batches, principal: Principal, model: str, inputs: Any) -> dict[str, Any]:
    """As `Batches.answer`."""
    if not isinstance(inputs, dict):
        raise InvalidJson("inputs must be a JSON object")
    if "request_id" in inputs:
        return await _poll(batches, principal, inputs["request_id"])
    return await _submit(batches, principal, model, inputs)


async def _submit(batches: Batches, principal: Principal, model: str, inputs: dict[str, Any]) -> dict[str, Any]:
    batches.gate.catalogue.resolve(model)
    requests = inputs.get("requests", [inputs])
    if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_REQUESTS:
        raise InvalidInput(f"bad input: $.requests must be a list of 1 to {MAX_REQUESTS} requests", param="requests")
    stored, problems, num_bytes = [], [], 0
    slices = Slices()
    for index, request in enumerate(requests):
        await slices.next()
        path = f"$.requests[{index}]" if "requests" in inputs else "$"
        body, reference = _without_reference(request)
        if not isinstance(reference, str | None) or len(reference or "") > _MAX_REFERENCE_CHARS:
            problems.append(f"{path}.external_reference must be a string of at most {_MAX_REFERENCE_CHARS} characters")
        elif (error := await problem_of(batches.gate, principal, NATIVE, model, body)) is not None:
            problems.append(problem_text(error, path))
        else:
            stored.append(NewRequest(encoded(body), reference))
            num_bytes += len(stored[-1].body)
        if num_bytes > MAX_BYTES:
            raise RequestTooLarge(f"the requests of the batch have more than {MAX_BYTES} bytes together: send several")
        if len(problems) == MAX_PROBLEMS:
            problems.append("and perhaps more")
            break
    if problems:
        raise InvalidInput(f"bad input: {'; '.join(problems)}", param="requests")
    batch = Batch(
        id=new_batch_id(is_native=True),
        account=principal.account,
        worker=principal.worker,
        endpoint=NATIVE,
        model=model,
        status="in_progress",
        created_at=batches.now,
    )
    await batches.store.add(batch, stored)
    batches.wake()
    return {"status": "queued", "request_id": batch.id, "model": model}


def _without_reference(request: Any) -> tuple[Any, Any]:
    if not isinstance(request, dict):
        return request, None
    body = {key: value for key, value in request.items() if key not in ("external_reference", "options")}
    return body, request.get("external_reference")


async def _poll(batches: Batches, principal: Principal, request_id: Any) -> dict[str, Any]:
    if not isinstance(request_id, str):
        raise InvalidInput(
            "bad input: $.request_id must be the string that the batch was answered with", param="request_id"
        )
    batch, progress = await batches.store.get(principal.account, request_id, is_native=True)
    if batch.ended_at is None:
        return state_object(batch, progress)
    principal.hold(batch.size_bytes)
    return await asyncio.to_thread(_result, batch, await batches.store.answered(batch.id, -1, MAX_REQUESTS))


def _result(batch: Batch, requests: list[Answered]) -> dict[str, Any]:
    responses: list[dict[str, Any]] = []
    usages: list[Any] = []
    for answered in requests:
        response = _response(batch, answered)
        responses.append(response)
        if response["success"] and isinstance(response["result"], dict):
            usages.append(response["result"].get("usage"))
    ended = {} if batch.status == "completed" else {"status": batch.status}
    return {**ended, "responses": responses, "usage": usage_sum(usages)}


def _response(batch: Batch, answered: Answered) -> dict[str, Any]:
    response: dict[str, Any] = {"id": answered.number, "success": answered.state == "ok", "result": None}
    if answered.custom_id is not None:
        response["external_reference"] = answered.custom_id
    match answered.state:
        case "ok":
            response["result"] = decoded(answered.answer)
        case "error":
            response["error"] = decoded(answered.answer)
        case _:
            error = EdgeError(_GIVEN_UP.format(status=batch.status))
            response["error"] = {"code": RequestAborted.code, "message": f"AiError: {error.message}"}
    return response


def state_object(batch: Batch, progress: Progress) -> dict[str, Any]:
    """A batch as its poll shows it while it is not over, and as it is listed."""
    status: str = batch.status
    if status in _RUNNING:
        begun = progress.started + progress.completed + progress.failed
        status = "running" if begun or status != "in_progress" else "queued"
    return {
        "status": status,
        "request_id": batch.id,
        "model": batch.model,
        "created_at": batch.created_at,
        "ended_at": batch.ended_at,
        "request_counts": counts(progress),
    }


def counts(progress: Progress) -> dict[str, int]:
    """How far a batch is, in OpenAI's words."""
    return {"total": progress.total, "completed": progress.completed, "failed": progress.failed}


def error_answer(error: EdgeError, request_id: str) -> dict[str, Any]:
    """What is kept of a request that failed."""
    return {"code": error.code, "message": error_message(error, request_id)}
