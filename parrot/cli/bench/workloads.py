"""All workloads by name, and how a command line names one: NAME[:KEY=VALUE,...]."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parrot.cli.bench.agents import BestOfN, FanoutCold, MultiAgent, ToolPause
from parrot.cli.bench.documents import Chain, MapReduce, Rag, RefineLoop
from parrot.cli.bench.mixes import ChainBackground, JobMix, Mixed
from parrot.cli.bench.plan import Plan, Workload, poisson
from parrot.cli.bench.requests import Copilot, Gpts, Load256, Requests
from parrot.cli.bench.text import TextSource


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """A workload at the size of the evaluation. `small`: its changes for `parrot bench`, so that a
    laptop finishes within a minute. `options`: the parameter that each option of `parrot bench`
    sets."""

    workload: Workload
    small: Mapping[str, Any]
    options: Mapping[str, str]
    is_application: bool = True

    def laptop(self) -> Workload:
        return replace(self.workload, **self.small)


_TENTH = {"factor": 0.1}
_DOCUMENT = {"document_tokens": 1024, "chunk": 128, "output": 32}
_OF_DOCUMENTS = {
    "num_requests": "documents",
    "prompt_tokens": "document_tokens",
    "output_tokens": "output",
}
_OF_REQUESTS = {
    "num_requests": "requests",
    "prompt_tokens": "prompt",
    "prefix_tokens": "prefix",
    "output_tokens": "output",
}


def _counted(parameter: str) -> dict[str, str]:
    return {"num_requests": parameter}


WORKLOADS = {
    "requests": NamedWorkload(Requests(), {}, _OF_REQUESTS, is_application=False),
    "map_reduce": NamedWorkload(MapReduce(), _DOCUMENT | {"documents": 2}, _OF_DOCUMENTS),
    "chain": NamedWorkload(Chain(), _DOCUMENT | {"documents": 2}, _OF_DOCUMENTS),
    "chain_many": NamedWorkload(
        Chain(documents=25, chunk=2048, at_once=0), _DOCUMENT | {"documents": 4}, _OF_DOCUMENTS
    ),
    "chain_background": NamedWorkload(
        ChainBackground(), _DOCUMENT | {"seconds": 5.0}, _OF_DOCUMENTS
    ),
    "multi_agent": NamedWorkload(
        MultiAgent(), _TENTH | {"files": 4, "num_rounds": 1}, _counted("applications")
    ),
    "copilot": NamedWorkload(
        Copilot(), _TENTH | {"batch": 16, "streamed": True}, _counted("batch")
    ),
    "roots4": NamedWorkload(
        Copilot(systems=4), _TENTH | {"batch": 16, "streamed": True}, _counted("batch")
    ),
    "gpts": NamedWorkload(Gpts(), _TENTH | {"requests": 16}, _counted("requests")),
    "mixed": NamedWorkload(Mixed(), _TENTH | {"chats": 8, "applications": 2}, _counted("chats")),
    "refine_loop": NamedWorkload(RefineLoop(), _TENTH, _counted("texts")),
    "best_of_n": NamedWorkload(BestOfN(), _TENTH, _counted("applications")),
    "rag": NamedWorkload(Rag(), _TENTH | {"users": 4}, _counted("users")),
    "tool_pause": NamedWorkload(
        ToolPause(), _TENTH | {"chats": 4, "turns": 3, "longest_s": 5.0}, _counted("chats")
    ),
    "fanout_cold": NamedWorkload(FanoutCold(), _TENTH | {"siblings": 8}, _counted("siblings")),
    "256": NamedWorkload(Load256(), _TENTH | {"requests": 16}, _counted("requests")),
    "job_mix": NamedWorkload(JobMix(), _TENTH | {"jobs": 8}, _counted("jobs")),
}


@dataclass(frozen=True, slots=True)
class TimedWorkload:
    """A workload and the start times of its jobs: at most `concurrency` at once, or (with
    `request_rate`) a Poisson stream."""

    name: str
    workload: Workload
    concurrency: int | None
    request_rate: float | None

    @property
    def is_application(self) -> bool:
        return WORKLOADS[self.name].is_application

    def plan(self, text: TextSource, seed: int) -> Plan:
        """Raises `ValueError` for parameters that contradict each other."""
        jobs = self.workload.plan(text, seed).jobs
        if self.request_rate is not None:
            starts = poisson(random.Random(seed), self.request_rate, len(jobs))
            jobs = [replace(job, start_s=at) for job, at in zip(jobs, starts, strict=True)]
        return Plan(jobs, self.concurrency)


def parse_workload(text: str) -> tuple[str, dict[str, str]]:
    """The name and the changes in NAME[:KEY=VALUE,...]. Raises `ValueError`."""
    name, _, rest = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return name, dict(_pair(part) for part in rest.split(",") if part)


def parse_load(
    text: str,
    options: Mapping[str, int | None],
    concurrency: int | None,
    request_rate: float | None,
) -> TimedWorkload:
    """A small workload with the changes of `text` and of the command's options. Raises
    `ValueError`."""
    name, changes = parse_workload(text)
    named = WORKLOADS[name]
    for option, value in options.items():
        if value is None:
            continue
        if option not in named.options:
            own = ", ".join(f"--{known}" for known in named.options)
            raise ValueError(
                f"--{option} is not an option of {name}, which has {own}; "
                f"--workload {name}:KEY=VALUE sets {', '.join(named.workload.parameters())}"
            )
        changes[named.options[option]] = str(value)
    workload = named.laptop().changed(name, changes)
    return TimedWorkload(name, workload, concurrency, request_rate)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--workload: {text!r} is not KEY=VALUE")
    return name, value
