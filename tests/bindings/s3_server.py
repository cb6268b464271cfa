"""Run as a program: moto's S3 on a free port of this machine, which is the first line on stdout; until stdin ends.

moto keeps objects in memory. It looks at what is there and then writes without a lock, which S3 does at once: here one
request is worked on at a time, its body included; answers are sent side by side.

Two faults can be asked for by a part of the path: `ignores-conditions`, as older stores do when they write, and
`loses-an-answer`, once for each path: the request is served, and answered with 500.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


def main() -> None:
    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()
    lost: set[str] = set()

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        path, is_write = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "PUT"
        if "ignores-conditions" in path and is_write:
            environ.pop("HTTP_IF_MATCH", None)
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with one_at_a_time:
            if "loses-an-answer" in path and is_write and path not in lost:
                lost.add(path)
                b"".join(moto(environ, lambda *_: None))
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
            return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    print(server.port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
