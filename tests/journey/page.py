"""The section "Request path" of docs/internals/architecture.md: steps and classes with state.

steps.toml has the steps and their purposes. The profiler measures their order and the classes
between them. `python -m tests.journey --write` renews the section."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.journey.journeys import Passed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "architecture.md"
_STEPS = Path(__file__).with_name("steps.toml")
_BEGIN, _END = "<!-- steps -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Step:
    """A function on the request path: `file: Class.method`, and the first journey through it."""

    journey: str
    function: str
    why: str


def steps() -> list[Step]:
    content = tomllib.loads(_STEPS.read_text())
    return [Step(**entry) for entry in content["step"]]


def rendered(page: str, passed: Mapping[str, Passed]) -> str:
    """Return the page with new steps. Raises `ValueError` if a step is not on its journey, or if
    the steps are in the wrong order."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{''.join(_lines(steps(), passed))}{_END}{after}"


def _lines(steps: Sequence[Step], passed: Mapping[str, Passed]) -> Iterator[str]:
    beside: dict[Step, list[str]] = {}
    for journey in dict.fromkeys(step.journey for step in steps):
        own = [step for step in steps if step.journey == journey]
        beside |= zip(own, _between(own, passed[journey]), strict=True)
    for number, step in enumerate(steps, start=1):
        yield f"{number}. `{step.function}` - {step.why}\n"
        if others := beside[step]:
            yield f"   <br>Also passed: {', '.join(f'`{other}`' for other in others)}.\n"


def _between(steps: Sequence[Step], passed: Passed) -> list[list[str]]:
    """Return for each step the stateful classes that first occur between it and the next step.
    ServeCore's journeys use a simulated engine. The classes of a real one are in its own
    journey."""
    order = {f"{file}: {name}": at for at, (file, name) in enumerate(passed.functions)}
    if missing := [step.function for step in steps if step.function not in order]:
        raise ValueError(f"not on the way of {steps[0].journey}: {missing}")
    begins = [order[step.function] for step in steps]
    if begins != sorted(begins):
        raise ValueError(f"not in the order of {steps[0].journey}: {begins}")
    own = {step.function.partition(": ")[2].rpartition(".")[0] for step in steps}
    left_out = "parrot.engine" if "engine" not in steps[0].journey else ()
    found: list[list[str]] = [[] for _ in steps]
    for kind in passed.stateful:
        file, function = passed.classes[kind]
        first = order[f"{file}: {function}"]
        at = max((i for i, begin in enumerate(begins) if begin <= first), default=0)
        module, name = kind
        if name not in own and not module.startswith(left_out):
            found[at].append(name.rpartition(">.")[2])
    return [sorted(names) for names in found]
