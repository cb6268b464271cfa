"""The pages that a browser, or curl, gets when a worker failed. They load nothing from anywhere."""

from __future__ import annotations

from html import escape

from edge.errors import EdgeError

_STYLE = """
:root { color-scheme: light dark; --edge: #d6336c; --soft: #8883; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; color: var(--edge); overflow-wrap: anywhere; }
p { margin: .25rem 0 1.25rem; opacity: .8; }
pre { background: var(--soft); border-radius: .5rem; padding: 1rem; overflow-x: auto; font-size: .85rem; }
"""


def dev_error(error: EdgeError, request: str, *, html: bool) -> tuple[str, bytes]:
    """Content type and body for the developer: everything that is known."""
    traceback = getattr(error, "traceback", "")
    if not html:
        return "text/plain; charset=utf-8", f"{headline(error)}\n\n{traceback}".rstrip().encode() + b"\n"
    details = f"<pre>{escape(traceback)}</pre>" if traceback else ""
    return _html(f"{error.name}", headline(error), f"{request} failed. Error {error.code}, {error.name}.", details)


def headline(error: EdgeError) -> str:
    """The error in a line; that of a handler begins with the type of its exception, as in a traceback."""
    kind = getattr(error, "type", "")
    return f"{kind}: {error.message}" if kind else error.message


def public_error(error: EdgeError, error_id: str, *, html: bool) -> tuple[str, bytes]:
    """Content type and body for a visitor: that it failed, and an id the operator can look up."""
    message = f"Error {error.code}: the worker could not answer this request."
    if not html:
        return "text/plain; charset=utf-8", f"{message}\nid: {error_id}\n".encode()
    return _html(f"Error {error.code}", message, f"id {error_id}", "")


def _html(title: str, headline: str, note: str, details: str) -> tuple[str, bytes]:
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(headline)}</h1><p>{escape(note)}</p>{details}</html>\n"
    )
    return "text/html; charset=utf-8", page.encode()
