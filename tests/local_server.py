"""An HTTP server in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn


@contextlib.asynccontextmanager
async def serving(app: Any, certificate: Path | None = None, **more: Any) -> AsyncIterator[str]:
    """Serve the ASGI application `app`; gives the server's URL. With a `certificate` (and key) over TLS. `more` are
    options of uvicorn."""
    # With the protocol named, or asyncio does not turn Nagle's algorithm off, which costs 40 ms a request.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    options = {"lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 1, "ssl_certfile": certificate}
    server = uvicorn.Server(uvicorn.Config(app, **options, **more))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def make_certificate(folder: Path) -> Path:
    """A file with a key and a certificate for `secure.test` and 127.0.0.1, which is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    key, certificate, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    what = ["-subj", "/CN=secure.test", "-addext", "subjectAltName=DNS:secure.test,IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [
        "openssl",
        "req",
        "-x509",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        *what,
        *files,
    ]
    subprocess.run(command, check=True, capture_output=True)
    both.write_text(key.read_text() + certificate.read_text())
    return both
