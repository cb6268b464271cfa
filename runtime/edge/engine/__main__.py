"""`python -m edge.engine FD PARENT CACHE CONFIG`: the engine process, as `edge.pool.local` starts it.

FD is an inherited socket to the node, PARENT the node's process id, CACHE the folder for what is compiled, CONFIG an
`EngineConfig` as JSON. The process ends when the socket closes or its parent dies, whichever it notices first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from edge.config import EngineConfig
from edge.engine.parent import die_with
from edge.errors import ConfigError
from workers._wire import FrameError


def main(arguments: list[str]) -> None:
    """Run an engine on the socket that `arguments` name."""
    fd, parent, cache_dir = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    config = msgspec.json.decode(arguments[3], type=EngineConfig)
    die_with(parent)
    # A service manager signals all processes of a service at once; the node decides when its engine ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Read when torch loads its OpenMP library: threads that spin while they wait starve everybody else.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from edge.engine.process import serve

    asyncio.run(_serve_until_closed(serve(socket.socket(fileno=fd), config, cache_dir)))


async def _serve_until_closed(serving: Coroutine[None, None, None]) -> None:
    try:
        await serving
    except (ConfigError, FrameError) as error:
        print(f"engine: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    # A step or a load may still run in its thread, for nobody.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
