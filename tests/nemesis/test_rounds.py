"""Short rounds on real processes with many faults break no promise."""

import asyncio
import importlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.results import run
from tests.nemesis.checker import check
from tests.nemesis.client import Client
from tests.nemesis.faults import FAULTS, Layout
from tests.nemesis.history import History, SetValue, digest_of
from tests.nemesis.link import Link
from tests.nemesis.programs import PROGRAMS
from tests.nemesis.rounds import MIXED, Answers, Plan, Round, live, play, undisturbed
from tests.nemesis.service import DIVIDED, SIM, EngineLinks, Service
from tests.support.postgres import Server

KINDS = ("agent", "leaver", "map_reduce", "probe", "responses")
FAULTS_OF_CI = ("kill-both", "kill-core", "kill-engine", "core-engine-reset", "engine-core-stall")
SEED = 11
SEED_OF_LATE_DEATH = 1  # ServeCore dies about 1 s after the start, when programs are running.


@pytest.fixture(scope="module")
def answers() -> Answers:
    return asyncio.run(undisturbed(SIM, KINDS, num_variants=2))


def test_a_round_breaks_no_promise(answers: Answers, tmp_path: Path) -> None:
    plan = Plan.of(SEED, FAULTS_OF_CI, 3.0, concurrency=4)
    assert plan.row == MIXED
    outcome = asyncio.run(play(plan, answers, tmp_path))
    assert not outcome.violations, (outcome.violations, outcome.kept)
    assert not outcome.defects
    assert outcome.kills
    assert outcome.programs > len(outcome.recoveries)


def test_a_round_with_a_standby_breaks_no_promise(
    answers: Answers, postgres: Server, tmp_path: Path
) -> None:
    faults = ("kill-core", "stop-core", "kill-database", "core-database-stall")
    plan = Plan.of(SEED, faults, 3.0, concurrency=4, standby_share=1.0)
    assert plan.layout is Layout.STANDBY
    outcome = asyncio.run(play(plan, answers, tmp_path, postgres))
    assert not outcome.violations, (outcome.violations, outcome.kept)
    assert not outcome.defects
    assert outcome.faults


def test_a_round_with_shards_breaks_no_promise(answers: Answers, tmp_path: Path) -> None:
    faults = ("kill-core", "kill-engine", "stop-core", "stop-engine", "rolling-restart")
    plan = Plan.of(SEED, faults, 3.0, concurrency=4, shards_share=1.0)
    assert plan.layout is Layout.SHARDS
    outcome = asyncio.run(play(plan, answers, tmp_path))
    assert not outcome.violations, (outcome.violations, outcome.kept)
    assert not outcome.defects
    assert outcome.faults


def test_engines_never_have_more_calls_than_their_capacity(
    answers: Answers, tmp_path: Path
) -> None:
    answers = {key: answer for key, answer in answers.items() if key[0] in ("map_reduce", "probe")}
    plan = Plan.of(SEED, ("kill-both", "kill-core", "kill-engine"), 3.0, concurrency=10)
    service = Service(tmp_path)
    one = Round(plan, answers, service, None)
    asyncio.run(one.run())
    assert service.kills
    assert check(one.history) == []
    one.history.tasks_capacity -= 1
    assert {violation.promise for violation in check(one.history)} == {"C10"}


async def test_the_link_of_an_engine_to_its_shard_can_be_cut(tmp_path: Path) -> None:
    service = Service(tmp_path, has_shards=True)
    service.links["engine-0"] = EngineLinks(Link(1), [Link(2)])
    service.engines["engine-0"] = service.engine("engine-0", 1, 1)
    fault = FAULTS["engine-core-reset"]
    for seed in range(4):
        assert await fault.run(service, random.Random(seed)) == "engine-0-core"


def test_lost_calls_are_found(answers: Answers, tmp_path: Path) -> None:
    """Without a journal, a killed ServeCore loses its sessions."""
    answers = {key: answer for key, answer in answers.items() if key[0] in ("agent", "probe")}
    plan = replace(
        Plan.of(SEED_OF_LATE_DEATH, ("kill-core",), 2.0, concurrency=2), has_journal=False
    )
    outcome = asyncio.run(play(plan, answers, tmp_path))
    assert {"C2", "C6"} <= {violation.promise for violation in outcome.violations}
    assert (Path(outcome.kept) / "history.json").exists()


async def test_a_hanging_program_reads_its_set_values_once() -> None:
    fields = {"program": 1, "digest": digest_of("note"), "invoked": 0.0, "answered": 0.1}
    own = SetValue(var="own", **fields)
    others = [replace(own, var="of-another", program=2), replace(own, var="no", answered=None)]
    history = History(sets=[own, *others, replace(own, error="already_set")])
    client = Client(1, "a", ["http://127.0.0.1:1"], history)  # no server listens there
    with pytest.raises(TimeoutError):
        await live(PROGRAMS["probe"], client, 0, random.Random(0), limit_s=0.01)
    assert [(read.var, read.error) for read in history.reads] == [("own", "unavailable")]


def test_a_seed_determines_a_round() -> None:
    shares = {"standby_share": 0.4, "shards_share": 0.3, "divided_share": 0.5}
    plans, again = ([Plan.of(n, tuple(FAULTS), 4.0, **shares) for n in range(600)] for _ in "ab")
    assert plans == again
    assert {plan.row for plan in plans} == {*FAULTS, MIXED}
    for plan in plans:
        assert all(FAULTS[name].suits(plan.layout, plan.engine) for name in plan.faults)
    assert {plan.layout for plan in plans} == set(Layout)
    assert {plan.engine for plan in plans} == {"sim", DIVIDED}


def test_a_fault_determines_the_layout() -> None:
    assert Plan.of(0, ("kill-database",), 4.0, shards_share=1.0).layout is Layout.STANDBY
    assert Plan.of(0, ("disk-full",), 4.0, standby_share=1.0).layout is Layout.ONE
    assert Plan.of(0, ("kill-cores",), 4.0).layout is Layout.SHARDS


@pytest.mark.slow
def test_the_command_gives_a_report(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = "--rounds 1 --round-s 1 --faults kill-engine --concurrency 2 --programs chain"
    name = "tests.nemesis.__main__"
    importlib.import_module(name)
    run(name, [*options.split(), "--output", str(path)])
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    assert row["fault"] == "kill-engine"
    assert [row[key] for key in ("rounds", "lost", "doubled", "hung", "other")] == [1, 0, 0, 0, 0]
    assert report["kills"] == row["engine_kills"]
    assert row["recovery_p50_s"] > 0 or not row["runs"]
