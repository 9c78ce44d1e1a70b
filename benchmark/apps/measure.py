"""All runs of one command: cases x repetitions x settings, settings in turns."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmark.apps.backends import CountedBackend
from benchmark.apps.hosts import ClusterHost, Host, SimHost
from benchmark.apps.metrics import Bystanders, Run, key_figures, ratios, run_plan, summarise
from benchmark.apps.settings import Setting, parse_setting
from benchmark.apps.text import one_token_words
from benchmark.results import Report
from parrot.cli.bench.plan import JobRunner, Plan, Workload
from parrot.cli.bench.requests import lengths_256, request
from parrot.cli.bench.text import TextSource
from parrot.cli.bench.workloads import WORKLOADS, parse_workload

_WARM_UP = -1  # The number of the repetition that is not recorded.


@dataclass(frozen=True, slots=True)
class Case:
    """`text`: as the command line names it. `name`: of its workload."""

    text: str
    name: str
    workload: Workload


def measure(args: argparse.Namespace, report: Report) -> None:
    """Raises `ValueError` for invalid arguments."""
    settings = [parse_setting(text) for text in args.compare]
    cases = [parse_case(text, args.scale) for text in args.workloads]
    with _host(args) as host:
        text = TextSource(one_token_words(host.tokenizer_json()))
        servers = host.describe()
        report |= {"arguments": _arguments(args), "servers": servers}
        report.uses("servers", servers)
        report.save()
        Runs(args, host, text, report).run(cases, settings)


def parse_case(text: str, factor: float) -> Case:
    """A workload at the size of the evaluation, with changes. Raises `ValueError`."""
    name, changes = parse_workload(text)
    workload = replace(WORKLOADS[name].workload, factor=factor)
    return Case(text, name, workload.changed(name, changes))


class Runs:
    """All runs of a command. Writes the report after each run, and enforces the time budget."""

    def __init__(
        self, args: argparse.Namespace, host: Host, text: TextSource, report: Report
    ) -> None:
        self._args = args
        self._host = host
        self._text = text
        self._report = report
        self._began = time.monotonic()

    def run(self, cases: Sequence[Case], settings: Sequence[Setting]) -> None:
        if self._args.warm_up:
            self._measure(cases[0], settings[0], 0, _WARM_UP)
        for case in cases:
            for repeat in range(self._args.repeat):
                for place, setting in enumerate(settings):
                    if self._is_over_budget():
                        print("the budget is used up", flush=True)
                        return
                    self._run_one(case, setting, place, repeat)

    def _is_over_budget(self) -> bool:
        budget = self._args.budget
        return budget is not None and time.monotonic() - self._began > budget

    def _run_one(self, case: Case, setting: Setting, place: int, repeat: int) -> None:
        title = f"{case.text} {setting.name} #{repeat}"
        print(f"{time.monotonic() - self._began:7.1f} s  {title}", flush=True)
        figures = summarise(self._measure(case, setting, place, repeat))
        runs = self._report.setdefault("runs", [])
        runs.append(
            {
                "case": case.text,
                "workload": case.name,
                "parameters": case.workload.parameters(),
                "setting": setting.name,
                "style": setting.style,
                "overrides": dict(setting.overrides),
                "repeat": repeat,
                "figures": figures,
            }
        )
        self._report["ratios"] = ratios(runs)
        self._report.save()
        times = [f"{name} {seconds:.3f} s" for name, seconds in key_figures(figures).items()]
        tokens = [f"{name} {count}" for name, count in figures["tokens"].items()]
        print(" " * 11 + ", ".join([*times, *tokens, *figures["first_errors"]]), flush=True)

    def _measure(self, case: Case, setting: Setting, place: int, repeat: int) -> Run:
        """All settings get the same lengths and arrivals in one repetition. They get different
        words if a server would have cached the words of the previous setting."""
        args = self._args
        text = self._text.of_side(0 if self._host.forgets else place).salted((args.seed, repeat))
        plan = case.workload.plan(text, args.seed + repeat)
        others = None
        if args.bystanders:
            others = Bystanders(text, args.bystanders, args.alone, args.scale)

        async def run(backend: CountedBackend) -> Run:
            await JobRunner(backend).run(learning_plan(text, args.learn, args.scale))
            return await run_plan(
                backend,
                plan,
                bystanders=others,
                time_limit_s=args.time_limit,
                prepared=args.open_sessions,
            )

        return self._host.run(setting, run, args.seed + repeat)


def learning_plan(text: TextSource, requests: int, factor: float) -> Plan:
    """Requests of many sizes that are not recorded. A ServeCore that just started learns from them
    how fast its engines are. Their outputs are short."""
    jobs = []
    for number, (prompt, output) in enumerate(lengths_256()[:requests]):
        query = text.data(max(1, round(prompt * factor)), "learning", number)
        jobs.append(request("learning", [query], max(1, round(output * factor / 10))))
    return Plan(jobs)


@contextmanager
def _host(args: argparse.Namespace) -> Iterator[Host]:
    if args.sim is not None:
        path = args.sim if args.sim.name else None
        yield SimHost(args.client_rtt, path, args.engines or 1)
    else:
        host = ClusterHost(args.client_rtt, args.launch, args.engines, args.log_dir)
        with host.cluster:
            yield host


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {k: v for k, v in vars(args).items() if k != "command" and v is not None}
    return {k: json.loads(json.dumps(v, default=str)) for k, v in given.items()}
