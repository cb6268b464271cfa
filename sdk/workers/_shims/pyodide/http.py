"""`pyodide.http`: `pyfetch` and what it gives."""

from workers._js.http import BodyUsedError, FetchResponse, HttpStatusError, pyfetch

__all__ = ["BodyUsedError", "FetchResponse", "HttpStatusError", "pyfetch"]
