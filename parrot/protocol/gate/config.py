"""What ServeCore's and an engine's configuration have in common."""

from typing import Annotated

from pydantic import Field

from parrot.protocol.gate.names import MAX_HOST_NAME

HostName = Annotated[str, Field(min_length=1, max_length=MAX_HOST_NAME)]
