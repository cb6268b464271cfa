"""Who calls, and what a route works with."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request

from edge.ai.gate import Gate, Principal
from edge.auth import scopes
from edge.auth.authenticator import Authenticator, Grant
from edge.billing.meter import Trigger
from edge.errors import UnknownAccount
from edge.node.api.bodies import Bodies


class Context:
    """What a route works with."""

    def __init__(self, gate: Gate, tokens: Authenticator | Mapping[str, str]) -> None:
        """`tokens` tells who calls; a mapping is of tokens to the accounts that they belong to, with every scope."""
        self.gate = gate
        self.bodies = Bodies()
        self.authenticator = tokens if isinstance(tokens, Authenticator) else Authenticator(fixed=tokens)

    def principal(self, request: Request, trigger: Trigger, scope: str = scopes.AI_RUN) -> Principal:
        """Who makes a call that needs `scope`: the account in the path, or where there is none, that of the token.

        Raises:
            Unauthorized: there is no token, or a wrong, expired or revoked one.
            UnknownAccount: the token is for another account.
            MissingScope: it may not do this.
        """
        account = self.grant(request, scope).account
        state = request.state
        return Principal(
            account=account,
            trigger=trigger,
            request_id=state.request_id,
            report=state.report,
            hold=state.held.take,
        )

    def grant(self, request: Request, scope: str | None = None) -> Grant:
        """What the request's token allows, with the checks of `principal`; without `scope` any token will do."""
        address = address_of(request)
        grant = self.authenticator.authenticate(credential_of(request.headers), address)
        request.state.account = grant.account
        account = request.path_params.get("account", grant.account)
        if account != grant.account:
            raise UnknownAccount(
                f"the token has no access to the account {account[:100]!r}, if it exists; its own is {grant.account!r}"
            )
        if scope is not None:
            self.authenticator.require(grant, scope, address)
        return grant


def credential_of(headers: Headers) -> str:
    """The token in `Authorization: Bearer`, or in `X-Auth-Key`, where clients of old have the key; else nothing."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-auth-key", "").strip()
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def address_of(request: Request) -> str:
    """The client's IP address, as far as the connection tells."""
    return request.client.host if request.client is not None else ""
