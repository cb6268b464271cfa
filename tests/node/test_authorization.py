"""Who may do what, over every route of the API as the router has them: a route without a line in `ROUTES` fails."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles import MODEL, ScriptedPool, answer, make_gate
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from edge.auth.authenticator import Authenticator
from edge.auth.scopes import AI_EDIT, AI_READ, AI_RUN, ALL, TOKENS_EDIT
from edge.auth.store import FILE_NAME, TokenStore
from edge.billing.times import now_us
from edge.node.api import routes

OPEN = "open to anybody"
ANY_TOKEN = "open to any token"
ACCOUNT = "/client/v4/accounts/{account}"
_TOKENS = {
    "GET tokens/permission_groups": TOKENS_EDIT,
    "GET tokens": TOKENS_EDIT,
    "POST tokens": TOKENS_EDIT,
    "GET tokens/{token}": TOKENS_EDIT,
    "DELETE tokens/{token}": TOKENS_EDIT,
    "GET tokens/verify": ANY_TOKEN,
}
_OPENAI = {
    "POST chat/completions": AI_RUN,
    "POST chat/completions/input_tokens": AI_RUN,
    "POST completions": AI_RUN,
    "POST responses": AI_RUN,
    "POST responses/input_tokens": AI_RUN,
    "POST embeddings": AI_RUN,
    "GET models": AI_READ,
    "GET models/{model}": AI_READ,
    "POST files": AI_RUN,
    "GET files": AI_READ,
    "GET files/{file}": AI_READ,
    "DELETE files/{file}": AI_RUN,
    "GET files/{file}/content": AI_READ,
    "POST batches": AI_RUN,
    "GET batches": AI_READ,
    "GET batches/{batch}": AI_READ,
    "POST batches/{batch}/cancel": AI_RUN,
}
_AI = {
    "POST run/{model}": AI_RUN,
    "POST run/proxy": AI_RUN,
    **{f"{method} binding/{{path}}": AI_RUN for method in ("DELETE", "GET", "PATCH", "POST", "PUT")},
    "GET models/search": AI_READ,
    "GET models/schema": AI_READ,
    "GET tasks/search": AI_READ,
    "GET authors/search": AI_READ,
    "GET finetunes": AI_READ,
    "POST finetunes": AI_EDIT,
    "GET finetunes/public": AI_READ,
    "GET finetunes/{finetune}": AI_READ,
    "DELETE finetunes/{finetune}": AI_EDIT,
    "POST finetunes/{finetune}/finetune-assets": AI_EDIT,
    "GET batches": AI_READ,
    "GET batches/{batch}": AI_READ,
    "POST batches/{batch}/cancel": AI_RUN,
}


def below(prefix: str, table: dict[str, str]) -> dict[tuple[str, str], str]:
    found = (key.partition(" ") for key in table)
    return {(method, f"{prefix}/{path}"): table[f"{method} {path}"] for method, _, path in found}


ROUTES = {
    ("GET", "/healthz"): OPEN,
    ("GET", "/client/v4/openapi.json"): OPEN,
    ("GET", "/client/v4/user"): ANY_TOKEN,
    ("GET", "/client/v4/accounts"): ANY_TOKEN,
    ("GET", "/client/v4/memberships"): ANY_TOKEN,
    ("GET", ACCOUNT): ANY_TOKEN,
    **below("/client/v4/user", _TOKENS),
    **below(ACCOUNT, _TOKENS),
    **below(f"{ACCOUNT}/ai", _AI),
    **below(f"{ACCOUNT}/ai/v1", _OPENAI),
    **below("/v1", _OPENAI),
}
"""What each route asks of a token."""


def served(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of every route below `app`."""
    for route in getattr(app, "routes", None) or app._router.routes:
        if isinstance(route, Mount):
            yield from served(route.app, prefix + route.path)
        elif isinstance(route, Route):
            path = re.sub(r":\w+}", "}", prefix + route.path)
            yield from ((method, path) for method in sorted(route.methods or ()) if method != "HEAD")


def make_app(authenticator: Authenticator) -> Starlette:
    return Starlette(routes=routes(make_gate(ScriptedPool(*answer("1"))), tokens=authenticator))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TokenStore]:
    with closing(TokenStore(tmp_path / FILE_NAME)) as store:
        yield store


@pytest.fixture
async def app(store: TokenStore) -> AsyncIterator[Starlette]:
    authenticator = Authenticator(store.path)
    yield make_app(authenticator)
    await authenticator.close()


def client_of(app: Starlette, credential: str | None) -> httpx.AsyncClient:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node", headers=headers)


async def ask(app: Starlette, route: tuple[str, str], credential: str | None) -> tuple[int, int | None, str]:
    """Status, code and message of the answer to a request to `route` of the account `acme`."""
    method, path = route
    async with client_of(app, credential) as client:
        url = re.sub(r"{\w+}", "x", path.replace("{account}", "acme"))
        response = await client.request(method, url)
    body = response.json() if response.headers["content-type"] == "application/json" else {}
    if "internalCode" in body:  # the form that the binding of another runtime knows
        return response.status_code, body["internalCode"], body["message"]
    for error in body.get("errors", []):
        return response.status_code, error["code"], error["message"]
    return response.status_code, None, ""


async def test_every_route_is_here(app: Starlette) -> None:
    assert sorted(served(app)) == sorted(ROUTES)


TUNNEL = ("POST", f"{ACCOUNT}/ai/run/proxy")
"""Its clients know one code for whatever is wrong with a token."""
GUARDED = [route for route, scope in ROUTES.items() if scope != OPEN]


def named(route: tuple[str, str]) -> str:
    return " ".join(route)


@pytest.mark.parametrize("route", GUARDED, ids=named)
async def test_no_valid_token_no_access(
    app: Starlette, store: TokenStore, route: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    revoked, of_revoked = store.create("revoked", "acme", ALL)
    store.revoke(revoked.id)
    expired, of_expired = store.create("expired", "acme", ALL, expires_us=now_us() + 3600 * 10**6)
    monkeypatch.setattr("edge.auth.authenticator.now_us", lambda: expired.expires_us)
    _, right = store.create("right", "acme", ALL)
    last = "0" if right[-1] != "0" else "1"
    for credential in (
        None,
        "",
        "dev",
        right[:-1],
        right[:-1] + last,
        f"edge_{'0' * 16}_{'0' * 64}",
        of_revoked,
        of_expired,
    ):
        expected = (403, 1031) if route == TUNNEL else (401, 10000)
        assert (await ask(app, route, credential))[:2] == expected, credential


@pytest.mark.parametrize("route", GUARDED, ids=named)
async def test_each_route_wants_its_scope_and_no_other(
    app: Starlette, store: TokenStore, route: tuple[str, str]
) -> None:
    scope = ROUTES[route]
    _, all_but_one = store.create("all but one", "acme", ALL - {scope})
    _, only_one = store.create("only one", "acme", frozenset({scope}) & ALL)
    if scope != ANY_TOKEN:
        status, code, message = await ask(app, route, all_but_one)
        assert (status, code) == (403, 1031 if route == TUNNEL else 10000)
        assert f"lacks the scope {scope};" in message
    status, code, _ = await ask(app, route, only_one)
    assert status not in (401, 403)
    assert code not in (10000, 7003)
    assert status < 500 or status == 501


@pytest.mark.parametrize("route", [route for route in GUARDED if "{account}" in route[1]], ids=named)
async def test_no_account_has_access_to_another(app: Starlette, store: TokenStore, route: tuple[str, str]) -> None:
    _, foreign = store.create("foreign", "other", ALL)
    status, code, message = await ask(app, route, foreign)
    assert (status, code) == (404, 7003)
    assert "its own is 'other'" in message


@pytest.mark.parametrize("route", [route for route, scope in ROUTES.items() if scope == OPEN], ids=named)
async def test_what_is_open_to_anybody(app: Starlette, route: tuple[str, str]) -> None:
    assert (await ask(app, route, None))[0] == 200


# -- how tokens come ---------------------------------------------------------------------------------------


async def test_key_and_email_of_old_clients(app: Starlette, store: TokenStore) -> None:
    _, credential = store.create("ci", "acme", ALL)
    url = f"{ACCOUNT}/ai/models/search".replace("{account}", "acme")
    async with client_of(app, None) as client:

        async def status_of(**headers: str) -> int:
            return (await client.get(url, headers={k.replace("_", "-"): v for k, v in headers.items()})).status_code

        assert await status_of(X_Auth_Email="a@b.c", X_Auth_Key=credential) == 200
        assert await status_of(X_Auth_Email="a@b.c", X_Auth_Key=credential[:-1]) == 401
        assert await status_of(X_Auth_Email="a@b.c") == 401
        assert await status_of(Authorization=f"bearer  {credential}") == 200
        for scheme in ("Basic", "", "Token"):
            assert await status_of(Authorization=f"{scheme} {credential}") == 401
        # One that is wrong does not fall back on the other.
        assert await status_of(Authorization="Bearer x", X_Auth_Key=credential) == 401


async def test_v1_is_the_account_of_the_token(app: Starlette, store: TokenStore) -> None:
    _, credential = store.create("ci", "acme", ALL)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with client_of(app, credential) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["message"]["content"] == "1"
        wrong = await client.post("/v1/chat/completions", json={**body, "temperature": "hot"})
        assert wrong.json()["error"]["param"] == "temperature"
        assert (await client.get("/v1/none")).json()["error"]["code"] == "7000"


# -- who am I ----------------------------------------------------------------------------------------------


async def test_what_clients_ask_before_anything_else(app: Starlette, store: TokenStore) -> None:
    token, credential = store.create("ci", "acme", frozenset(), expires_us=now_us() + 3600 * 10**6)
    async with client_of(app, credential) as client:
        for path in ("/client/v4/user/tokens/verify", "/client/v4/accounts/acme/tokens/verify"):
            verified = (await client.get(path)).json()
            assert verified["success"] is True
            assert verified["result"]["id"] == token.id
            assert verified["result"]["status"] == "active"
            assert verified["result"]["expires_on"].endswith("Z")
        assert (await client.get("/client/v4/user")).json()["result"]["email"].endswith("@acme.invalid")
        accounts = (await client.get("/client/v4/accounts?page=1")).json()
        assert [each["id"] for each in accounts["result"]] == ["acme"]
        assert accounts["result_info"]["total_count"] == 1
        # Clients ask for pages until one is empty.
        assert (await client.get("/client/v4/accounts?page=2")).json()["result"] == []
        assert (await client.get("/client/v4/memberships")).json()["result"][0]["account"]["id"] == "acme"
        assert (await client.get("/client/v4/accounts/acme")).json()["result"]["name"] == "acme"


# -- tokens over HTTP --------------------------------------------------------------------------------------


def wish(*scopes: str, **more: object) -> dict[str, object]:
    groups = [{"name": scope} for scope in scopes]
    resources = {"com.cloudflare.api.account.acme": "*"}
    return {
        "name": "made",
        "policies": [{"effect": "allow", "resources": resources, "permission_groups": groups}],
        **more,
    }


@pytest.mark.parametrize("request_line", ["GET /", "POST /", "GET /0123", "DELETE /0123"])
async def test_a_node_without_a_file_of_tokens_says_so(request_line: str) -> None:
    app = Starlette(routes=routes(make_gate(ScriptedPool()), tokens={"fixed": "acme"}))
    method, _, path = request_line.partition(" ")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, headers={"authorization": "Bearer fixed"}) as client:
        url = f"http://node/client/v4/user/tokens{path.rstrip('/')}"
        policies = [{"effect": "allow", "permission_groups": [{"name": AI_RUN}]}]
        response = await client.request(method, url, json={"name": "a", "policies": policies})
    assert response.status_code == 400
    assert "this node has fixed tokens only" in response.json()["errors"][0]["message"]


@pytest.mark.parametrize("place", ["/client/v4/user/tokens", "/client/v4/accounts/acme/tokens"])
async def test_a_token_makes_lists_and_revokes_others(app: Starlette, store: TokenStore, place: str) -> None:
    maker, credential = store.create("maker", "acme", frozenset({TOKENS_EDIT, AI_RUN, AI_READ}))
    async with client_of(app, credential) as client:
        made = (await client.post(place, json=wish("Workers AI Read", expires_on="2999-01-31T00:00:00Z"))).json()
        value, token_id = made["result"].pop("value"), made["result"]["id"]
        assert made["result"]["expires_on"] == "2999-01-31T00:00:00Z"
        assert [g["name"] for g in made["result"]["policies"][0]["permission_groups"]] == [AI_READ, AI_RUN]
        listed = (await client.get(place)).json()["result"]
        assert {each["id"] for each in listed} == {token_id, maker.id}
        assert value not in str(listed)
        assert (await client.get(f"{place}/{token_id}")).json()["result"]["status"] == "active"
        async with client_of(app, value) as other:
            assert (await other.get("/v1/models")).status_code == 200
            assert (await client.delete(f"{place}/{token_id}")).json()["result"] == {"id": token_id}
            assert (await other.get("/v1/models")).status_code == 401
        assert (await client.get(f"{place}/{token_id}")).json()["result"]["status"] == "disabled"
        assert (await client.get(f"{place}/permission_groups")).json()["result"][0]["id"] == AI_RUN
    revoked, created, _ = store.log(limit=9)
    assert (revoked.event, revoked.token_id, revoked.actor) == ("revoked", token_id, f"token:{maker.id}")
    assert (created.event, created.token_id, created.actor) == ("created", token_id, f"token:{maker.id}")


async def test_no_token_makes_one_that_may_do_more_or_for_others(app: Starlette, store: TokenStore) -> None:
    _, credential = store.create("maker", "acme", frozenset({TOKENS_EDIT, AI_READ}))
    foreign, _ = store.create("foreign", "other", ALL)
    place = "/client/v4/user/tokens"
    async with client_of(app, credential) as client:
        for scope in ("all", AI_EDIT, AI_RUN):
            assert (await client.post(place, json=wish(scope))).status_code == 403
        assert (await client.post(place, json=wish(AI_READ))).status_code == 200
        assert {token.account for token in store.tokens()} == {"acme", "other"}
        assert foreign.id not in (await client.get(place)).text
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"{place}/{foreign.id}")).status_code == 404
    assert store.tokens("other")[0].revoked_us is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "the body must be a JSON object"),
        ({}, "$.name is missing; $.policies is missing"),
        ({"name": "a", "policies": []}, "$.policies is an empty list"),
        ({"name": "a", "policies": [1]}, "$.policies[0] is 1, must be an object"),
        ({"name": "a", "policies": [{"permission_groups": [{}]}]}, "$.policies[0].permission_groups[0] needs an id"),
        (wish("ai:fly"), "there is no scope 'ai:fly'"),
        (wish(AI_READ, expires_on="soon"), "ISO 8601"),
        (wish(AI_READ, expires_on=5), "$.expires_on is no time"),
        (wish(AI_READ, expires_on="2001-01-01"), "would have expired"),
        (
            wish(AI_READ, condition={"request_ip": {"in": ["10.0.0.0/8"]}}),
            "$.condition is an object, which is not supported",
        ),
        (
            {"name": "a", "policies": [{"resources": {"com.cloudflare.api.account.b": "*"}, "permission_groups": []}]},
            "policies[0].resources must be com.cloudflare.api.account.acme",
        ),
        (wish(AI_READ, name="x" * 121), "must be a string of 1 to 120 characters"),
    ],
)
async def test_what_is_wrong_with_a_wish_is_named(app: Starlette, store: TokenStore, body: object, reason: str) -> None:
    _, credential = store.create("maker", "acme", ALL)
    async with client_of(app, credential) as client:
        response = await client.post("/client/v4/user/tokens", json=body)
    assert response.status_code == 400
    assert reason in response.json()["errors"][0]["message"]
    assert len(store.tokens()) == 1
