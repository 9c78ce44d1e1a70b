"""Configuration that ServeCore and engines share: limits of connections, and the cluster token with
its file."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from parrot.utils.addresses import MAX_HOST_NAME, is_loopback
from parrot.utils.config import ConfigError, ConfigModel
from parrot.utils.ids import new_token

_FILE_NAME = "cluster_token"
_MAX_LEN = 4096
_KEYS_VARIABLE = """PARROT_CORE__API_KEYS='["KEY"]'"""


_HostName = Annotated[str, Field(min_length=1, max_length=MAX_HOST_NAME)]
HostNames = Annotated[tuple[_HostName, ...], Field(strict=False)]
_Seconds = Annotated[float, Field(gt=0, le=1e9)]
_Count = Annotated[int, Field(ge=1, le=2**40)]


_PLACEHOLDER = "replace-me"


def _no_placeholder(secret: str) -> str:
    """Raises `ValueError` for the placeholder that the sample configurations have as secrets."""
    if secret.startswith(_PLACEHOLDER):
        raise ValueError(
            "is the placeholder of the sample: set your own secret, such as the output of "
            "`openssl rand -hex 32`"
        )
    return secret


Secret = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_no_placeholder)]


class ConnectionLimits(ConfigModel):
    """Limits of one connection and of all connections. A connection beyond a limit gets 408, 431 or
    503 and is closed. After `answer_idle_timeout` it is closed without an answer."""

    head_timeout: _Seconds = Field(
        20.0,
        description="Time for the header of a request, from the start of the connection for the "
        "first one.",
    )
    body_idle_timeout: _Seconds = Field(30.0, description="Time between two chunks of a body.")
    body_timeout: _Seconds = Field(300.0, description="Time for a whole body.")
    answer_idle_timeout: _Seconds = Field(
        300.0,
        description="Time for a client to read some of the answer while the buffers of the "
        "system are full (about 1 MB). The connection is then closed.",
    )
    max_header_bytes: _Count = Field(65_536, description="Size of a header in bytes.")
    max_connections: _Count = Field(8192, description="Number of open connections.")
    max_body_memory: _Count = Field(
        2**29,
        description="Bytes of all bodies that are being read or forwarded, without the first 64 "
        "KiB of each. Requests beyond it get 503.",
    )


def settled_token(
    host: str,
    token: str | None,
    *,
    insecure: bool = False,
    has_api_keys: bool | None = None,
    is_alone: bool = False,
    state_dir: str | None = None,
) -> str | None:
    """The cluster token of a server that binds `host` and is configured with `token`.

    Without a configured token, a server on loopback uses the token file of this user. The result is
    None (no token required) if `insecure`, or on loopback if the server `is_alone` and shares the
    token with no other server. `has_api_keys` None: programs do not call this server.

    Raises `ConfigError` if a required token or API key is missing."""
    if token is not None:
        if has_api_keys is False and not insecure and not is_loopback(host):
            raise ConfigError(
                f"`api_keys` are missing: {host} can be reached from other machines. Set some in "
                f"ServeCore's config or environment ({_KEYS_VARIABLE}), or `insecure` "
                "(--insecure) to allow everyone who can connect"
            )
        return token
    if has_api_keys:
        raise ConfigError(
            "`api_keys` need `cluster_token`: without it, anyone who can connect could register an "
            "engine and receive the prompts of all tenants"
        )
    if insecure:
        return None
    if not is_loopback(host):
        server = "ENGINE" if has_api_keys is None else "CORE"
        raise ConfigError(
            f"`cluster_token` is missing: {host} can be reached from other machines. Set it in the "
            f"config or environment (PARROT_{server}__CLUSTER_TOKEN), and `api_keys` on ServeCore "
            f"({_KEYS_VARIABLE}), or `insecure` (--insecure) to allow everyone who can connect"
        )
    return None if is_alone else kept_token(state_dir)


def kept_token(state_dir: str | None) -> str:
    """The token in the file of `state_dir` (None: this user's state folder). The first call creates
    the file. Raises `ConfigError` if the file cannot be created or read, or if other users can
    read it."""
    try:
        folder = state_folder() if state_dir is None else Path(state_dir)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _FILE_NAME
        _make(path)
        return _read(path)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no token file: {error}. Set `cluster_token`, or `state_dir` to a folder of your own"
        ) from None


def state_folder() -> Path:
    """The folder of this user for persistent state of servers. Raises `RuntimeError` if this user
    has no home folder."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "parrot"


def _make(path: Path) -> None:
    """Create the file atomically unless it exists. If several processes try, one succeeds."""
    if path.exists():
        return
    draft = path.with_name(f"{_FILE_NAME}.{new_token()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(new_token() + new_token())
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ConfigError(f"{path}: must belong to you and have mode 600")
        token = file.read(_MAX_LEN).strip()
    if not token:
        raise ConfigError(f"{path}: is empty; remove it")
    return token
