"""`parrot ping`: is everything up?"""

import sys
import time

from pydantic import ValidationError
from rich.table import Column, Table

from parrot.cli.console import OUT, fail
from parrot.cli.run import host_and_port
from parrot.cluster.ports import ask
from parrot.protocol.public import EngineStatus, ReadyResponse


def show_health(core: str) -> None:
    """Exit code 0: ready; 1: nobody answers, or no engine is up."""
    address = host_and_port(core)
    begin = time.perf_counter()
    if ask(*address, "/health", timeout_s=5.0) is None:
        fail(f"no ServeCore answers at {core}")
    milliseconds = 1e3 * (time.perf_counter() - begin)
    ready = _ask_ready(core, address)
    OUT.print(f"ServeCore at {core} answers in {milliseconds:.1f} ms; {ready.num_queued} queued")
    OUT.print(engine_table(ready.engines) if ready.engines else "no engine is registered")
    sys.exit(0 if ready.engines else 1)


def _ask_ready(core: str, address: tuple[str, int]) -> ReadyResponse:
    """Without engines where the server says that it is not ready."""
    answer = ask(*address, "/ready", timeout_s=5.0)
    if answer is not None and answer[0] == 503:
        return ReadyResponse(engines=[])
    try:
        return ReadyResponse.model_validate(answer and answer[1])
    except ValidationError:
        fail(f"{core} answers, but it is not a ServeCore")


def engine_table(engines: list[EngineStatus]) -> Table:
    right = (Column(name, justify="right") for name in ("running", "KV tokens used"))
    table = Table("engine", "type", "model", "address", *right)
    for engine in engines:
        table.add_row(
            engine.engine_name,
            engine.engine_type,
            engine.model,
            f"{engine.host}:{engine.port}",
            str(engine.num_running),
            f"{engine.used_tokens} / {engine.tokens_capacity}",
        )
    return table
