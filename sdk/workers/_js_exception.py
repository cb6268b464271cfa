"""`JsException`, the base of the errors that in Cloudflare's runtime come from JavaScript: of bindings and of models.

A handler catches it as `pyodide.ffi.JsException`; an exception class is what `except` needs a real base class for.
"""

from __future__ import annotations


class JsException(Exception):
    """An error with JavaScript's attributes.

    Attributes:
        name: the error's JavaScript class name.
        message: its text.
    """

    def __init__(self, message: str = "", *, name: str = "Error") -> None:
        super().__init__(message)
        self.name = name
        self.message = message

    @property
    def stack(self) -> str:
        """JavaScript's text of an error; there is no stack of its own."""
        return f"{self.name}: {self.message}"
