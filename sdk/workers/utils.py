"""`patch_env`, `import_from_javascript`, and the conversions between Python's values and those of RPC."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from workers import _rpc, _runtime, entrypoints
from workers.bindings.service import Exports

_MISSING = object()


@contextlib.contextmanager
def patch_env(values: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None, **more: Any) -> Iterator[None]:
    """Give variables and bindings other values within a `with` block, for tests.

    They change in `workers.env`, in the invocation that runs, and in those that begin meanwhile.
    """
    given = {**dict(values or {}), **more}
    current = _runtime.context.get()
    patched = [_runtime.env_patches, vars(current_env())]
    if current is not None and current._env is not None:
        patched.append(vars(current._env))
    saved = [{name: place.get(name, _MISSING) for name in given} for place in patched]
    for place in patched:
        place.update(given)
    try:
        yield
    finally:
        for place, before in zip(patched, saved, strict=True):
            for name, value in before.items():
                if value is _MISSING:
                    place.pop(name, None)
                else:
                    place[name] = value


def current_env() -> entrypoints.Env:
    """`workers.env`: the environment for code outside of any invocation; an empty one outside of a running worker."""
    return _runtime.runtime.env if _runtime.runtime is not None else _outside


def import_from_javascript(name: str) -> Any:
    """What JavaScript code would import from the module `name`; `cloudflare:workers` is what there is.

    Raises:
        ImportError: this runtime, which has no JavaScript, has no such module.
    """
    if name == "cloudflare:workers":
        return SimpleNamespace(
            env=current_env(),
            waitUntil=entrypoints.wait_until,
            withEnv=_with_env,
            exports=Exports(),
            WorkerEntrypoint=entrypoints.WorkerEntrypoint,
            DurableObject=entrypoints.DurableObject,
            WorkflowEntrypoint=entrypoints.WorkflowEntrypoint,
        )
    if name == "cloudflare:sockets":
        raise ImportError("cloudflare:sockets is not supported: handlers have no sockets here; use fetch()", name=name)
    raise ImportError(f"there is no JavaScript here to import {name!r} from; only cloudflare:workers works", name=name)


def python_to_rpc(value: Any) -> Any:
    """`value`, checked to be one that RPC can carry.

    Raises:
        TypeError, ValueError: it cannot.
    """
    _rpc.pack(value)
    return value


def python_from_rpc(value: Any) -> Any:
    """`value` as Python: what RPC gives is Python already here."""
    return value


def _with_env(values: Mapping[str, Any], function: Any) -> Any:
    with patch_env(values):
        return function()


_outside = entrypoints.Env()
