"""A hundred thousand programs on one ServeCore: memory must not grow, and all state must be freed.

    python -m benchmark.soak.soak_sessions --output benchmark/results/soak.json
    python -m benchmark.soak.soak_sessions --journal --output benchmark/results/soak_journal.json

Everything runs in this process. Programs send HTTP bytes to ServeCore's app without a socket, and
ServeCore does the same with its two `sim` engines, whose steps take no time. Programs make calls,
stream, join, cancel, disconnect, let their sessions expire, use OpenAI's and Anthropic's formats,
store responses and send invalid requests, `--concurrency` of them at once (`programs.py` has the
mix). With `--journal` all is written to a file.

Caches of texts have 65,536 entries and more, which a hundred thousand programs do not fill. So
texts repeat after `--texts` programs, and the caches have all of them after the first third. State
of sessions does not repeat.

After each part of the programs, the benchmark waits until all sessions have ended and their
sessions, contexts and blocks are freed. Then it samples the resident memory and the sizes of all
tables. `growth` is the median memory of the last third of the samples, divided by that of the
second third. `grown` lists the tables (by class and attribute, see `tables.py`) that had clearly
more entries at the end than after the first third.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.soak.programs import MIX, MODEL, Client, draw
from benchmark.soak.tables import allocated_blocks, grown, resident_mib, table_sizes
from parrot.engine.config import SimConfig
from parrot.journal.log import Journal
from parrot.journal.sqlite import JournalFile
from parrot.protocol.errors import NotFound, SessionGone
from parrot.protocol.transport import AppTransport
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.simulation.engine import SimEngine
from parrot.utils.clock import Clock, MonotonicClock

ZERO_COST = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
ENGINE = {"model": MODEL, "instance": ZERO_COST | {"num_kv_cache_blocks": 512, "max_seq_len": 4096}}
NUM_ENGINES = 2
CORE = {
    "session_life_span": 2.0,
    "constant_prefix_var_timeout": 1.0,
    "engine_heartbeat_timeout": 1e6,
    "max_sessions_num": 100_000,
    "responses_size": 2**20,
}
JOURNAL_BYTES = 2**28
_PATIENCE_S = 60.0
_LOOK_S = 0.05


@dataclass
class Soak:
    """A service in this process. `left`: stored responses that no program has deleted."""

    core: ServeCore
    engines: list[SimEngine]
    http: AppTransport
    journal_path: Path | None
    journal_file: JournalFile | None
    concurrency: int
    num_texts: int
    left: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_begun: int = 0

    async def run(self, num_programs: int) -> None:
        """Run this number of programs, and wait until all their state is freed."""
        last = self.num_begun + num_programs

        async def work() -> None:
            while self.num_begun < last:
                number = self.num_begun % self.num_texts
                self.num_begun += 1
                program = draw(number)
                self.counts[program.__name__] += 1
                try:
                    await program(Client(self.http, number, self.left))
                except (
                    SessionGone
                ):  # The process was suspended for longer than a session's life span.
                    self.counts["sessions that expired early"] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.concurrency):
                tasks.create_task(work())
        for response_id in self.left:
            try:
                await self.http.request("DELETE", f"/v1/responses/{response_id}")
            except NotFound:
                self.counts["responses dropped for room"] += 1
        self.left.clear()
        await self._rest()

    async def _rest(self) -> None:
        """Wait until all sessions have ended or expired, and contexts are freed."""
        until = time.monotonic() + _PATIENCE_S
        while any(self.leftovers().values()):
            assert time.monotonic() < until, f"state was not freed: {self.leftovers()}"
            await asyncio.sleep(_LOOK_S)  # Sessions expire by time alone.
        self.core.check_integrity()
        for engine in self.engines:
            engine.service.check_integrity()

    def leftovers(self) -> dict[str, int]:
        infos = [engine.service.runtime_info() for engine in self.engines]
        dispatcher = self.core.dispatcher
        return {
            "sessions": len(self.core.sessions),
            "queued": self.core.num_queued,
            "contexts": len(list(dispatcher._ledger.owners.context_ids())),
            "requests": sum(info.num_total_jobs for info in infos),
            "blocks": sum(info.num_max_blocks - info.num_free_blocks for info in infos),
            "timers": len(self.core._timers),
            "ended sessions in the journal": len(
                self.journal_file._ended if self.journal_file else ()
            ),
        }

    def journal_bytes(self) -> int:
        if self.journal_path is None:
            return 0
        files = self.journal_path.parent.glob(f"{self.journal_path.name}*")
        return sum(file.stat().st_size for file in files)


@asynccontextmanager
async def opened(
    concurrency: int, num_texts: int, journal_path: Path | None = None
) -> AsyncIterator[Soak]:
    clock: Clock = MonotonicClock()
    journal = journal_file = None
    if journal_path is not None:
        journal_file = JournalFile(str(journal_path), JOURNAL_BYTES)
        journal = Journal(journal_file, clock)
        clock = journal.clock
    engines: dict[str, SimEngine] = {}
    config = CoreConfig.model_validate(CORE)
    dispatcher = Dispatcher(config, clock, lambda info: engines[info.engine_name].client)
    core = ServeCore(config, clock=clock, dispatcher=dispatcher)
    app = create_app(core, journal)
    for number in range(NUM_ENGINES):
        name = f"engine{number}"
        engine = SimEngine(
            SimConfig.model_validate(ENGINE | {"engine_name": name}), clock, 0.0, leaps=False
        )
        engines[name] = engine
        await engine.service.start()
        await engine.register(core)
    try:
        async with app.router.lifespan_context(app):
            http = AppTransport(app)
            stored = journal_path, journal_file
            yield Soak(core, [*engines.values()], http, *stored, concurrency, num_texts)
    finally:
        if journal is not None:
            await journal.close()
        for engine in engines.values():
            await engine.service.close()


async def soak(report: Report, args: argparse.Namespace, journal_path: Path | None) -> None:
    tables: list[Counter[str]] = []
    began = time.monotonic()
    async with opened(args.concurrency, args.texts, journal_path) as service:
        for part in range(args.parts):
            stop = args.sessions * (part + 1) // args.parts
            await service.run(stop - service.num_begun)
            tables.append(table_sizes())
            report.add(
                "samples",
                {
                    "programs": service.num_begun,
                    "seconds": time.monotonic() - began,
                    "resident_mib": resident_mib(),
                    "allocated_blocks": allocated_blocks(),
                    "journal_bytes": service.journal_bytes(),
                },
            )
        report["counts"] = dict(service.counts)
    third = max(1, args.parts // 3)
    report["growth"] = {
        name: median_growth([sample[name] for sample in report["samples"]])
        for name in ("resident_mib", "allocated_blocks", "journal_bytes")
    }
    report["grown"] = grown(tables[third - 1], tables[-1])


def median_growth(values: list[float]) -> float | None:
    """The median of the last third, divided by the median of the second third."""
    third = len(values) // 3
    if not third or not any(values):
        return None
    return statistics.median(values[-third:]) / statistics.median(values[third : 2 * third])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=100_000, help="programs")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--texts", type=int, default=5000, help="programs with different texts")
    parser.add_argument(
        "--parts", type=int, default=30, help="programs between two samples of memory"
    )
    parser.add_argument("--journal", action="store_true")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    report.uses("core", CORE)
    report.uses("mix", {program.__name__: weight for program, weight in MIX.items()})
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.db" if args.journal else None
        asyncio.run(soak(report, args, path))


if __name__ == "__main__":
    run_benchmark(__name__)
