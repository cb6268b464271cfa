"""Routes about the caller: which account, which user, whether the token is right. Clients ask them before others.

A node knows no users, only tokens: the user is the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.ai.listing import page_info
from edge.billing.times import iso_time
from edge.node.api.bodies import count
from edge.node.api.callers import Context
from edge.node.api.responses import envelope, json_response

_MAX_PER_PAGE = 1000
_MAX_PAGE = 10**9
_CREATED = "1970-01-01T00:00:00Z"
"""Accounts are names, and have no beginning; clients parse one."""


class Accounts:
    """The routes about who calls."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """Below `/client/v4`."""
        return [
            Route("/user", self.user, methods=["GET"]),
            Route("/user/tokens/verify", self.verify, methods=["GET"]),
            Route("/accounts/{account}/tokens/verify", self.verify, methods=["GET"]),
            Route("/memberships", self.memberships, methods=["GET"]),
            Route("/accounts", self.accounts, methods=["GET"]),
            Route("/accounts/{account}", self.account, methods=["GET"]),
        ]

    async def user(self, request: Request) -> Response:
        """`GET user`."""
        grant = self._context.grant(request)
        # An address of the form that clients show; `.invalid` is never anybody's.
        email = f"{grant.token_id or 'dev'}@{grant.account}.invalid"
        return json_response(envelope({"id": grant.token_id or "dev", "email": email, "suspended": False}))

    async def verify(self, request: Request) -> Response:
        """`GET user/tokens/verify`."""
        grant = self._context.grant(request)
        until = {} if grant.expires_us is None else {"expires_on": iso_time(grant.expires_us)}
        result = {"id": grant.token_id or "dev", "status": "active", **until}
        message = {"code": 10000, "message": "This API Token is valid and active", "type": None}
        return json_response(envelope(result) | {"messages": [message]})

    async def accounts(self, request: Request) -> Response:
        """`GET accounts`: the token's own."""
        grant = self._context.grant(request)
        return json_response(page_of([_account(grant.account)], request))

    async def account(self, request: Request) -> Response:
        """`GET accounts/{account}`."""
        return json_response(envelope(_account(self._context.grant(request).account)))

    async def memberships(self, request: Request) -> Response:
        """`GET memberships`."""
        grant = self._context.grant(request)
        membership = {"id": grant.account, "status": "accepted", "account": _account(grant.account), "roles": []}
        return json_response(page_of([membership], request))


def _account(account: str) -> dict[str, Any]:
    return {"id": account, "name": account, "type": "standard", "settings": {}, "created_on": _CREATED}


def page_of(items: Sequence[Any], request: Request) -> dict[str, Any]:
    """The envelope with the page of `items` that `request` asks for; one past the end is empty."""
    page = count(request.query_params, "page", 1, _MAX_PAGE)
    per_page = count(request.query_params, "per_page", _MAX_PER_PAGE, _MAX_PER_PAGE)
    shown = items[(page - 1) * per_page : page * per_page]
    return envelope(shown) | {"result_info": page_info(page, per_page, len(shown), len(items))}
