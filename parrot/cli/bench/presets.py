"""The workloads of the command, at sizes that a laptop finishes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from parrot.cli.bench.plan import Plan, Workload
from parrot.cli.bench.text import TextSource
from parrot.cli.bench.workloads.agents import MultiAgent
from parrot.cli.bench.workloads.arrivals import poisson
from parrot.cli.bench.workloads.documents import Chain, MapReduce
from parrot.cli.bench.workloads.requests import Copilot, Requests

_OF_DOCUMENTS = {
    "num_requests": "documents",
    "prompt_tokens": "document_tokens",
    "output_tokens": "output",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """`options`: the workload's parameter for each option of the command that it has."""

    workload: Workload
    options: Mapping[str, str]
    is_application: bool = True


PRESETS = {
    "requests": Preset(
        Requests(),
        {
            "num_requests": "requests",
            "prompt_tokens": "prompt",
            "prefix_tokens": "prefix",
            "output_tokens": "output",
        },
        is_application=False,
    ),
    "map_reduce": Preset(
        MapReduce(documents=2, document_tokens=1024, chunk=128, output=32), _OF_DOCUMENTS
    ),
    "chain": Preset(Chain(documents=2, document_tokens=1024, chunk=128, output=32), _OF_DOCUMENTS),
    "multi_agent": Preset(
        MultiAgent(factor=0.1, files=4, num_rounds=1), {"num_requests": "applications"}
    ),
    "copilot": Preset(Copilot(factor=0.1, batch=16, streamed=True), {"num_requests": "batch"}),
}


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and when its jobs begin: at most `concurrency` at once, or also at random times
    with `request_rate` of them a second."""

    name: str
    workload: Workload
    concurrency: int | None
    request_rate: float | None

    @property
    def is_application(self) -> bool:
        return PRESETS[self.name].is_application

    def plan(self, text: TextSource, seed: int) -> Plan:
        """Raises `ValueError` for parameters that contradict each other."""
        jobs = self.workload.plan(text, seed).jobs
        if self.request_rate is not None:
            starts = poisson(random.Random(seed), self.request_rate, len(jobs))
            jobs = [replace(job, start_s=at) for job, at in zip(jobs, starts, strict=True)]
        return Plan(jobs, self.concurrency)


def parse_load(
    text: str,
    options: Mapping[str, int | None],
    concurrency: int | None,
    request_rate: float | None,
) -> Load:
    """`text`: NAME[:KEY=VALUE,...]. `options`: those of the command, None where not given. Raises
    `ValueError` that says what there is."""
    name, _, rest = text.partition(":")
    preset = PRESETS.get(name)
    if preset is None:
        raise ValueError(f"no workload {name!r}: it may be {', '.join(PRESETS)}")
    changes = dict(_pair(part) for part in rest.split(",") if part)
    for option, value in options.items():
        if value is None:
            continue
        if option not in preset.options:
            own = ", ".join(f"--{known}" for known in preset.options)
            raise ValueError(
                f"--{option} is nothing that {name} has; of such options it has {own}, and "
                f"--workload {name}:KEY=VALUE sets {', '.join(preset.workload.parameters())}"
            )
        changes[preset.options[option]] = str(value)
    return Load(name, preset.workload.changed(changes), concurrency, request_rate)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--workload: {text!r} is not KEY=VALUE")
    return name, value
