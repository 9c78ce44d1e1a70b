"""The plan of a workload: parameters, and from them jobs that arrive at given times."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from parrot.cli.bench.program import Program
from parrot.cli.bench.text import TextSource


@dataclass(frozen=True, slots=True)
class Job:
    """One application, or one request of a user. `start_s`: seconds after the beginning."""

    kind: str
    run: Callable[[Program], Awaitable[None]]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`concurrency`: so many jobs run at once, and the others wait; None: as many as are due."""

    jobs: Sequence[Job]
    concurrency: int | None = None


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
        values = {name: _parse(name, types[name], value) for name, value in changes.items()}
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


def _parse(name: str, kind: type, value: str) -> Any:
    if kind is bool:
        return value.lower() in ("1", "true", "yes")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {value!r}") from None
