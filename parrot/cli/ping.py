"""`parrot ping`: is everything up?"""

import sys
import time

from pydantic import ValidationError
from rich.table import Table

from parrot.cli.console import OUT, fail
from parrot.cli.run import host_and_port
from parrot.cluster.probe import ask
from parrot.protocol.public import EngineStatus, ReadyResponse


def show_health(core: str) -> None:
    """Exit code 0: ready; 1: nobody answers, or no engine is up."""
    address = host_and_port(core)
    begin = time.perf_counter()
    if ask(*address, "GET", "/health", timeout_s=5.0) is None:
        fail(f"no ServeCore answers at {core}")
    milliseconds = 1e3 * (time.perf_counter() - begin)
    answer = ask(*address, "GET", "/ready", timeout_s=5.0)
    try:
        ready = ReadyResponse.model_validate(answer and answer[1])
    except ValidationError:
        fail(f"{core} answers, but it is not a ServeCore")
    OUT.print(f"ServeCore at {core} answers in {milliseconds:.1f} ms; {ready.num_queued} queued")
    OUT.print(engine_table(ready.engines))
    sys.exit(0 if ready.ready else 1)


def engine_table(engines: list[EngineStatus]) -> Table:
    table = Table()
    for column in ("engine", "type", "model", "address", "state"):
        table.add_column(column)
    table.add_column("running", justify="right")
    table.add_column("KV tokens used", justify="right")
    for engine in engines:
        table.add_row(
            engine.engine_name,
            engine.engine_type,
            engine.model,
            f"{engine.host}:{engine.port}",
            "[green]up[/]" if engine.live else "[red]down[/]",
            str(engine.num_running),
            f"{engine.used_tokens} / {engine.tokens_capacity}",
        )
    return table
