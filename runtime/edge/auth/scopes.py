"""What a token may do: the scopes, and Cloudflare's names of permissions, which stand for some of them."""

from __future__ import annotations

from collections.abc import Iterable

from edge.errors import UsageError

AI_RUN = "ai:run"
AI_READ = "ai:read"
AI_EDIT = "ai:edit"
USAGE_READ = "usage:read"
TOKENS_EDIT = "tokens:edit"
WORKERS_READ = "workers:read"
WORKERS_EDIT = "workers:edit"

SCOPES = {
    AI_RUN: "Run models, batches included.",
    AI_READ: "See models, and the account's adapters, files and batches.",
    AI_EDIT: "Add and remove adapters.",
    USAGE_READ: "See what calls used and cost.",
    TOKENS_EDIT: "Create, list and revoke tokens that may do no more than this one.",
    WORKERS_READ: "See workers and their logs.",
    WORKERS_EDIT: "Deploy and remove workers.",
}
"""Each scope and what it is for."""

DEFAULT = frozenset({AI_RUN, AI_READ})
"""What a client of models needs."""

ALL = frozenset(SCOPES)

_ALIASES = {
    "all": ALL,
    "workers ai read": DEFAULT,
    "workers ai write": DEFAULT | {AI_EDIT},
    "workers ai edit": DEFAULT | {AI_EDIT},
    "billing read": {USAGE_READ},
    "account analytics read": {USAGE_READ},
    "api tokens write": {TOKENS_EDIT},
    "api tokens edit": {TOKENS_EDIT},
    "account api tokens write": {TOKENS_EDIT},
    "workers scripts read": {WORKERS_READ},
    "workers scripts write": {WORKERS_READ, WORKERS_EDIT},
    "workers scripts edit": {WORKERS_READ, WORKERS_EDIT},
}
_IMPLIED = {AI_RUN: {AI_READ}, AI_EDIT: {AI_READ}, WORKERS_EDIT: {WORKERS_READ}}
"""Whoever may change a thing may see it."""


def parse_scopes(names: Iterable[str]) -> frozenset[str]:
    """The scopes that `names` stand for: scopes, "all", or Cloudflare's names; with those that they imply.

    Raises:
        UsageError: a name is none of these.
    """
    found: set[str] = set()
    for name in names:
        alias = " ".join(name.lower().replace("-", " ").split())
        if name not in SCOPES and alias not in _ALIASES:
            raise UsageError(
                f"there is no scope {name[:60]!r}; there are {', '.join(SCOPES)}, all, and Cloudflare's names such as "
                "'Workers AI Read'"
            )
        found |= {name} if name in SCOPES else _ALIASES[alias]
    return frozenset(found.union(*(_IMPLIED.get(scope, ()) for scope in found)))
