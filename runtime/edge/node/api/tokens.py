"""Routes that create, list and revoke tokens, in the shapes of Cloudflare's API, below `user` and below an account.

A token can make others that can do no more than it can itself, of its own account.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.auth.scopes import SCOPES, TOKENS_EDIT, parse_scopes
from edge.auth.store import Token
from edge.billing.times import iso_time, now_us, parse_time
from edge.errors import InvalidInput, UnknownToken, UsageError
from edge.node.api.accounts import page_of
from edge.node.api.callers import Context, address_of
from edge.node.api.responses import envelope, json_response

_RESOURCE = "com.cloudflare.api.account."
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
    if not isinstance(body, dict):
        raise InvalidInput("the body must be an object with name and policies")
    name, expires_on = body.get("name"), body.get("expires_on")
    if not isinstance(name, str):
        raise InvalidInput("name must be a string", param="name")
    for key in ("condition", "not_before"):
        if body.get(key):
            raise InvalidInput(
                f"{key} is not supported: leave it out, or the token would do more than it says", param=key
            )
    if expires_on is not None and not isinstance(expires_on, str):
        raise InvalidInput("expires_on must be a time such as 2027-01-31T00:00:00Z", param="expires_on")
    try:
        wanted = parse_scopes(_group_names(body.get("policies"), account))
        expires_us = None if expires_on is None else parse_time(expires_on)
    except UsageError as error:
        raise InvalidInput(error.message) from error
    return name, wanted, expires_us


def _group_names(policies: Any, account: str) -> list[str]:
    """The permission groups, by name or id. What a policy restricts beside them is not known here, and refused."""
    names = []
    own = (f"{_RESOURCE}{account}", f"{_RESOURCE}*")
    for number, policy in enumerate(policies if isinstance(policies, list) else []):
        groups = policy.get("permission_groups") if isinstance(policy, dict) else None
        if not isinstance(groups, list) or policy.get("effect", "allow") != "allow":
            raise InvalidInput(f"policies[{number}] must have effect allow and permission_groups", param="policies")
        if any(resource not in own for resource in policy.get("resources") or ()):
            raise InvalidInput(f"policies[{number}].resources must be {own[0]}, the token's account", param="policies")
        for group in groups:
            name = (group.get("name") or group.get("id")) if isinstance(group, dict) else None
            if not isinstance(name, str):
                raise InvalidInput(
                    f"policies[{number}]: a permission group must have an id or a name", param="policies"
                )
            names.append(name)
    if not names:
        raise InvalidInput(f"policies must name permission_groups: {', '.join(SCOPES)}", param="policies")
    return names


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
