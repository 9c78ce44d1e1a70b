"""The programs of workloads: their calls, on any backend, and what a run of them counts."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from parrot.cli.bench.text import PromptText


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """`arrivals`: when each piece came, at least one, in the loop's time. `tokens`: as the server
    counted them; None: it did not say."""

    arrivals: tuple[float, ...]
    tokens: int | None = None

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each piece to the next."""
        return [after - before for before, after in pairwise(self.arrivals)]

    def later(self, seconds: float) -> "StreamTimes":
        return StreamTimes(tuple(at + seconds for at in self.arrivals), self.tokens)


@dataclass(eq=False, slots=True, repr=False)  # a repr would show the whole graph
class ProgramOutput:
    """A value that a call will give, or (`call` None) what the program will set later."""

    name: str
    tokens: int
    call: "ProgramCall | None" = None


Piece = PromptText | ProgramOutput


@dataclass(eq=False, slots=True, repr=False)  # a repr would show the whole graph
class ProgramCall:
    """`seed`: sampled, with this seed; None: greedy. `streamed`: its reader takes it piece by
    piece. `stop`: a text that ends the output. Without one, lengths are exact: the end of text is
    ignored."""

    function: str
    prompt: tuple[Piece, ...]
    output: ProgramOutput
    seed: int | None = None
    streamed: bool = False
    stop: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)

    @property
    def inputs(self) -> list[ProgramOutput]:
        return [piece for piece in self.prompt if isinstance(piece, ProgramOutput)]


@dataclass(frozen=True, slots=True)
class CallUsage:
    """Tokens of a completed call as the server counted them; None: it does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    engine: str | None = None


@dataclass(slots=True)
class ProgramAccount:
    """`calls`: all that the program made. `usages`: those the server ran to their end. `streams`:
    outputs that were read piece by piece."""

    calls: list[ProgramCall] = field(default_factory=list)
    usages: list[CallUsage] = field(default_factory=list)
    streams: dict[ProgramOutput, StreamTimes] = field(default_factory=dict)


class Program(ABC):
    """One run of an application. `call` returns at once; only reads wait. `began`: since when its
    completion time counts, in the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.account = ProgramAccount()
        self.now = now
        self.began = now()

    def begin_now(self) -> None:
        """Begin to measure: what was before is preparation that nobody waits for."""
        self.began = self.now()

    def call(
        self,
        function: str,
        prompt: Sequence[Piece],
        tokens: int,
        *,
        seed: int | None = None,
        streamed: bool = False,
        stop: str | None = None,
    ) -> ProgramOutput:
        """A call of a semantic function whose output has exactly `tokens`, or with a `stop` as
        many at most."""
        output = ProgramOutput(f"{function}_{len(self.account.calls)}", max(1, tokens))
        output.call = ProgramCall(function, tuple(prompt), output, seed, streamed, stop)
        self.account.calls.append(output.call)
        self._add(output.call)
        return output

    def later(self, name: str, tokens: int) -> ProgramOutput:
        """An input that `set` gives its value."""
        output = ProgramOutput(name, tokens)
        self._add_input(output)
        return output

    async def prepare(self) -> None:  # noqa: B027 - most clients have nothing to prepare
        """Do what a client may do before anybody asks for anything, like opening a connection."""

    @abstractmethod
    async def set(self, output: ProgramOutput, text: PromptText) -> None: ...

    @abstractmethod
    async def read(self, *outputs: ProgramOutput) -> None:
        """Wait for all of them; the last reader wants low latency. Outputs of `streamed` calls are
        taken piece by piece."""

    @abstractmethod
    async def read_first(self, outputs: Sequence[ProgramOutput], count: int) -> list[ProgramOutput]:
        """Wait for the first `count`; nobody wants the others any more."""

    async def stream(self, output: ProgramOutput) -> StreamTimes:
        """Wait for the output of a `streamed` call."""
        await self.read(output)
        return self.account.streams[output]

    @abstractmethod
    async def end(self) -> None:
        """Complete the account and release everything. Not part of the program's time."""

    @abstractmethod
    def _add(self, call: ProgramCall) -> None: ...

    @abstractmethod
    def _add_input(self, output: ProgramOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Where the programs of a run run. `program`: a new run of the application of this name.
    `close`: releases connections."""

    program: Callable[[str], Program]
    close: Callable[[], Awaitable[None]]


class Network:
    """As it is: no delay is added. Subclasses add one to each request of the client."""

    is_far = False

    def trip(self) -> AbstractAsyncContextManager[float]:
        """Do in the block what happens at the server; gives the seconds of the way back."""
        return nullcontext(0.0)
