"""Routes that create, list and revoke tokens, in the shapes of Cloudflare's API, below `user` and below an account.

A token can make others that can do no more than it can itself, of its own account.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai.fields import (
    Choice,
    Custom,
    Fields,
    ListOf,
    ObjectOf,
    String,
    Table,
    Unsupported,
    shown,
)
from edge.auth.scopes import SCOPES, TOKENS_EDIT, parse_scopes
from edge.auth.store import MAX_NAME_CHARS, Token
from edge.billing.times import iso_time, now_us, parse_time
from edge.errors import InvalidInput, UnknownToken, UsageError
from edge.node.api.accounts import page_of
from edge.node.api.callers import Context, address_of
from edge.node.api.responses import envelope, json_response

_RESOURCE = "com.cloudflare.api.account."
_MAX_ITEMS = 100
_PLACES = ("/user", "/accounts/{account}")


class Tokens:
    """The routes about tokens."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Below `/client/v4`."""
        return [
            route
            for place in _PLACES
            for route in (
                Route(f"{place}/tokens/permission_groups", self.permission_groups, methods=["GET"]),
                Route(f"{place}/tokens", self.list, methods=["GET"]),
                Route(f"{place}/tokens", self.create, methods=["POST"]),
                Route(f"{place}/tokens/{{token}}", self.get, methods=["GET"]),
                Route(f"{place}/tokens/{{token}}", self.revoke, methods=["DELETE"]),
            )
        ]

    async def permission_groups(self, request: Request) -> Response:
        """`GET tokens/permission_groups`: the scopes."""
        self._context.grant(request, TOKENS_EDIT)
        groups = [{"id": scope, "name": scope, "description": text, "scopes": []} for scope, text in SCOPES.items()]
        return json_response(page_of(groups, request))

    async def list(self, request: Request) -> Response:
        """`GET tokens`: the account's, newest first."""
        grant = self._context.grant(request, TOKENS_EDIT)
        tokens = await self._context.authenticator.tokens_of(grant.account)
        return json_response(page_of([_shown(token) for token in tokens], request))

    async def get(self, request: Request) -> Response:
        """`GET tokens/{token}`."""
        grant = self._context.grant(request, TOKENS_EDIT)
        token_id = request.path_params["token"]
        for token in await self._context.authenticator.tokens_of(grant.account):
            if token.id == token_id:
                return json_response(envelope(_shown(token)))
        raise UnknownToken(f"there is no token of the id {token_id[:40]!r}")

    async def create(self, request: Request) -> Response:
        """`POST tokens` with `name`, `policies` and `expires_on`; `value` in the answer is the token."""
        grant = self._context.grant(request, TOKENS_EDIT)
        async with self._context.bodies.json_of(request) as body:
            name, wanted, expires_us = _parsed(body, grant.account)
        token, credential = await self._context.authenticator.create(
            grant, name, wanted, expires_us, address_of(request)
        )
        return json_response(envelope({**_shown(token), "value": credential}))

    async def revoke(self, request: Request) -> Response:
        """`DELETE tokens/{token}`."""
        grant = self._context.grant(request, TOKENS_EDIT)
        token_id = request.path_params["token"]
        token = await self._context.authenticator.revoke(grant, token_id, address_of(request))
        return json_response(envelope({"id": token.id}))


def _parsed(body: Any, account: str) -> tuple[str, frozenset[str], int | None]:
    """Name, scopes and end of the token of `account` that `body` describes."""
    fields = Fields(body, "the body", TOKEN)
    name, policies, expires_us = fields["name"], fields["policies"] or [], fields["expires_on"]
    own = (f"{_RESOURCE}{account}", f"{_RESOURCE}*")
    for number, policy in enumerate(policies):
        if policy is not None and any(resource not in own for resource in policy["resources"]):
            fields.problem(f"$.policies[{number}].resources", f"must be {own[0]}, the token's account")
    fields.raise_problems()
    groups = [group for policy in policies for group in policy["permission_groups"]]
    try:
        wanted = parse_scopes(group["name"] or group["id"] for group in groups)
    except UsageError as error:
        raise InvalidInput(error.message, param="policies") from error
    return name, wanted, expires_us


def _read_group(fields: Fields, path: str, value: Any) -> dict[str, str | None]:
    """A permission group, by name or id."""
    group: dict[str, str | None] = _GROUP.read(fields, path, value) or {}
    if isinstance(value, dict) and not any(group.values()):
        fields.problem(path, f"needs an id or a name, one of {', '.join(SCOPES)}")
    return group


def _read_resources(fields: Fields, path: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return list(value)
    fields.wrong(path, value, "an object")
    return []


def _read_time(fields: Fields, path: str, value: Any) -> int | None:
    try:
        return parse_time(value if isinstance(value, str) else shown(value))
    except UsageError as error:
        fields.problem(path, f"is no time: {error.message}")
    return None


_GROUP = ObjectOf("", table={"id": String("The scope."), "name": String("The scope, or what Cloudflare calls it.")})
_POLICY = ObjectOf(
    "",
    required=True,
    table={
        "effect": Choice("There is no other.", values=("allow",)),
        "permission_groups": ListOf(
            "What the token may do.",
            required=True,
            default=[],
            item=Custom(
                "",
                required=True,
                reader=_read_group,
                json=_GROUP.json_type()
                | {"anyOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in ("id", "name")]},
            ),
            max_items=_MAX_ITEMS,
        ),
        "resources": Custom(
            "The token's account, which is no other in any case.",
            default=[],
            json={"type": "object"},
            reader=_read_resources,
        ),
    },
)
TOKEN: Table = {
    "name": String("What it is for.", required=True, max_chars=MAX_NAME_CHARS),
    "policies": ListOf("What it may do.", required=True, item=_POLICY, max_items=_MAX_ITEMS),
    "expires_on": Custom(
        "When it ends; never by default.", json={"type": "string", "format": "date-time"}, reader=_read_time
    ),
    "condition": Unsupported("From where it may be used."),
    "not_before": Unsupported("When it begins."),
}
"""The body with which a token is made."""


def _shown(token: Token) -> dict[str, Any]:
    groups = [{"id": scope, "name": scope} for scope in sorted(token.scopes)]
    times = {"expires_on": token.expires_us, "last_used_on": token.last_used_us}
    return {
        "id": token.id,
        "name": token.name,
        "status": {"revoked": "disabled"}.get(status := token.status(now_us()), status),
        "issued_on": iso_time(token.created_us),
        "modified_on": iso_time(token.revoked_us or token.created_us),
        **{key: iso_time(moment) for key, moment in times.items() if moment is not None},
        "policies": [
            {
                "id": token.id,
                "effect": "allow",
                "resources": {f"{_RESOURCE}{token.account}": "*"},
                "permission_groups": groups,
            }
        ],
    }
