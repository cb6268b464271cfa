"""What each route of the API takes and gives, for the OpenAPI document. A new route needs an entry in `OPERATIONS`.

Bodies come from the tables that validate them. A test compares the table with the router.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edge.ai import batch_openai, finetunes, listing, schemas
from edge.ai.fields import Choice, Field, Integer, String, Table, object_schema
from edge.ai.task_schemas import EMBEDDING_LIST, RESULTS, described, input_schemas, list_of
from edge.node.api import files, tokens

PATH = "/client/v4/openapi.json"
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_BOOLEAN = {"type": "boolean"}
_ANY: dict[str, Any] = {}


def ref(name: str) -> dict[str, Any]:
    """A reference to the schema of that name in the document."""
    return {"$ref": f"#/components/schemas/{name}"}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. Schemas are of the JSON body and of the answer's `result`, or of all of it."""

    summary: str
    answer: dict[str, Any]
    body: dict[str, Any] | None = None
    query: Table = {}
    is_enveloped: bool = False
    is_paged: bool = False
    events: tuple[str, ...] = ()
    """Names of the schemas of its events, where the answer can be an event stream."""
    is_open: bool = False
    """It needs no token."""
    media_type: str = "application/json"
    """Of the answer."""
    form: dict[str, Any] | None = None
    """The schema of the body, where that is a form."""


_NAMED = described({"id": _STRING, "name": _STRING}, {"description": _STRING})
_MODEL_ITEM = described(
    {
        "id": _STRING,
        "source": _INTEGER,
        "name": {"description": "What `ai/run` takes.", **_STRING},
        "description": _STRING,
        "task": _NAMED,
        "created_at": _STRING,
        "tags": list_of(_STRING),
        "properties": list_of(described({"property_id": _STRING, "value": _ANY})),
    }
)
_OPENROUTER_ITEM = described(
    {
        "id": _STRING,
        "name": _STRING,
        "created": _INTEGER,
        "context_length": _INTEGER,
        "input_modalities": list_of(_STRING),
        "output_modalities": list_of(_STRING),
        "supported_features": list_of(_STRING),
        "supported_sampling_parameters": list_of(_STRING),
    },
    {"max_output_length": _INTEGER, "pricing": {"type": "object", "additionalProperties": _STRING}},
)
_OPENAI_MODEL = described(
    {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING},
)
_FINETUNE = described(
    {
        **dict.fromkeys(("id", "model", "name", "description", "created_at", "modified_at"), _STRING),
        "public": {"type": "boolean"},
        "files": list_of(_STRING),
    }
)

_ACCOUNT_ITEM = described({"id": _STRING, "name": _STRING}, {"type": _STRING, "created_on": _STRING})
_TOKEN = described(
    {"id": _STRING, "name": _STRING, "status": _STRING, "issued_on": _STRING, "policies": list_of({"type": "object"})},
    {
        "value": {"description": "The token itself, once: when it is made.", **_STRING},
        "expires_on": _STRING,
        "last_used_on": _STRING,
    },
)
_BATCH = described(
    {
        "id": _STRING,
        "object": {"const": "batch"},
        "endpoint": _STRING,
        "input_file_id": {"type": ["string", "null"]},
        "status": _STRING,
        "output_file_id": {"type": ["string", "null"]},
        "error_file_id": {"type": ["string", "null"]},
        "created_at": _INTEGER,
        "request_counts": {"type": "object"},
    }
)
_FILE = described(
    {"id": _STRING, "object": {"const": "file"}, "bytes": _INTEGER, "created_at": _INTEGER, "filename": _STRING}
)
_ASSET_FORM = described({"file_name": _STRING, "file": {"type": "string", "format": "binary"}})
OBJECTS = {
    "Named": _NAMED,
    "CatalogueModel": _MODEL_ITEM,
    "OpenRouterModel": _OPENROUTER_ITEM,
    "Model": _OPENAI_MODEL,
    "Finetune": _FINETUNE,
    "Account": _ACCOUNT_ITEM,
    "Token": _TOKEN,
    "Batch": _BATCH,
    "File": _FILE,
    "EmbeddingList": EMBEDDING_LIST,
}
"""Answers by name."""


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """The schema of a page of OpenAI's lists."""
    id = {"type": ["string", "null"]}
    return described(
        {"object": {"const": "list"}, "data": list_of(item), "first_id": id, "last_id": id, "has_more": _BOOLEAN}
    )


def _after(limit: int) -> Table:
    return {
        "after": String("The last id of the page before."),
        "limit": Integer("How many there are at most.", low=1, high=limit),
    }


def _in_pages(limit: int) -> Table:
    page = listing.PAGE["page"]
    return {"page": page, "per_page": Integer("How many a page has at most.", low=1, high=limit)}


def _flag(description: str) -> Field:
    return Choice(description, values=("true", "false", "1", "0"))


_RUN_OPTIONS: Table = {
    "queueRequest": _flag("Run it as a batch, when there is room."),
    "rejectIfBusy": _flag("Fail at once rather than wait."),
}

OPERATIONS = {
    "GET /healthz": Operation(
        summary="Whether the node is up.", answer=described({"status": {"const": "ok"}}), is_open=True
    ),
    f"GET {PATH}": Operation(
        summary="This document.", answer=described({"openapi": _STRING, "paths": {"type": "object"}}), is_open=True
    ),
    "POST /ai/run/{model}": Operation(
        summary="Run a model.",
        body={"anyOf": [ref(name) for name in input_schemas()]},
        query=_RUN_OPTIONS,
        answer={"anyOf": [ref(name) for name in RESULTS]},
        is_enveloped=True,
        events=("TextGeneratedEvent", "ChatChunk", "TextChunk", "ResponseEvent"),
    ),
    "GET /ai/models/search": Operation(
        summary="The models that can be called.",
        query=listing.MODELS,
        answer=list_of({"anyOf": [_MODEL_ITEM, _OPENROUTER_ITEM]}),
        is_enveloped=True,
        is_paged=True,
    ),
    "GET /ai/models/schema": Operation(
        summary="What a model takes and gives, as JSON Schemas.",
        query={"model": schemas.CHAT["model"]},
        answer=described({"input": {"type": "object"}, "output": {"type": "object"}}),
        is_enveloped=True,
    ),
    "GET /ai/tasks/search": Operation(
        summary="The tasks that there are models for.",
        query=listing.NAMES,
        answer=list_of(_NAMED),
        is_enveloped=True,
        is_paged=True,
    ),
    "GET /ai/authors/search": Operation(
        summary="The authors that there are models of.",
        query=listing.NAMES,
        answer=list_of(_NAMED),
        is_enveloped=True,
        is_paged=True,
    ),
    "POST /ai/run/proxy": Operation(
        summary="What the `env.AI` of another runtime asks for at the address in `X-Forwarded`.", body=_ANY, answer=_ANY
    ),
    **{
        f"{method} /ai/binding/{{path}}": Operation(
            summary="What the `env.AI` of another runtime asks for at a path of its own.", answer=_ANY
        )
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
    },
    "GET /ai/finetunes": Operation(
        summary="The account's LoRA adapters.", answer=list_of(_FINETUNE), is_enveloped=True
    ),
    "POST /ai/finetunes": Operation(
        summary="Make a finetune, to which the files of a LoRA adapter are uploaded.",
        body=object_schema(finetunes.FINETUNE),
        answer=_FINETUNE,
        is_enveloped=True,
    ),
    "GET /ai/finetunes/public": Operation(
        summary="The finetunes that every account may use.",
        query=finetunes.LISTED,
        answer=list_of(_FINETUNE),
        is_enveloped=True,
    ),
    "GET /ai/finetunes/{finetune}": Operation(
        summary="One of the account's finetunes, by id or name.", answer=_FINETUNE, is_enveloped=True
    ),
    "DELETE /ai/finetunes/{finetune}": Operation(
        summary="Remove a finetune.", answer=described({"id": _STRING}), is_enveloped=True
    ),
    "POST /ai/finetunes/{finetune}/finetune-assets": Operation(
        summary="Upload a file of a finetune: a form of `file_name` and `file`.",
        form=_ASSET_FORM,
        answer=described({"id": _STRING, "file_name": _STRING}),
        is_enveloped=True,
    ),
    "GET /ai/batches": Operation(
        summary="The account's batches of `ai/run`, newest first.",
        query=_in_pages(100),
        answer=list_of(ref("BatchState")),
        is_enveloped=True,
        is_paged=True,
    ),
    "GET /ai/batches/{batch}": Operation(
        summary="How far a batch is, without its answers.", answer=ref("BatchState"), is_enveloped=True
    ),
    "POST /ai/batches/{batch}/cancel": Operation(
        summary="Give up what of a batch has not begun.", answer=ref("BatchState"), is_enveloped=True
    ),
    "GET /user": Operation(
        summary="Who calls: a node knows no users, only tokens.",
        answer=described({"id": _STRING, "email": _STRING}),
        is_enveloped=True,
    ),
    "GET /memberships": Operation(
        summary="The token's account, as a membership.",
        query=_in_pages(1000),
        answer=list_of(described({"id": _STRING, "status": _STRING, "account": _ACCOUNT_ITEM})),
        is_enveloped=True,
        is_paged=True,
    ),
    "GET /accounts": Operation(
        summary="The token's account.",
        query=_in_pages(1000),
        answer=list_of(_ACCOUNT_ITEM),
        is_enveloped=True,
        is_paged=True,
    ),
    "GET /accounts/{account}": Operation(summary="The token's account.", answer=_ACCOUNT_ITEM, is_enveloped=True),
    **{
        key: operation
        for place in ("/user", "/accounts/{account}")
        for key, operation in {
            f"GET {place}/tokens/verify": Operation(
                summary="Whether the token is right.",
                answer=described({"id": _STRING, "status": {"const": "active"}}),
                is_enveloped=True,
            ),
            f"GET {place}/tokens/permission_groups": Operation(
                summary="What tokens can be allowed to do.",
                query=_in_pages(1000),
                answer=list_of(_NAMED),
                is_enveloped=True,
                is_paged=True,
            ),
            f"GET {place}/tokens": Operation(
                summary="The account's tokens, newest first.",
                query=_in_pages(1000),
                answer=list_of(_TOKEN),
                is_enveloped=True,
                is_paged=True,
            ),
            f"POST {place}/tokens": Operation(
                summary="Make a token that can do no more than the caller's.",
                body=object_schema(tokens.TOKEN),
                answer=_TOKEN,
                is_enveloped=True,
            ),
            f"GET {place}/tokens/{{token}}": Operation(summary="One token.", answer=_TOKEN, is_enveloped=True),
            f"DELETE {place}/tokens/{{token}}": Operation(
                summary="Revoke a token.", answer=described({"id": _STRING}), is_enveloped=True
            ),
        }.items()
    },
    "GET /v1/batches": Operation(
        summary="The account's batches of files, newest first.", query=_after(100), answer=_listed(_BATCH)
    ),
    "POST /v1/batches": Operation(
        summary="Run the calls in a file.", body=object_schema(batch_openai.BATCH), answer=_BATCH
    ),
    "GET /v1/batches/{batch}": Operation(summary="One batch.", answer=_BATCH),
    "POST /v1/batches/{batch}/cancel": Operation(summary="Give up what of a batch has not begun.", answer=_BATCH),
    "GET /v1/files": Operation(
        summary="The account's files, newest first.",
        query={"purpose": String("Only files of this purpose."), **_after(10_000)},
        answer=_listed(_FILE),
    ),
    "POST /v1/files": Operation(summary="Upload a file of calls.", form=object_schema(files.FILE), answer=_FILE),
    "GET /v1/files/{file}": Operation(summary="One file.", answer=_FILE),
    "DELETE /v1/files/{file}": Operation(
        summary="Remove a file.",
        answer=described({"id": _STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    ),
    "GET /v1/files/{file}/content": Operation(
        summary="The bytes of a file.", answer=_STRING, media_type="application/octet-stream"
    ),
    "POST /v1/chat/completions": Operation(
        summary="Continue a conversation.",
        body=ref("ChatBody"),
        answer=ref("ChatCompletion"),
        events=("ChatChunk",),
    ),
    "POST /v1/chat/completions/input_tokens": Operation(
        summary="Count the tokens of a conversation; nothing is generated or charged.",
        body=ref("ChatBody"),
        answer=described({"object": {"const": "chat.completion.input_tokens"}, "input_tokens": _INTEGER}),
    ),
    "POST /v1/completions": Operation(
        summary="Continue a text.",
        body=ref("Completion"),
        answer=ref("TextCompletion"),
        events=("TextChunk",),
    ),
    "POST /v1/responses": Operation(
        summary="Answer in items: reasoning, messages and function calls.",
        body=ref("ResponseBody"),
        answer=ref("Response"),
        events=("ResponseEvent",),
    ),
    "POST /v1/responses/input_tokens": Operation(
        summary="Count the tokens of what a response is asked for; nothing is generated or charged.",
        body=ref("ResponseBody"),
        answer=described({"object": {"const": "response.input_tokens"}, "input_tokens": _INTEGER}),
    ),
    "POST /v1/embeddings": Operation(summary="Turn texts into vectors.", body=ref("Embeddings"), answer=EMBEDDING_LIST),
    "GET /v1/models": Operation(
        summary="The models that can be called, as OpenAI lists them.",
        answer=described({"object": {"const": "list"}, "data": list_of(_OPENAI_MODEL)}),
    ),
    "GET /v1/models/{model}": Operation(summary="One model, as OpenAI describes it.", answer=_OPENAI_MODEL),
}
"""By method and path: below an account, or below any base URL of OpenAI clients if it begins with `/v1`."""
