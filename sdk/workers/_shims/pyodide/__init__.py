"""`import pyodide`: what handlers and libraries for Cloudflare's runtime import of it, on plain CPython."""

__version__ = "0.28.2"
