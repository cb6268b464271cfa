"""JavaScript's built-in objects as handlers use them through Pyodide, over Python's own values.

There is no JavaScript here: `Object.fromEntries`, `to_js` and the rest give the types of `workers.values`, so that what
was converted for JavaScript's sake is still a dict, a list or bytes for everybody else.
"""

from __future__ import annotations

import copy
import json
import math
import random
from abc import ABC
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from workers._js_exception import JsException
from workers.streams import ReadableStream
from workers.values import JsBytes, JsClass, JsDict, JsList, to_py, wrap


class Constructor:
    """A JavaScript class or namespace: `X.new(…)`, `X(…)`, `X.method(…)` and `isinstance(value, X)`."""

    def __init__(
        self,
        name: str,
        new: Callable[..., Any] | None = None,
        *,
        call: Callable[..., Any] | None = None,
        kind: Any = (),
        **members: Any,
    ) -> None:
        self.name = self.__name__ = name
        self._new = new
        self._call = call or new
        self._kind = kind
        self.__dict__.update(members)

    def new(self, *args: Any, **options: Any) -> Any:
        """What `new X(…)` is in JavaScript. Named arguments are the fields of the last one, an options object."""
        if self._new is None:
            raise TypeError(f"js.{self.name} is not a constructor")
        return self._new(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._call is None:
            raise TypeError(f"js.{self.name} is not a function")
        return self._call(*args, **options)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"js.{self.name}.{name} does not exist in this runtime", name=name, obj=self)

    def __repr__(self) -> str:
        return f"js.{self.name}"


class JsProxy(ABC):  # noqa: B024 - others are registered with it
    """What `isinstance(value, JsProxy)` asks: whether `value` came from JavaScript, and so has `to_py()`."""


class JsMap(JsDict):
    """A dict with the methods of JavaScript's `Map`."""

    constructor = JsClass("Map")

    def set(self, key: Any, value: Any) -> JsMap:
        """Set a key; gives the map."""
        self[key] = value
        return self

    def has(self, key: Any) -> bool:
        """Whether there is such a key."""
        return key in self

    def delete(self, key: Any) -> bool:
        """Remove a key; whether there was one."""
        return self.pop(key, self) is not self

    @property
    def size(self) -> int:
        """How many keys there are."""
        return len(self)

    entries = dict.items


class JsSet(set[Any]):
    """A set with the methods of JavaScript's `Set`."""

    constructor = JsClass("Set")

    def has(self, value: Any) -> bool:
        """Whether the value is in it."""
        return value in self

    def delete(self, value: Any) -> bool:
        """Remove a value; whether it was there."""
        was_there = value in self
        self.discard(value)
        return was_there

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self)

    def to_py(self, **_options: Any) -> set[Any]:
        """This as a plain set."""
        return {to_py(value) for value in self}


for _kind in (JsDict, JsList, JsBytes, JsSet, ReadableStream):
    JsProxy.register(_kind)


class JsDate:
    """A point in time, in ms since 1970.

    Args:
        value: ms, text of ISO 8601, another date, or nothing for now; with `more`, year, month (from 0),
            day, …, in UTC.
    """

    constructor = JsClass("Date")

    def __init__(self, value: Any = None, *more: int) -> None:
        if more:
            self._at: datetime = _from_fields(value, *more)
        elif value is None:
            self._at = datetime.now(UTC)
        elif isinstance(value, JsDate):
            self._at = value._at
        elif isinstance(value, datetime):
            self._at = value.astimezone(UTC)
        elif isinstance(value, str):
            self._at = _from_text(value)
        else:
            self._at = datetime.fromtimestamp(value / 1000, UTC)

    def getTime(self) -> int:
        """Ms since 1970."""
        return _ms(self._at)

    valueOf = getTime

    def toISOString(self) -> str:
        """For example `2026-01-02T03:04:05.006Z`."""
        return self._at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    toJSON = toString = __str__ = toISOString

    def to_py(self, **_options: Any) -> datetime:
        """This as a datetime in UTC."""
        return self._at

    def __getattr__(self, name: str) -> Any:
        field = _DATE_FIELDS.get(name.replace("getUTC", "get", 1))
        if field is None:
            raise AttributeError(f"js.Date has no {name} in this runtime", name=name, obj=self)
        return lambda: field(self._at)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsDate) and self._at == other._at

    def __hash__(self) -> int:
        return hash(self._at)

    def __repr__(self) -> str:
        return f"Date({self.toISOString()})"


_DATE_FIELDS: dict[str, Callable[[datetime], int]] = {
    "getFullYear": lambda at: at.year,
    "getMonth": lambda at: at.month - 1,
    "getDate": lambda at: at.day,
    "getDay": lambda at: (at.weekday() + 1) % 7,
    "getHours": lambda at: at.hour,
    "getMinutes": lambda at: at.minute,
    "getSeconds": lambda at: at.second,
    "getMilliseconds": lambda at: at.microsecond // 1000,
    "getTimezoneOffset": lambda at: 0,
}


def to_js(
    value: Any,
    *,
    dict_converter: Callable[[Iterable[Any]], Any] | None = None,
    default_converter: Callable[[Any, Any, Any], Any] | None = None,
    **_options: Any,
) -> Any:
    """`value` as Pyodide would hand it to JavaScript: a dict becomes a `Map`, or what `dict_converter` makes of its
    [key, value] pairs; bytes become a `Uint8Array`. `depth` and the options about proxies have no effect.
    """
    from workers._js.buffers import Uint8Array

    def convert(item: Any) -> Any:
        if item is None or isinstance(item, str | int | float | JsProxy):
            return item
        if isinstance(item, dict):
            pairs = JsList([JsList([key, convert(each)]) for key, each in item.items()])
            return JsMap(pairs) if dict_converter is None else dict_converter(pairs)
        if isinstance(item, list | tuple):
            return JsList([convert(each) for each in item])
        if isinstance(item, set | frozenset):
            return JsSet(convert(each) for each in item)
        if isinstance(item, bytes | bytearray | memoryview):
            return Uint8Array(item)
        return item if default_converter is None else default_converter(item, convert, lambda *_: None)

    return convert(value)


class CallableProxy:
    """What `create_proxy` gives: the object itself, with `destroy()`."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._target(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def destroy(self) -> None:
        """Nothing is borrowed from JavaScript, so that nothing has to be given back."""

    def unwrap(self) -> Any:
        """The object."""
        return self._target


def from_entries(entries: Any) -> JsDict:
    """`Object.fromEntries`: a dict of (key, value) pairs, or of what has `items()`."""
    pairs = entries.items() if callable(getattr(entries, "items", None)) else entries
    return JsDict({key: wrap(value) for key, value in pairs})


def stringify(value: Any, replacer: Any = None, space: int | str | None = None) -> str:
    """`JSON.stringify`: compact unless `space` says otherwise. Raises TypeError for what JSON has no form for."""
    keys = set(replacer) if isinstance(replacer, list | tuple) else None
    if keys is not None and isinstance(value, dict):
        value = {key: item for key, item in value.items() if key in keys}
    separators = (",", ":") if not space else (",", ": ")
    return json.dumps(value, separators=separators, indent=space or None, ensure_ascii=False, default=_as_json)


def _as_json(value: Any) -> Any:
    if isinstance(value, JsDate):
        return value.toISOString()
    if callable(getattr(value, "to_py", None)):
        plain = value.to_py()
        return list(plain) if isinstance(plain, memoryview | set) else plain
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _parse(text: str, reviver: Any = None) -> Any:
    try:
        return wrap(json.loads(text))
    except ValueError as error:
        raise JsException(str(error), name="SyntaxError") from error


def _assign(target: Any, *sources: Any) -> Any:
    for source in sources:
        target.update(source or {})
    return target


def _ms(at: datetime) -> int:
    return math.floor(at.timestamp() * 1000)


def _from_text(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise JsException(f"Invalid Date: {text!r}", name="RangeError") from error
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def _from_fields(year: int, month: int, day: int = 1, *time: int) -> datetime:
    hour, minute, second, ms = [*time, 0, 0, 0, 0][:4]
    return datetime(year, month + 1, day, hour, minute, second, ms * 1000, UTC)


def _number(value: Any = 0) -> float:
    """`Number(x)`."""
    if isinstance(value, str):
        text = value.strip()
        try:
            return int(text or "0", 0)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            return math.nan
    if value is None:
        return 0
    return value.getTime() if isinstance(value, JsDate) else float(value) if not isinstance(value, int) else value


def _text(value: Any = "") -> str:
    """`String(x)`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _round(value: float) -> int:
    return math.floor(value + 0.5)  # half up, as JavaScript does


def _error_class(name: str) -> Constructor:
    return Constructor(name, lambda message="", options=None: JsException(_text(message), name=name), kind=JsException)


Object = Constructor(
    "Object",
    lambda value=None, **fields: JsDict(value or fields),
    kind=dict,
    fromEntries=from_entries,
    keys=lambda value: JsList(map(_text, value)),
    values=lambda value: JsList(value.values()),
    entries=lambda value: JsList([JsList([_text(key), item]) for key, item in value.items()]),
    assign=_assign,
    freeze=lambda value: value,
)
Array = Constructor(
    "Array",
    lambda *items: JsList([None] * items[0] if len(items) == 1 and isinstance(items[0], int) else items),
    kind=list,
    isArray=lambda value: isinstance(value, list),
    of=lambda *items: JsList(items),
    **{"from": lambda items, each=None: JsList(map(each, items) if each else items)},
)
# `from` is a keyword, and Pyodide lets one write `from_`.
vars(Array)["from_"] = vars(Array)["from"]
Map = Constructor("Map", lambda entries=None: JsMap(entries or {}), kind=JsMap)
Set = Constructor("Set", lambda values=(): JsSet(values), kind=JsSet)
JSON = Constructor("JSON", parse=_parse, stringify=stringify)
Date = Constructor(
    "Date",
    JsDate,
    call=lambda *_: JsDate().toISOString(),
    kind=JsDate,
    now=lambda: _ms(datetime.now(UTC)),
    parse=lambda text: JsDate(text).getTime(),
    UTC=lambda *fields: _ms(_from_fields(*fields)),
)
Math = Constructor(
    "Math",
    abs=abs,
    acos=math.acos,
    asin=math.asin,
    atan=math.atan,
    atan2=math.atan2,
    ceil=math.ceil,
    cos=math.cos,
    exp=math.exp,
    floor=math.floor,
    hypot=math.hypot,
    log=math.log,
    log10=math.log10,
    log2=math.log2,
    max=lambda *values: max(values, default=-math.inf),
    min=lambda *values: min(values, default=math.inf),
    pow=pow,
    random=random.random,
    round=_round,
    sign=lambda value: (value > 0) - (value < 0),
    sin=math.sin,
    sqrt=math.sqrt,
    tan=math.tan,
    trunc=math.trunc,
    E=math.e,
    PI=math.pi,
)
Number = Constructor(
    "Number",
    _number,
    kind=(int, float),
    isInteger=lambda value: isinstance(value, int) or (isinstance(value, float) and value.is_integer()),
    isFinite=lambda value: isinstance(value, int | float) and math.isfinite(value),
    isNaN=lambda value: isinstance(value, float) and math.isnan(value),
    parseFloat=float,
    parseInt=int,
    MAX_SAFE_INTEGER=2**53 - 1,
    MIN_SAFE_INTEGER=1 - 2**53,
)
String = Constructor("String", _text, kind=str, fromCharCode=lambda *codes: "".join(map(chr, codes)))
Boolean = Constructor("Boolean", bool, kind=bool)
BigInt = Constructor("BigInt", call=int, kind=int)
Error = _error_class("Error")
TypeError_ = _error_class("TypeError")
RangeError = _error_class("RangeError")
SyntaxError_ = _error_class("SyntaxError")


def structured_clone(value: Any, _options: Any = None) -> Any:
    """A copy of `value` at every depth."""
    return wrap(copy.deepcopy(value))
