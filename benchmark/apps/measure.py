"""All runs of one command: cases x repetitions x settings, settings in turns."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmark.apps.backends import CountedBackend
from benchmark.apps.hosts import (
    ClusterHost,
    Host,
    ServerHost,
    Setting,
    SimHost,
    features,
    parse_setting,
)
from benchmark.apps.metrics import (
    Bystanders,
    Figures,
    PlanRunner,
    Run,
    key_figures,
    ratios,
    summarise,
)
from benchmark.apps.text import one_token_words
from benchmark.apps.workloads import WORKLOADS, lengths_256
from benchmark.results import Report
from parrot.cli.bench.plan import Plan, Workload
from parrot.cli.bench.text import TextSource
from parrot.cli.bench.workloads import request

GOODPUT_SLACK = 1.5  # times the median of the first run
_WARM_UP = -1  # the repetition that is not recorded


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Workload


def measure(args: argparse.Namespace, report: Report) -> None:
    """Raises `ValueError` for arguments that make no sense."""
    settings = _settings(args)
    cases = [case for text in args.workloads for case in parse_cases(text, args)]
    with _host(args) as host:
        text = _text_source(args, host)
        servers = host.describe()
        report |= {"arguments": _arguments(args), "servers": servers}
        report.uses("servers", servers)
        report.save()
        Runs(args, host, text, report).run(cases, settings)


def parse_cases(text: str, args: argparse.Namespace) -> list[Case]:
    """`NAME[:KEY=VALUE,...]`; with `--sweep` the original's variations of it."""
    name, _, rest = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}: {', '.join(WORKLOADS)}")
    changes = dict(_pair(part) for part in rest.split(",") if part)
    workload = WORKLOADS[name](factor=args.scale).changed(changes)
    if not args.sweep:
        return [Case(text, workload)]
    return [Case(_case_name(name, variant), variant) for variant in workload.sweep() or [workload]]


def _case_name(name: str, workload: Workload) -> str:
    """With the parameters that are not the workload's own."""
    usual = type(workload)(factor=workload.factor).parameters()
    changed = {k: v for k, v in workload.parameters().items() if v != usual[k]}
    return ":".join([name, ",".join(f"{k}={v}" for k, v in changed.items())]).rstrip(":")


class Runs:
    """Keeps the report, which is written after each run, and the time."""

    def __init__(
        self, args: argparse.Namespace, host: Host, text: TextSource, report: Report
    ) -> None:
        self._args = args
        self._host = host
        self._text = text
        self._report = report
        self._began = time.monotonic()
        self._deadlines: dict[str, float] = {}
        self._places: dict[Setting, int] = {}

    def run(self, cases: Sequence[Case], settings: Sequence[Setting]) -> None:
        ours = [setting for setting in settings if setting.base_url is None]
        self._places = {s: ours.index(s) if s in ours else 0 for s in settings}
        if self._args.warm_up:
            self._measure(cases[0], settings[0], _WARM_UP)
        for case in cases:
            for repeat in range(self._args.repeat):
                for setting in settings:
                    if self._is_over_budget():
                        print("the budget is used up", flush=True)
                        return
                    self._run_one(case, setting, repeat)

    def _is_over_budget(self) -> bool:
        budget = self._args.budget
        return budget is not None and time.monotonic() - self._began > budget

    def _run_one(self, case: Case, setting: Setting, repeat: int) -> None:
        title = f"{case.name} {setting.name} #{repeat}"
        print(f"{time.monotonic() - self._began:7.1f} s  {title}", flush=True)
        run = self._measure(case, setting, repeat)
        figures = summarise(run, self._deadline(case, run))
        runs = self._report.setdefault("runs", [])
        runs.append(
            {
                "case": case.name,
                "workload": case.workload.NAME,
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
        print(f"           {_line(figures)}", flush=True)

    def _measure(self, case: Case, setting: Setting, repeat: int) -> Run:
        """The same lengths and arrivals in the same repetition. The words differ where a server
        would remember them from the setting before."""
        args = self._args
        place = 0 if self._host.forgets else self._places[setting]
        text = self._text.of_side(place).salted((args.seed, repeat))
        plan: Plan = case.workload.plan(text, args.seed + repeat)
        bystanders = None
        if args.bystanders:
            bystanders = Bystanders(args.bystanders, args.alone, args.scale)

        async def run(backend: CountedBackend) -> Run:
            if args.learn:
                await PlanRunner(backend, text).run(learning_plan(text, args.learn, args.scale))
            runner = PlanRunner(
                backend,
                text,
                bystanders=bystanders,
                time_limit_s=args.time_limit,
                prepared=args.open_sessions,
            )
            return await runner.run(plan)

        return self._host.run(setting, run, args.seed + repeat)

    def _deadline(self, case: Case, run: Run) -> float | None:
        """The same for all runs of a case."""
        if self._args.deadline is not None:
            return float(self._args.deadline)
        times = sorted(job.seconds for job in run.jobs if job.seconds is not None)
        if times:
            self._deadlines.setdefault(case.name, GOODPUT_SLACK * times[len(times) // 2])
        return self._deadlines.get(case.name)


def learning_plan(text: TextSource, requests: int, factor: float) -> Plan:
    """Unrecorded requests of many sizes before each run, so that a ServeCore that was just started
    can learn how fast its engines are. Their outputs are short."""
    jobs = []
    for number, (prompt, output) in enumerate(lengths_256()[:requests]):
        query = text.data(max(1, round(prompt * factor)), "learning", number)
        jobs.append(request("learning", [query], max(1, round(output * factor / 10))))
    return Plan(jobs)


def _line(figures: Figures) -> str:
    tokens = figures["tokens"]
    times = [f"{name} {seconds:.3f} s" for name, seconds in key_figures(figures).items()]
    parts = [
        *times,
        f"{figures['output_tokens_per_s']:.0f} tok/s",
        f"{tokens['calls_done']}/{tokens['calls']} calls",
        f"prompt {tokens['prompt']} (planned {tokens['prompt_planned']})",
        f"recomputed {tokens['recomputed']}",
    ]
    if figures["first_errors"]:
        parts.append(f"{figures['num_errors']} errors: {figures['first_errors'][0]}")
    return ", ".join(parts)


def _settings(args: argparse.Namespace) -> list[Setting]:
    if args.compare:
        return [parse_setting(text) for text in args.compare]
    if unknown := set(args.off) - set(features()):
        raise ValueError(f"unknown feature {min(unknown)!r}: {', '.join(features())}")
    what = "all-off" if args.all_off else ",".join(f"-{name}" for name in args.off) or "on"
    return [parse_setting(args.backend if args.backend == "openai" else f"{args.backend}:{what}")]


@contextmanager
def _host(args: argparse.Namespace) -> Iterator[Host]:
    if args.sim is not None:
        path = args.sim if args.sim.name else None
        yield SimHost(args.client_rtt, path, args.engines or 1)
    elif args.launch:
        host = ClusterHost(args.client_rtt, args.launch, args.engines, args.log_dir)
        with host.cluster:
            yield host
    else:
        yield ServerHost(args.client_rtt, args.base_url.rstrip("/"), args.api_key, args.model)


def _text_source(args: argparse.Namespace, host: Host) -> TextSource:
    definition = args.tokenizer.read_text() if args.tokenizer else host.tokenizer_json()
    if definition is None:
        raise ValueError("this server does not give its tokenizer: name it with --tokenizer")
    return TextSource(one_token_words(definition))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return name, value


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    given = {k: v for k, v in vars(args).items() if k != "command" and v is not None}
    return {k: json.loads(json.dumps(v, default=str)) for k, v in given.items()}
