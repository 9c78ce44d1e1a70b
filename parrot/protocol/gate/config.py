"""Configuration that ServeCore and engines have in common."""

from typing import Annotated

from pydantic import AfterValidator, Field

from parrot.protocol.gate.names import MAX_HOST_NAME
from parrot.utils.config import ConfigModel

_HostName = Annotated[str, Field(min_length=1, max_length=MAX_HOST_NAME)]
HostNames = Annotated[tuple[_HostName, ...], Field(strict=False)]
_Seconds = Annotated[float, Field(gt=0, le=1e9)]
_Count = Annotated[int, Field(ge=1, le=2**40)]


_PLACEHOLDER = "replace-me"


def _no_placeholder(secret: str) -> str:
    """Raises `ValueError` for what the sample configurations have in the place of a secret."""
    if secret.startswith(_PLACEHOLDER):
        raise ValueError(
            "is the sample's, which everybody knows: put a secret of your own, as of "
            "`openssl rand -hex 32`"
        )
    return secret


Secret = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_no_placeholder)]


class ConnectionLimits(ConfigModel):
    """Limits of one connection, and of all together. Who exceeds one is answered with 408, 431
    or 503 (but for `answer_idle_timeout`), and the connection closed."""

    head_timeout: _Seconds = Field(
        20.0, description="For a request's head, the first since the connection is there."
    )
    body_idle_timeout: _Seconds = Field(30.0, description="Between two pieces of a body.")
    body_timeout: _Seconds = Field(300.0, description="For a whole body.")
    answer_idle_timeout: _Seconds = Field(
        300.0,
        description="For a client to take some of an answer while the system's buffers are full "
        "(about 1 MB of it); then the connection is cut.",
    )
    max_header_bytes: _Count = Field(65_536, description="Bytes of a head.")
    max_connections: _Count = Field(8192, description="Connections that are open at once.")
    max_body_memory: _Count = Field(
        2**29,
        description="Bytes of all bodies that are being read or handed on to another shard, less "
        "the first 64 KiB of each; a request beyond gets 503.",
    )
