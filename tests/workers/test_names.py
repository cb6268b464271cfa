"""Every public name of the documented package is there, wherever code may import it from."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import workers

EXPORTED = """
    Blob BlobEnding BlobValue Body Context DurableObject FetchKwargs FetchResponse File FormData FormDataValue Headers
    JSBody Request RequestInitCfProperties Response WorkerEntrypoint WorkflowEntrypoint env fetch handler
    import_from_javascript patch_env python_from_rpc python_to_rpc waitUntil wait_until
"""
SUBMODULES = {
    "asgi": "Options entrypoint fetch websocket",
    "blob": "Blob BlobEnding BlobValue File",
    "entrypoints": "DurableObject WorkerEntrypoint WorkflowEntrypoint handler",
    "fetch": "fetch",
    "formdata": "FormData FormDataValue",
    "gateway": "BaseOptions EncodeBody",
    "request": "Request",
    "response": "FetchResponse Response",
    "rpc": "JsDict python_from_rpc python_to_rpc",
    "types": "Body Context FetchKwargs Headers JSBody RequestInitCfProperties",
    "utils": "import_from_javascript patch_env",
    "workflows": "NonRetryableError",
    "wsgi": "Options entrypoint fetch",
}


@pytest.mark.parametrize("name", EXPORTED.split())
def test_names_of_the_package(name):
    assert name in workers.__all__
    assert getattr(workers, name) is not None


def test_there_are_no_other_names():
    assert sorted(EXPORTED.split()) == sorted(workers.__all__)


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in SUBMODULES.items() for name in names.split()]
)
def test_names_of_submodules(module, name):
    found = getattr(importlib.import_module(f"workers.{module}"), name)
    if name in workers.__all__ and module not in ("asgi", "wsgi") and name != "Context":  # there, a protocol
        assert found is getattr(workers, name)


@pytest.mark.parametrize("first", ["import workers", "from workers.fetch import fetch", "import workers.fetch"])
def test_fetch_is_the_function_however_its_module_was_imported(first):
    code = f"{first}\nimport workers.fetch, workers\nassert callable(workers.fetch), workers.fetch"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_options_of_applications():
    assert workers.asgi.Options(encode_body="manual").encode_body == "manual"
    with pytest.raises(ValueError, match="encode_body must be one of"):
        workers.asgi.Options(encode_body="gzip")
