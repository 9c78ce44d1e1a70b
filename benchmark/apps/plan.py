"""What a workload is: parameters, and from them jobs that arrive at given times."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from benchmark.apps.program import Program
from benchmark.apps.text import TextSource


@dataclass(frozen=True, slots=True)
class Job:
    """One application, or one request of a user. `start_s`: seconds after the beginning."""

    kind: str
    run: Callable[[Program], Awaitable[None]]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`one_by_one`: each job begins when the one before has ended."""

    jobs: Sequence[Job]
    one_by_one: bool = False


def numbered(kind: str, count: int, run: Callable[..., Awaitable[None]], **given: Any) -> list[Job]:
    """Applications of one kind, each of which is told its `number`."""
    return [Job(kind, partial(run, number=number, **given)) for number in range(count)]


@dataclass(frozen=True)
class Workload(ABC):
    """Subclasses are frozen dataclasses whose fields are the parameters. Lengths are given at full
    size; `factor` makes all of them smaller for slow machines."""

    NAME: ClassVar[str]
    SWEEP: ClassVar[Mapping[str, Sequence[Any]]] = {}  # what the original evaluation varied

    factor: float = 1.0

    @abstractmethod
    def plan(self, text: TextSource, seed: int) -> Plan:
        """The same arguments give the same jobs."""

    def sized(self, tokens: int) -> int:
        """A length at this factor, at least 1 token."""
        return max(1, round(tokens * self.factor))

    def changed(self, changes: Mapping[str, str]) -> Self:
        """With parameters from the command line. Raises `ValueError` naming an unknown one."""
        types = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name in changes:
            if name not in types:
                raise ValueError(f"{self.NAME} has no parameter {name!r}: {', '.join(types)}")
        values = {name: _parse(types[name], value) for name, value in changes.items()}
        return dataclasses.replace(self, **values)

    def parameters(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def sweep(self) -> list[Self]:
        """One workload for each value that the original evaluation took, the others as they are."""
        return [
            dataclasses.replace(self, **{name: value})
            for name, values in self.SWEEP.items()
            for value in values
        ]


def _parse(kind: type, value: str) -> Any:
    if kind is bool:
        return value.lower() in ("1", "true", "yes")
    return kind(value)
