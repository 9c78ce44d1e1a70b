"""The command that runs a ServeCore:

`python3 -m parrot.serve.http_server --config_path core.json`
"""

import logging
import os
import sys
from collections.abc import Sequence

from parrot.journal.log import RecordsLost, is_address
from parrot.protocol.app_server import AppServer, given_options, run_server, server_options
from parrot.protocol.server_config import settled_token
from parrot.serve.config import CoreConfig, core_settings
from parrot.server.serving import serving
from parrot.server.standby import serve_in_turn
from parrot.utils.addresses import is_loopback
from parrot.utils.collector import bounded_collections
from parrot.utils.config import ConfigError, parse_config

logger = logging.getLogger(__name__)

_MIN_KEY = 16  # Characters of a key in `api_keys`, unless only this machine can connect.


async def serve(config: CoreConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the trace cannot be written, or if
    keys or a cluster token are required but missing."""
    token = settled_token(
        config.host,
        config.cluster_token,
        insecure=config.insecure,
        has_api_keys=config.needs_keys,
        state_dir=config.state_dir,
    )
    config = config.model_copy(update={"cluster_token": token})
    if not is_loopback(config.host):
        require_long(config.api_keys)
    if not is_loopback(config.host) and not config.needs_keys:
        logger.warning(
            "binding %s without api_keys: anyone who reaches this address can use the service",
            config.host,
        )
    if config.journal is not None and is_address(config.journal):
        await serve_in_turn(config)
        return
    with bounded_collections():
        await _serve(config)


def require_long(api_keys: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that can be guessed: anyone who reaches the server may try."""
    for number, key in enumerate(api_keys):
        if len(key) < _MIN_KEY:
            raise ConfigError(
                f"api_keys.{number}: the key has {len(key)} characters, but a server that others "
                f"can reach needs at least {_MIN_KEY}: use `openssl rand -hex 16`"
            )


async def _serve(config: CoreConfig) -> None:
    async with serving(config) as parts:

        async def end_requests() -> None:
            parts.core.shut_down()

        server = AppServer(parts.app, config.host, config.port, end_requests, config.connections)
        await server.serve()


def main(argv: Sequence[str] | None = None) -> None:
    args = server_options("Run Parrot's ServeCore.", "core_server.log").parse_args(argv)
    try:
        options = given_options(args, "host", "port", "insecure")
        settings = core_settings(args.config_path, options, os.environ)
        config = parse_config(CoreConfig, settings.payload, settings.blamed)
        run_server(args, serve(config))
    except (ConfigError, RecordsLost) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
