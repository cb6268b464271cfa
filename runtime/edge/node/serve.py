"""`edge serve`: a node in the foreground for others to use.

Unlike `edge dev` it lets nobody in without a token, shows no tracebacks and no processes, does not reload, wants the
sandbox of its policy or does not start, and takes its time to finish what is in flight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from edge.auth.store import FILE_NAME, TokenStore
from edge.config import Config
from edge.errors import UsageError, WorkerStartFailed
from edge.node import serving
from edge.node.app import Node, key_of
from edge.node.connection import while_connected
from edge.node.dev_vars import load_dev_vars
from edge.node.serving import Server, log_access, say
from edge.node.welcome import missing_services, welcome

_MAX_SHOWN = 5
"""Accounts."""


def run(configs: Sequence[Config], *, ip: str, port: int, drain_s: int, without_tokens: bool) -> None:
    """Serve the workers of `configs` until SIGINT or SIGTERM; HTTP requests reach the first.

    Args:
        drain_s: seconds that requests in flight then have to finish.
        without_tokens: start even though nobody has access to the API.

    Raises:
        PortInUse: somebody else listens there.
        UsageError: there is no such address or no token, or two workers have one name.
        WorkerStartFailed: a worker cannot be imported.
        EdgeError: the node cannot be started, for example without the sandbox that it is to have.
    """
    if len({key_of(config) for config in configs}) < len(configs):
        raise UsageError("two of the configurations have the same `name`; a worker is known by its name")
    first = configs[0]
    with closing(TokenStore(first.state_dir / FILE_NAME)) as store:
        num_tokens = store.num_active()
    if not num_tokens and not without_tokens:
        raise UsageError(
            f"no token is valid in {first.state_dir}, so that nobody could use the API. Create one: edge tokens create "
            f"NAME --account {first.account_id}; or serve the workers alone: edge serve --without-tokens"
        )
    serving.run(
        lambda server: _serve(configs, server, num_tokens),
        ip=ip,
        port=port,
        drain_s=drain_s,
        command="edge serve",
    )


async def _serve(configs: Sequence[Config], server: Server, num_tokens: dict[str, int]) -> None:
    """Serve `configs`; `num_tokens` has the tokens by account, as they were at start."""
    node = Node(configs[0], tokens={}, show_tracebacks=False, say=say, access_log=partial(log_access, is_shared=True))
    async with node:
        for config in configs:
            node.use_ai(config)
        for config in configs:
            await while_connected(_deploy(node, config), server.stopping.wait())
        if server.stopping.is_set():
            return
        server.start(node)
        account = next(iter(num_tokens)) if len(num_tokens) == 1 else None
        lines = welcome(node, configs, server.base, account=account, access=_access(num_tokens), reload=False)
        say("\n".join([*missing_services(node, configs), *lines]))
        print(f"Ready on {server.base}", flush=True)
        await server.stopping.wait()
        await server.finish(node)


def _access(num_tokens: dict[str, int]) -> str:
    """`Tokens 3 of acme, other (edge tokens list)`."""
    shown = ", ".join(list(num_tokens)[:_MAX_SHOWN])
    more = f" and {len(num_tokens) - _MAX_SHOWN} more" if len(num_tokens) > _MAX_SHOWN else ""
    return f"Tokens {sum(num_tokens.values())}{f' of {shown}{more}' if shown else ''} (edge tokens list)"


async def _deploy(node: Node, config: Config) -> None:
    secrets = load_dev_vars(config.path) if config.path is not None else {}
    try:
        await node.deploy(config, secrets=secrets)
    except WorkerStartFailed as error:
        sys.stderr.write(error.traceback)
        raise
