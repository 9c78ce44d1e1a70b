"""A round: run a service with programs, inject faults, and check the history."""

import asyncio
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parrot.protocol.errors import ParrotError
from tests.nemesis.checker import Violation, check
from tests.nemesis.client import Client
from tests.nemesis.database import Database, running_database
from tests.nemesis.faults import FAULTS, Layout
from tests.nemesis.history import Disturbance, History, Life
from tests.nemesis.programs import NUM_VARIANTS, PROGRAMS, UNSHOWN, WITHOUT_SESSION, Program
from tests.nemesis.service import CORES, DIVIDED, ENGINES, QUEUE, TENANTS, Service

LIMIT_S = 60.0
MIXED = "mixed"
_TITLES = {Layout.ONE: "", Layout.STANDBY: ", with a standby", Layout.SHARDS: ", with shards"}
PROBE = "probe"
"""The program that starts together with each fault, to measure the recovery time."""
_PATIENCE_S = 20.0  # Limit for servers to free everything after the last request.
_SHORT_LIFE_S = 0.5
_CALM = 0.8  # Share of the faults that are injected only when all servers are ready.
_WEIGHTS = (4, 1, 1)  # Shares of the programs by tenant. The first tenant has most.

Answers = dict[tuple[str, int], str]
"""The answer of each program and variant without faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a round, which follow from its seed."""

    seed: int
    row: str  # the row of the table for this round
    faults: tuple[str, ...]  # the faults to choose from
    seconds: float
    num_engines: int
    engine: str
    concurrency: int
    layout: Layout = Layout.ONE
    has_journal: bool = True

    @property
    def limit_s(self) -> float:
        """The time limit of a program. Engines with tensor parallelism start and run slowly."""
        return 3 * LIMIT_S if self.engine == DIVIDED else LIMIT_S

    @property
    def title(self) -> str:
        divided = ", divided" if self.engine == DIVIDED else ""
        return self.row + _TITLES[self.layout] + divided

    @classmethod
    def of(
        cls,
        seed: int,
        faults: Sequence[str],
        seconds: float,
        *,
        concurrency: int = 8,
        embedded_share: float = 0.0,
        divided_share: float = 0.0,
        standby_share: float = 0.0,
        shards_share: float = 0.0,
    ) -> "Plan":
        """Draw the layout and engine of a round, and select faults that suit them. Every second
        round mixes all these faults. The other rounds use one fault each, in turn."""
        draw = random.Random(seed)
        num_engines, drawn = draw.randint(2, 4), draw.random()
        engine = "embedded" if drawn < embedded_share else "sim"
        if embedded_share <= drawn < embedded_share + divided_share:
            num_engines, engine = 2, DIVIDED
        layout, drawn = Layout.ONE, draw.random()
        if drawn < standby_share + shards_share:
            layout = Layout.STANDBY if drawn < standby_share else Layout.SHARDS
        suited = [name for name in faults if FAULTS[name].suits(layout, engine)]
        if not suited:
            layout = min(frozenset.intersection(*(FAULTS[name].layouts for name in faults)))
            suited = list(faults)
        row = MIXED if seed % 2 and len(suited) > 1 else suited[seed // 2 % len(suited)]
        return cls(
            seed=seed,
            row=row,
            faults=tuple(suited) if row == MIXED else (row,),
            seconds=seconds,
            num_engines=num_engines,
            engine=engine,
            concurrency=concurrency,
            layout=layout,
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a round.

    `waited_for_cpu` is the share of time in which the round's process was runnable but had no CPU.
    Above 0.5, engines seem stuck, and violations may come from the machine."""

    plan: Plan
    programs: int = 0
    calls: int = 0
    given_up: int = 0  # programs with a call that lost too many engines
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    # By fault, the seconds from each fault to the answer of its probe.
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[Violation] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)  # tracebacks in the servers' logs
    kept: str = ""  # folder of the history, if there was a violation or defect
    waited_for_cpu: float = 0.0


class Round:
    """One service, its programs and its faults."""

    def __init__(
        self, plan: Plan, answers: Answers, service: Service, database: Database | None
    ) -> None:
        self._plan = plan
        self._database = database
        self._answers = answers
        self._kinds = sorted({kind for kind, _ in answers})
        self._service = service
        self.history = History(share=QUEUE // len(TENANTS), patience_s=plan.limit_s)
        self.history.tasks_capacity = ENGINES[plan.engine].get("tasks_capacity", 2**31)
        self.outcome = Outcome(plan=plan)
        self._draw = random.Random(plan.seed)
        self._num_programs = 0
        self._probes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        plan = self._plan
        engine = ENGINES[plan.engine]
        off = {} if plan.has_journal else {"journal": None}
        async with self._service.running(plan.num_engines, engine, self._database, **off):
            end = time.monotonic() + plan.seconds
            programs = [
                asyncio.create_task(self._programs(end, random.Random(self._draw.random())))
                for _ in range(plan.concurrency)
            ]
            nemeses = [
                asyncio.create_task(self._nemesis(end, random.Random(self._draw.random())))
                for _ in range(2 if plan.row == MIXED else 1)
            ]
            await asyncio.gather(*nemeses)
            await asyncio.gather(*programs, *self._probes)
            await self._service.ready()
            await self._close()

    async def _close(self) -> None:
        """Collect the accounts of the servers, let the remaining sessions expire, and collect the
        accounts again."""
        service = self._service
        accounts = await service.settled(_PATIENCE_S, without_sessions=False)
        async with service.lock(CORES):
            await asyncio.gather(*(core.stop() for core in service.cores))
            for core in service.cores:
                core.config["session_life_span"] = _SHORT_LIFE_S
                core.start()
        await service.ready()
        accounts += await service.settled(_PATIENCE_S, without_sessions=True)
        self.history.accounts += accounts
        self.history.answered_calls += service.answered_calls()

    async def _nemesis(self, end: float, draw: random.Random) -> None:
        while True:
            if draw.random() < _CALM:
                await self._service.ready()
            await asyncio.sleep(draw.uniform(0.0, 1.0))
            if time.monotonic() > end:
                return
            name = draw.choice(self._plan.faults)
            began = time.monotonic()
            probe = asyncio.create_task(self._probe(name, draw))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
            target = await FAULTS[name].run(self._service, draw)
            self.outcome.faults[name] += 1
            self.history.disturbances.append(
                Disturbance(
                    fault=name,
                    target=target,
                    began=began,
                    ended=time.monotonic() + self._service.takeover_s,
                    loses_engine=FAULTS[name].loses_engine,
                )
            )

    async def _probe(self, fault: str, draw: random.Random) -> None:
        life = await self._live(PROBE, draw)
        if life.ended is not None and not life.error:
            self.outcome.recoveries[fault].append(life.ended - life.began)

    async def _programs(self, end: float, draw: random.Random) -> None:
        while time.monotonic() < end:
            await self._live(draw.choice(self._kinds), draw)

    def _urls(self) -> list[str]:
        """Return the URLs of all ServeCores. Programs use the shards in turn as their first URL."""
        urls = self._service.urls
        first = self._num_programs % len(urls) if self._service.has_shards else 0
        return urls[first:] + urls[:first]

    async def _live(self, kind: str, draw: random.Random) -> Life:
        self._num_programs += 1
        variant = draw.choice(sorted(variant for known, variant in self._answers if known == kind))
        expected = self._answers[kind, variant]
        facts: dict[str, Any] = {"program": self._num_programs, "kind": kind, "expected": expected}
        facts |= {
            "tenant": draw.choices(TENANTS, _WEIGHTS)[0],
            "began": time.monotonic(),
            "limit_s": self._plan.limit_s,
        }
        client = Client(facts["program"], facts["tenant"], self._urls(), self.history)
        client.has_models = bool(self._service.others)
        try:
            facts["result"] = await live(
                PROGRAMS[kind],
                client,
                variant,
                draw,
                self._plan.limit_s,
            )
            facts["ended"] = time.monotonic()
        except ParrotError as error:
            facts |= {"ended": time.monotonic(), "error": error.type, "result": error.message}
        except TimeoutError:
            facts["ended"] = None
        life = Life(**facts)
        self.history.lives.append(life)
        return life


async def live(
    program: Program,
    client: Client,
    variant: int,
    draw: random.Random,
    limit_s: float | None = None,
) -> str:
    """Run a program, including its session. Raises `TimeoutError`."""
    has_session = program.__name__ not in WITHOUT_SESSION
    try:
        async with asyncio.timeout(limit_s):
            if has_session:
                await client.begin()
            result = await program(client, variant, draw)
            if has_session:
                if program.__name__ not in UNSHOWN:
                    await client.show()
                await client.end()
            return result
    except TimeoutError:
        await client.read_set_values()
        raise
    finally:
        await client.close()


async def undisturbed(
    engine: Mapping[str, Any],
    kinds: Iterable[str] = tuple(PROGRAMS),
    num_variants: int = NUM_VARIANTS,
) -> Answers:
    """Return the answers of the programs on a service without faults."""
    answers: Answers = {}
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder))
        async with service.running(1, engine):

            async def answer(kind: str) -> None:
                for variant in range(num_variants):
                    client = Client(0, TENANTS[0], service.urls, History())
                    result = await live(PROGRAMS[kind], client, variant, random.Random(0))
                    answers[kind, variant] = result

            await asyncio.gather(*map(answer, kinds))
    return answers


async def play(
    plan: Plan, answers: Answers, keep: Path | None, database: Database | None = None
) -> Outcome:
    """Run a round. A round with a standby uses `database`. After a violation or defect, the history
    and logs are kept in `keep`."""
    with tempfile.TemporaryDirectory(prefix="nemesis-") as folder:
        service = Service(Path(folder), has_shards=plan.layout is Layout.SHARDS)
        has_standby = plan.layout is Layout.STANDBY
        one = Round(plan, answers, service, database if has_standby else None)
        try:
            await one.run()
        except TimeoutError as error:
            one.outcome.violations.append(Violation("C4", f"the service is not back: {error}"))
        outcome, history = one.outcome, one.history
        outcome.violations += check(history)
        outcome.programs, outcome.calls = len(history.lives), len(history.submits)
        outcome.given_up = sum(bool(life.error) for life in history.lives)
        outcome.kills = service.kills
        outcome.defects = list(service.errors())
        if keep is not None and (outcome.violations or outcome.defects):
            outcome.kept = str(_keep(keep / f"seed-{plan.seed}", history, Path(folder)))
        return outcome


def play_alone(plan: Plan, answers: Answers, keep: Path | None) -> Outcome:
    """Run a round in a separate process, with its own database."""
    ran_before, waited_before = _scheduled()
    with running_database() if plan.layout is Layout.STANDBY else nullcontext() as database:
        outcome = asyncio.run(play(plan, answers, keep, database))
    ran, waited = _scheduled()
    ran, waited = ran - ran_before, waited - waited_before
    outcome.waited_for_cpu = waited / max(1, ran + waited)
    return outcome


def _scheduled() -> tuple[int, int]:
    """Return the nanoseconds in which this thread ran, and in which it waited for a CPU."""
    path = Path("/proc/thread-self/schedstat")
    ran, waited, _ = path.read_text().split() if path.exists() else ("0", "0", "")
    return int(ran), int(waited)


def _keep(place: Path, history: History, folder: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    history.save(place / "history.json")
    for log in folder.glob("*.log"):
        shutil.copy(log, place)
    return place
