"""The tokens of a node and the audit log, in one SQLite file that the node and `edge tokens` share.

A token is `edge_ID_SECRET`: the id finds its row, and the secret is 256 random bits, of which only a hash is kept. The
hash is a plain SHA-256 and no slow one: those make guesses of passwords expensive, and nobody guesses 256 bits.

This protects a token from those who read the file, not from those who write it. The log only grows: triggers refuse
UPDATE and DELETE, but not `rm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from edge import sqlite
from edge.billing.times import iso_time, now_us
from edge.errors import InvalidInput, TokenStoreUnavailable, UnknownToken

FILE_NAME = "tokens.sqlite"
MAX_TOKENS = 1000
"""Of one account, those that are revoked or expired not counted."""
MAX_NAME_CHARS = 120

_FORM = re.compile(r"edge_([0-9a-f]{16})_([0-9a-f]{64})")
_ACCOUNT = re.compile(r"[A-Za-z0-9_-]{1,64}")
_COLUMNS = ("id", "name", "account", "scopes", "created_us", "expires_us", "last_used_us", "revoked_us")
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM tokens"
_IS_ACTIVE = "revoked_us IS NULL AND (expires_us IS NULL OR expires_us > :now)"


class Token(msgspec.Struct, frozen=True):
    """What is known of a token. Times are microseconds since the epoch; None: never."""

    id: str
    name: str
    account: str
    scopes: frozenset[str]
    created_us: int
    expires_us: int | None = None
    last_used_us: int | None = None
    """Within a minute of the truth, since not every use is written."""
    revoked_us: int | None = None

    def status(self, at_us: int) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_us is not None:
            return "revoked"
        return "expired" if self.expires_us is not None and self.expires_us <= at_us else "active"


class AuditEntry(msgspec.Struct, frozen=True):
    """A line of the audit log."""

    event: str
    """`created`, `revoked`, `refused` (whoever sent it had no valid token) or `forbidden` (a scope was missing)."""
    account: str = ""
    token_id: str = ""
    actor: str = ""
    """Who did it: `cli:USER`, `token:ID`, or nothing where that is not known."""
    address: str = ""
    """The client's IP address, or nothing on this machine."""
    detail: str = ""
    count: int = 1
    """How often the same thing happened since the entry before."""
    at_us: int = 0
    """When it was written."""


def id_of(credential: str) -> str | None:
    """The id in a token of ours, whether there is such a token or not; None: it has another form."""
    match = _FORM.fullmatch(credential)
    return match[1] if match else None


def digest_of(credential: str) -> bytes:
    """The hash under which a token is kept."""
    return hashlib.sha256(credential.encode()).digest()


class TokenStore:
    """An open file of tokens. Any thread may use it, one at a time; any number of processes may have it open."""

    def __init__(self, path: Path) -> None:
        """Open or create the file `path`.

        Raises:
            TokenStoreUnavailable: it cannot be opened, or is of a newer version than this program.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sqlite.create_private(path)
            self._database = sqlite.connect(path)
            try:
                sqlite.migrate(self._database, _MIGRATIONS, "the token store")
            except BaseException:
                self._database.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise TokenStoreUnavailable(f"the tokens in {path} cannot be opened: {error}") from error
        self._identity = sqlite.identity_of(path)

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._database.close()

    @property
    def is_current(self) -> bool:
        """Whether this is still the file at its path, of which SQLite would notice nothing."""
        return sqlite.identity_of(self.path) == self._identity

    def data_version(self) -> int:
        """A number that is another one once somebody else has changed the file."""
        with self._reading():
            return int(self._database.execute("PRAGMA data_version").fetchone()[0])

    def find(self, token_id: str) -> tuple[Token, bytes] | None:
        """The token of that id, and the hash of the whole token."""
        query = f"SELECT {', '.join(_COLUMNS)}, digest FROM tokens WHERE id = ?"
        with self._reading():
            row = self._database.execute(query, (token_id,)).fetchone()
        return (_token(row[:-1]), row[-1]) if row is not None else None

    def tokens(self, account: str | None = None) -> list[Token]:
        """The tokens (of `account`), newest first, those that are revoked or expired included."""
        query = f"{_SELECT} WHERE :account IS NULL OR account = :account ORDER BY created_us DESC, id"
        with self._reading():
            return [_token(row) for row in self._database.execute(query, {"account": account})]

    def num_active(self) -> dict[str, int]:
        """How many tokens of each account can be used now; accounts without any are left out."""
        query = f"SELECT account, count(*) FROM tokens WHERE {_IS_ACTIVE} GROUP BY account ORDER BY account"
        with self._reading():
            return dict(self._database.execute(query, {"now": now_us()}).fetchall())

    def create(
        self,
        name: str,
        account: str,
        scopes: frozenset[str],
        *,
        expires_us: int | None = None,
        actor: str = "",
        address: str = "",
    ) -> tuple[Token, str]:
        """A new token and what its holder sends, which nothing gives again.

        Raises:
            InvalidInput: a name is too long or not of its form, the time is over, or the account has `MAX_TOKENS`.
        """
        now = now_us()
        _check(name, account, expires_us, now)
        token = Token(secrets.token_hex(8), name, account, scopes, now, expires_us)
        credential = f"edge_{token.id}_{secrets.token_hex(32)}"
        row = (*_row(token), digest_of(credential))
        until = "" if expires_us is None else f", until {iso_time(expires_us)}"
        entry = AuditEntry("created", account, token.id, actor, address, f"{name}: {' '.join(sorted(scopes))}{until}")
        count = f"SELECT count(*) FROM tokens WHERE account = :account AND {_IS_ACTIVE}"
        with self._writing():
            num = self._database.execute(count, {"account": account, "now": now}).fetchone()[0]
            if num >= MAX_TOKENS:
                raise InvalidInput(f"the account {account} has {num} tokens, the most there may be: revoke some")
            self._database.execute(
                f"INSERT INTO tokens ({', '.join(_COLUMNS)}, digest) VALUES ({', '.join('?' * len(row))})", row
            )
            self._log([entry])
        return token, credential

    def revoke(self, token_id: str, *, account: str | None = None, actor: str = "", address: str = "") -> Token:
        """The token of that id (and `account`), which cannot be used any more; doing it again changes nothing.

        Raises:
            UnknownToken: there is none.
        """
        with self._writing():
            row = self._database.execute(f"{_SELECT} WHERE id = ?", (token_id,)).fetchone()
            token = _token(row) if row is not None else None
            if token is None or account not in (None, token.account):
                raise UnknownToken(f"there is no token of the id {token_id[:40]!r}")
            if token.revoked_us is None:
                now = now_us()
                self._database.execute("UPDATE tokens SET revoked_us = ? WHERE id = ?", (now, token_id))
                self._log([AuditEntry("revoked", token.account, token_id, actor, address, token.name)])
                token = msgspec.structs.replace(token, revoked_us=now)
        return token

    def note(self, last_used_us: Mapping[str, int], entries: Iterable[AuditEntry]) -> None:
        """Write when tokens (by id) were last used, and what is to be in the log."""
        with self._writing():
            self._database.executemany(
                "UPDATE tokens SET last_used_us = ? WHERE id = ?", [(us, each) for each, us in last_used_us.items()]
            )
            self._log(entries)

    def log(self, *, limit: int, account: str | None = None) -> list[AuditEntry]:
        """The last `limit` entries (of `account`), newest first."""
        columns = AuditEntry.__struct_fields__
        query = (
            f"SELECT {', '.join(columns)} FROM audit_log WHERE :account IS NULL OR account = :account "
            "ORDER BY id DESC LIMIT :limit"
        )
        with self._reading():
            rows = self._database.execute(query, {"account": account, "limit": limit}).fetchall()
        return [AuditEntry(**dict(zip(columns, row, strict=True))) for row in rows]

    def _log(self, entries: Iterable[AuditEntry]) -> None:
        now = now_us()
        columns = AuditEntry.__struct_fields__
        self._database.executemany(
            f"INSERT INTO audit_log ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            [msgspec.structs.astuple(msgspec.structs.replace(entry, at_us=now)) for entry in entries],
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._reading(), sqlite.transaction(self._database):
            yield

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            # Clients read this, too, and where the file is, is not their affair.
            raise TokenStoreUnavailable(f"the node's tokens ({self.path.name}) cannot be used: {error}") from error


def _token(row: tuple[object, ...]) -> Token:
    values = dict(zip(_COLUMNS, row, strict=True))
    return msgspec.convert({**values, "scopes": str(values["scopes"]).split()}, Token)


def _row(token: Token) -> tuple[object, ...]:
    values = {**msgspec.structs.asdict(token), "scopes": " ".join(sorted(token.scopes))}
    return tuple(values[column] for column in _COLUMNS)


def _check(name: str, account: str, expires_us: int | None, now: int) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidInput(f"name must be 1 to {MAX_NAME_CHARS} printable characters", param="name")
    if not _ACCOUNT.fullmatch(account):
        raise InvalidInput(
            f"account {account[:80]!r} must be an id of at most 64 letters, digits, - and _", param="account"
        )
    if expires_us is not None and expires_us <= now:
        raise InvalidInput(f"the token would have expired on {iso_time(expires_us)} already", param="expires_on")


def _m1_tokens(database: sqlite3.Connection) -> None:
    database.execute(
        """
        CREATE TABLE tokens (
            id TEXT PRIMARY KEY NOT NULL,
            name TEXT NOT NULL,
            account TEXT NOT NULL,
            scopes TEXT NOT NULL,
            digest BLOB NOT NULL CHECK (length(digest) = 32),
            created_us INTEGER NOT NULL,
            expires_us INTEGER,
            last_used_us INTEGER,
            revoked_us INTEGER
        ) STRICT
        """
    )
    database.execute("CREATE INDEX tokens_by_account ON tokens (account)")
    database.execute(
        """
        CREATE TABLE audit_log (
            id INTEGER PRIMARY KEY,
            at_us INTEGER NOT NULL,
            event TEXT NOT NULL,
            account TEXT NOT NULL,
            token_id TEXT NOT NULL,
            actor TEXT NOT NULL,
            address TEXT NOT NULL,
            detail TEXT NOT NULL,
            count INTEGER NOT NULL
        ) STRICT
        """
    )
    for verb in ("UPDATE", "DELETE"):
        database.execute(
            f"CREATE TRIGGER audit_log_no_{verb.lower()} BEFORE {verb} ON audit_log "
            "BEGIN SELECT RAISE(ABORT, 'audit_log is append-only'); END"
        )


_MIGRATIONS: tuple[sqlite.Migration, ...] = (_m1_tokens,)
"""Applied once each, in this order; a released one is never edited."""
