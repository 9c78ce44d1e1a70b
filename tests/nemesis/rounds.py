"""A round: a service, programs without end, faults, and then what the checker says of it."""

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
"""The program that comes with each fault."""
_PATIENCE_S = 20.0  # until all books are in order, when nobody asks for anything any more
_SHORT_LIFE_S = 0.5
_CALM = 0.8  # of the faults come when all servers are there
_WEIGHTS = (4, 1, 1)  # of the tenants: one has most of the programs

Answers = dict[tuple[str, int], str]
"""What each program says in each variant when nothing happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A round, as its seed decides. `faults`: what it draws from; `row`: what it counts as."""

    seed: int
    row: str
    faults: tuple[str, ...]
    seconds: float
    num_engines: int
    engine: str
    concurrency: int
    layout: Layout = Layout.ONE
    has_journal: bool = True

    @property
    def limit_s(self) -> float:
        """Of a program, whatever happens. Divided engines take long to start, and are slow."""
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
        """Every second round mixes the faults, the others take one each, in turn: of those that can
        happen to what the round is drawn to have."""
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
    """`recoveries`: seconds from a fault to the answer of a program that came with it, by fault.
    `defects`: tracebacks in the servers' logs. `given_up`: programs of which a call lost too many
    engines. `kept`: where the history is, if anything is wrong. `waited_for_cpu`: the fraction of
    its time in which the round's process was ready and had no CPU. Above a half, engines seem
    stuck, and violations may come from the machine."""

    plan: Plan
    programs: int = 0
    calls: int = 0
    given_up: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    violations: list[Violation] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    kept: str = ""
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
        """Ask for the accounts; then let all sessions that nobody could end expire."""
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
        """Where the next program asks first, and where else: shards get them in turn."""
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
    """A program from the beginning to the end of its session. Raises `TimeoutError`."""
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
        await client.look_at_sets()
        raise
    finally:
        await client.close()


async def undisturbed(
    engine: Mapping[str, Any],
    kinds: Iterable[str] = tuple(PROGRAMS),
    num_variants: int = NUM_VARIANTS,
) -> Answers:
    """The answers of programs of these kinds on a service that is left alone."""
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
    """Play a round, with a `database` if it has a standby; if anything is wrong, its history and
    logs are kept under `keep`."""
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
    """The same, for a process of its own, with a database of its own."""
    ran_before, waited_before = _scheduled()
    with running_database() if plan.layout is Layout.STANDBY else nullcontext() as database:
        outcome = asyncio.run(play(plan, answers, keep, database))
    ran, waited = _scheduled()
    ran, waited = ran - ran_before, waited - waited_before
    outcome.waited_for_cpu = waited / max(1, ran + waited)
    return outcome


def _scheduled() -> tuple[int, int]:
    """Nanoseconds in which this thread ran, and in which it was ready but did not run."""
    path = Path("/proc/thread-self/schedstat")
    ran, waited, _ = path.read_text().split() if path.exists() else ("0", "0", "")
    return int(ran), int(waited)


def _keep(place: Path, history: History, folder: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    history.save(place / "history.json")
    for log in folder.glob("*.log"):
        shutil.copy(log, place)
    return place
