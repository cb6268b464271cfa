"""`env.NAME` of a D1 database: prepared statements, and their results in the documented shapes."""

from __future__ import annotations

from typing import Any

from workers.bindings._calls import BindingCalls, BindingError
from workers.bindings._options import merged
from workers.values import JsDict, JsList, buffer_bytes


class D1Database:
    """An SQLite database. A change is on the node's disk when the call returns.

    Raises BindingError whose text begins with `D1_ERROR` if a statement fails, TypeError with `D1_TYPE_ERROR` for
    values that cannot be bound.
    """

    def __init__(self, name: str, props: dict[str, Any], calls: BindingCalls) -> None:
        self._name = name
        self._calls = calls

    def prepare(self, query: str) -> D1PreparedStatement:
        """A statement with `?` or `?1` for the values that `bind` gives."""
        return D1PreparedStatement(self._calls, query)

    async def batch(self, statements: Any) -> JsList:
        """Run statements in order, in one transaction: all of them or none. A list with the result of each."""
        return await _batch(self._calls, statements)

    async def exec(self, query: str) -> JsDict:
        """Run the statements of a text up to the first that fails: `count` and `duration` (ms)."""
        return JsDict(await self._calls.call("exec", _sql(query)))

    def withSession(self, constraint: str | None = None) -> D1DatabaseSession:
        """The same database, with `getBookmark()`. There are no replicas: what was written can be read everywhere."""
        return D1DatabaseSession(self._calls, constraint)

    with_session = withSession

    async def dump(self) -> None:
        """Not supported: the database is a file in the state directory of the node."""
        raise NotImplementedError(
            "dump() is not supported; the file database.sqlite in the state directory is the dump"
        )

    def __repr__(self) -> str:
        return f"D1Database({self._name!r})"


class D1DatabaseSession:
    """Queries that follow each other."""

    def __init__(self, calls: BindingCalls, constraint: str | None) -> None:
        is_bookmark = constraint not in (None, "first-primary", "first-unconstrained")
        self._calls = calls
        self._bookmark = constraint if is_bookmark else None

    def prepare(self, query: str) -> D1PreparedStatement:
        """As `D1Database.prepare`."""
        return D1PreparedStatement(self._calls, query, self)

    async def batch(self, statements: Any) -> JsList:
        """As `D1Database.batch`."""
        return await _batch(self._calls, statements, self)

    def getBookmark(self) -> str | None:
        """What a later session can begin from; None before the first query."""
        return self._bookmark

    get_bookmark = getBookmark


class D1PreparedStatement:
    """SQL and the values that are bound to it. It never changes: `bind` gives another one."""

    def __init__(
        self, calls: BindingCalls, query: str, session: D1DatabaseSession | None = None, values: tuple[Any, ...] = ()
    ) -> None:
        self._calls = calls
        self._query = _sql(query)
        self._session = session
        self._values = values

    def bind(self, *values: Any) -> D1PreparedStatement:
        """This statement with `values`: None, bool, numbers, str, and buffers or lists of ints for a BLOB."""
        bound = tuple(_bindable(value, number) for number, value in enumerate(values, 1))
        return D1PreparedStatement(self._calls, self._query, self._session, bound)

    async def run(self) -> JsDict:
        """Run it: `results` (a list of rows by column), `success` and `meta`."""
        (answer,) = await _query(self._calls, [self], self._session)
        return _result(answer)

    async def all(self) -> JsDict:
        """The same as `run`."""
        return await self.run()

    async def first(self, column: str | None = None) -> Any:
        """The first row, or its value in `column`; None if there is no row.

        Raises:
            BindingError: the rows have no such column.
        """
        results = (await self.run())["results"]
        if not results:
            return None
        if column is None:
            return results[0]
        if column not in results[0]:
            raise BindingError(f"D1_COLUMN_NOTFOUND: Column not found ({column})", status=400)
        return results[0][column]

    async def raw(self, options: Any = None, **more_options: Any) -> JsList:
        """The rows as lists. With the option `columnNames` the first of them has the names."""
        wants_names = merged(options, more_options, "raw()").get("columnNames", False)
        (answer,) = await _query(self._calls, [self], self._session)
        rows = [JsList(map(_column_value, row)) for row in answer["rows"]]
        return JsList([JsList(answer["columns"]), *rows] if wants_names else rows)

    def __repr__(self) -> str:
        return f"D1PreparedStatement({self._query!r}, {self._values!r})"


async def _batch(calls: BindingCalls, statements: Any, session: D1DatabaseSession | None = None) -> JsList:
    statements = list(statements)
    for statement in statements:
        if not isinstance(statement, D1PreparedStatement):
            raise TypeError(f"batch() needs a list of prepared statements, not of {type(statement).__name__}")
    return JsList([_result(answer) for answer in await _query(calls, statements, session)] if statements else [])


async def _query(
    calls: BindingCalls, statements: list[D1PreparedStatement], session: D1DatabaseSession | None
) -> list[dict[str, Any]]:
    answer = await calls.call("query", [[statement._query, list(statement._values)] for statement in statements])
    if session is not None:
        session._bookmark = answer["bookmark"]
    results: list[dict[str, Any]] = answer["results"]
    return results


def _result(answer: dict[str, Any]) -> JsDict:
    columns = answer["columns"]
    rows = [JsDict(zip(columns, map(_column_value, row), strict=True)) for row in answer["rows"]]
    return JsDict(success=True, meta=JsDict(answer["meta"]), results=JsList(rows))


def _column_value(value: Any) -> Any:
    return JsList(value) if isinstance(value, bytes) else value  # a BLOB is documented to be a list of numbers


def _bindable(value: Any, number: int) -> Any:
    """`value` as one of the types that SQLite knows."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise TypeError(f"D1_TYPE_ERROR: value number {number}, {value}, is beyond the integers of 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if (data := buffer_bytes(value)) is not None:
        return data
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 256 for item in value):
        return bytes(value)
    raise TypeError(
        f"D1_TYPE_ERROR: Type '{type(value).__name__}' not supported for value {value!r:.100}, which is number {number}"
    )


def _sql(query: Any) -> str:
    if not isinstance(query, str):
        raise TypeError(f"D1_TYPE_ERROR: SQL must be a str, not {type(query).__name__}")
    return query
