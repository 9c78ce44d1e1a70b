"""Messages of a launcher and its agents: lines of JSON on the agent's stdin and stdout."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, JsonValue

from parrot.launch.plan import Kind

MAX_ORDER = 2**24  # bytes
MAX_REPORT = 2**17
PING_S = 10.0  # between lines of a launcher that has nothing to say
SILENCE_S = 45.0  # after which an agent takes its launcher for gone
GO, STOP, HURRY, PING = b"go\n", b"stop\n", b"hurry\n", b"\n"


class Action(StrEnum):
    RUN = "run"
    DETACH = "detach"
    STOP = "stop"


class Payload(BaseModel):
    # An error that shows its input would show secrets.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ServerOrder(Payload):
    """A server to run: its whole config, and what there must be for it."""

    name: str
    kind: Kind
    module: str
    config: dict[str, JsonValue]
    stop_s: float
    gpus: tuple[int, ...] | None
    cores: int | None
    env: dict[str, str]


class Order(Payload):
    """The first line that an agent gets. It holds secrets. `version`: Parrot's, as launched;
    `site`: the machine's address, or what parts the agents of one machine."""

    version: str
    cluster: str
    site: str
    action: Action
    servers: tuple[ServerOrder, ...]
    stop_s: float


class Report(Payload):
    """A line of an agent's.

    `problem`: why nothing starts; `checked`: it waits for `GO`; `log`: a line of `name`'s; `ready`:
    `name` serves; `news`: what a person may want to know; `stopped`: all has ended as wished."""

    kind: str
    name: str = ""
    text: str = ""
