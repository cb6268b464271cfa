"""Who sends a token, for every request of a node: a look-up by id, a comparison in constant time, and a cache.

What it takes depends neither on how many tokens there are nor on how much of a wrong one is right. The node looks ten
times a second whether the file has changed, by whichever process, and forgets what it found before, so that a token
that is revoked ends then. Nothing is written on the way of a request: when a token was last used and what was refused
are collected and written together, later, in a thread.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec

from edge.auth import scopes
from edge.auth.store import AuditEntry, Token, TokenStore, digest_of, id_of
from edge.billing.times import iso_time, now_us
from edge.errors import InvalidInput, MissingScope, NotSupported, Unauthorized

_LOOK_EVERY_S = 0.1
_WRITE_AFTER_S = 1.0
_LAST_USED_EVERY_US = 60 * 10**6
_MAX_CACHED = 10_000
_MAX_PENDING = 1000
"""Different things to be logged; what comes on top of them is counted together."""
_REFUSALS_PER_HOUR = 100
"""Lines in the log. Who sends wrong tokens all the time gets no more of the disk; each line counts its repeats."""
_NOBODY = bytes(32)
"""The hash of no token, which the look-up of an unknown id is compared with."""
_SEND_ONE = (
    "send the header `Authorization: Bearer TOKEN` with a token of this node (`edge tokens create` makes one; "
    "`edge dev` prints its own at start)"
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Grant(msgspec.Struct, frozen=True):
    """What a valid token allows."""

    token_id: str
    """Empty: a fixed one."""
    account: str
    scopes: frozenset[str]
    expires_us: int | None = None


class Authenticator:
    """Knows the tokens in the file `path` (None: there is none) and those in `fixed`, until it is closed.

    Args:
        fixed: tokens to the accounts that they belong to, with every scope. They are for development.
    """

    def __init__(self, path: Path | None = None, *, fixed: Mapping[str, str] | None = None) -> None:
        """Open or create the file.

        Raises:
            TokenStoreUnavailable: it cannot be opened.
        """
        self._fixed = [(token.encode(), account) for token, account in (fixed or {}).items()]
        self._path = path
        self._store = TokenStore(path) if path is not None else None
        self._version = -1
        self._looked_at = 0.0
        self._cache: dict[str, tuple[Token, bytes]] = {}
        self._last_used_us: dict[str, int] = {}
        """As it is written, by id."""
        self._uses: dict[str, int] = {}
        """Not written yet."""
        self._refusals: dict[AuditEntry, int] = {}
        """Not written yet, and how often each happened."""
        self._lines_left = float(_REFUSALS_PER_HOUR)
        self._counted_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def authenticate(self, credential: str, address: str = "") -> Grant:
        """What the token `credential` allows. `address` is the client's, for the log.

        Raises:
            Unauthorized: it is missing, unknown, expired or revoked.
            TokenStoreUnavailable: the tokens cannot be read.
        """
        given = credential.encode()
        # Every fixed token is compared, each in constant time: how long it takes tells nothing about any of them.
        accounts = [account for known, account in self._fixed if hmac.compare_digest(known, given)]
        if accounts:
            return Grant("", accounts[0], scopes.ALL)
        if not credential:
            raise Unauthorized(f"authentication error: {_SEND_ONE}")
        token_id = id_of(credential)
        token, digest = self._find(token_id) if token_id is not None else (None, _NOBODY)
        is_right = hmac.compare_digest(digest, digest_of(credential))
        if token is None or not is_right:
            self._refused(AuditEntry("refused", "", "" if token is None else token.id, "", address, "unknown token"))
            raise Unauthorized(f"authentication error: this is no token of this node; {_SEND_ONE}")
        at_us = now_us()
        if (status := token.status(at_us)) != "active":
            self._refused(AuditEntry("refused", token.account, token.id, "", address, status))
            since = iso_time(token.revoked_us or token.expires_us or 0)
            raise Unauthorized(f"authentication error: the token {token.id} is {status} since {since}: get a new one")
        self._used(token, at_us)
        return Grant(token.id, token.account, token.scopes, token.expires_us)

    def require(self, grant: Grant, scope: str, address: str = "") -> None:
        """Raise MissingScope unless `grant` has `scope`."""
        if scope not in grant.scopes:
            self._refused(AuditEntry("forbidden", grant.account, grant.token_id, "", address, scope))
            raise MissingScope(
                f"the token lacks the scope {scope}; it has {', '.join(sorted(grant.scopes)) or 'none'}. Create one "
                f"with it: edge tokens create NAME --account {grant.account} --scope {scope}"
            )

    def is_ours(self, credential: str) -> bool:
        """Whether `credential` is meant for this node: a fixed one, or of the form of its tokens, valid or not."""
        given = credential.encode()
        return id_of(credential) is not None or True in [hmac.compare_digest(known, given) for known, _ in self._fixed]

    async def tokens_of(self, account: str) -> list[Token]:
        """The tokens of `account` in the file, newest first."""
        return await self._with_store(lambda store: store.tokens(account))

    async def create(
        self, grant: Grant, name: str, wanted: frozenset[str], expires_us: int | None, address: str
    ) -> tuple[Token, str]:
        """A new token of the account of `grant`, and what its holder sends.

        Raises:
            MissingScope: it could do what `grant` cannot.
            InvalidInput: it would end later than that of `grant`, or as `TokenStore.create`.
        """
        for scope in sorted(wanted):
            self.require(grant, scope, address)
        if grant.expires_us is not None:
            expires_us = grant.expires_us if expires_us is None else expires_us
            if expires_us > grant.expires_us:
                raise InvalidInput(
                    f"a token can make none that ends after itself, which is at {iso_time(grant.expires_us)}",
                    param="expires_on",
                )
        actor = f"token:{grant.token_id or 'fixed'}"
        return await self._with_store(
            lambda store: store.create(name, grant.account, wanted, expires_us=expires_us, actor=actor, address=address)
        )

    async def revoke(self, grant: Grant, token_id: str, address: str) -> Token:
        """The token of that id and of the account of `grant`, which cannot be used any more.

        Raises:
            UnknownToken: the account has none of that id.
            MissingScope: it can do what `grant` cannot.
        """
        for token in await self.tokens_of(grant.account):
            if token.id == token_id:
                for scope in sorted(token.scopes):
                    self.require(grant, scope, address)
        actor = f"token:{grant.token_id or 'fixed'}"
        return await self._with_store(
            lambda store: store.revoke(token_id, account=grant.account, actor=actor, address=address)
        )

    async def close(self) -> None:
        """Write what is not written yet, and close the file. Closing again does nothing."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await self._writing
        await self._write(everything=True)
        if self._store is not None:
            self._store.close()
            self._store = self._path = None

    # -- finding -------------------------------------------------------------------------------------------

    def _find(self, token_id: str) -> tuple[Token | None, bytes]:
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._look()
        if self._store is None:
            return None, _NOBODY
        found = self._cache.get(token_id) or self._store.find(token_id)
        if found is None:
            return None, _NOBODY
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[token_id] = found
        return found

    def _look(self) -> None:
        """Forget what was found if the file has changed, or is another one: its tokens went with the one before."""
        if self._store is None or self._path is None:
            return
        if not self._store.is_current:
            _log.error("%s was removed or replaced while it was open; using what is there now", self._path)
            self._store.close()
            self._cache.clear()
            self._store = TokenStore(self._path)
        if (version := self._store.data_version()) != self._version:
            self._cache.clear()
            self._version = version
        self._looked_at = time.monotonic()

    # -- noting --------------------------------------------------------------------------------------------

    def _used(self, token: Token, at_us: int) -> None:
        last_us = max(token.last_used_us or 0, self._last_used_us.get(token.id, 0))
        if at_us - last_us >= _LAST_USED_EVERY_US:
            self._last_used_us[token.id] = self._uses[token.id] = at_us
            self._write_soon()

    def _refused(self, entry: AuditEntry) -> None:
        if entry not in self._refusals and len(self._refusals) >= _MAX_PENDING:
            entry = AuditEntry("refused", detail="others")
        self._refusals[entry] = self._refusals.get(entry, 0) + 1
        self._write_soon()

    def _write_soon(self) -> None:
        if self._path is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_AFTER_S, self._begin_writing)

    def _begin_writing(self) -> None:
        self._writing = asyncio.create_task(self._write())

    async def _write(self, *, everything: bool = False) -> None:
        uses, self._uses = self._uses, {}
        refusals = self._taken(len(self._refusals) if everything else self._regained_lines())
        entries = [msgspec.structs.replace(each, count=count) for each, count in refusals.items()]
        try:
            if self._path is not None and (uses or entries):
                await self._with_store(lambda store: store.note(uses, entries))
        except Exception as error:  # whatever it is, it must not end all writing
            _log.error(
                "%d entries of the audit log could not be written, and wait for the next: %s", len(entries), error
            )
            self._put_back(uses, refusals)
            return
        finally:
            self._timer = None
        if self._uses or (self._refusals and self._lines_left >= 1):
            self._write_soon()

    def _regained_lines(self) -> int:
        """How many lines refusals may have in the log now."""
        now = time.monotonic()
        regained = (now - self._counted_at) * _REFUSALS_PER_HOUR / 3600
        self._lines_left = min(_REFUSALS_PER_HOUR, self._lines_left + regained)
        self._counted_at = now
        return int(self._lines_left)

    def _taken(self, limit: int) -> dict[AuditEntry, int]:
        """The first `limit` refusals; the others wait, and are counted on, until the next refusal or the end."""
        taken = dict(itertools.islice(self._refusals.items(), limit))
        for entry in taken:
            del self._refusals[entry]
        self._lines_left -= len(taken)
        return taken

    def _put_back(self, uses: dict[str, int], refusals: dict[AuditEntry, int]) -> None:
        """Have what could not be written written with the next use or refusal."""
        self._uses = uses | self._uses
        for entry, count in refusals.items():
            self._refusals[entry] = self._refusals.get(entry, 0) + count
        self._lines_left += len(refusals)

    async def _with_store(self, use: Callable[[TokenStore], T]) -> T:
        """What `use` gives, in a thread and with a connection of its own: the node's one reads meanwhile.

        Raises:
            NotSupported: there is no file.
            TokenStoreUnavailable: it cannot be used.
        """
        path = self._path
        if path is None:
            raise NotSupported("this node has fixed tokens only")

        def in_thread() -> T:
            with closing(TokenStore(path)) as store:
                return use(store)

        try:
            return await asyncio.to_thread(in_thread)
        finally:
            self._looked_at = 0.0  # what this node changes itself it knows at once
