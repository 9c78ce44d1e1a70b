"""The programs of workloads: their calls, on any backend, and the account of a run."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from parrot.cli.bench.text import PromptText


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """`arrivals`: when each piece arrived, at least one, in the loop's time. `tokens`: the server's
    count; None: the server did not send one."""

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
    """The future output of `call`. With `call` None, an input that the program sets later."""

    name: str
    tokens: int
    call: "ProgramCall | None" = None


Piece = PromptText | ProgramOutput


@dataclass(eq=False, slots=True, repr=False)  # a repr would show the whole graph
class ProgramCall:
    """`seed`: of sampling; None: greedy. `streamed`: the output is read as a stream. `stop`: a text
    that ends the output. Without a stop, the end of text is ignored and lengths are exact."""

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
    """Tokens of a completed call by the server's count; None: the server does not report it.
    `is_reused`: ServeCore took the result of an identical call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    engine: str | None = None
    is_reused: bool = False


@dataclass(slots=True)
class ProgramAccount:
    """`calls`: all calls of the program. `usages`: of the calls that the server completed.
    `streams`: of outputs that were read as a stream."""

    calls: list[ProgramCall] = field(default_factory=list)
    usages: list[CallUsage] = field(default_factory=list)
    streams: dict[ProgramOutput, StreamTimes] = field(default_factory=dict)


class Program(ABC):
    """One run of an application. `call` returns at once; only reads wait. `began`: the start of its
    completion time, in the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.account = ProgramAccount()
        self.now = now
        self.began = now()

    def begin_now(self) -> None:
        """Start the completion time now. The work until now counts as preparation."""
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
        """A call of a semantic function. The output has exactly `tokens`, or at most `tokens` with
        a `stop`."""
        output = ProgramOutput(f"{function}_{len(self.account.calls)}", max(1, tokens))
        output.call = ProgramCall(function, tuple(prompt), output, seed, streamed, stop)
        self.account.calls.append(output.call)
        self._add(output.call)
        return output

    def later(self, name: str, tokens: int) -> ProgramOutput:
        """An input whose value `set` provides."""
        output = ProgramOutput(name, tokens)
        self._add_input(output)
        return output

    async def prepare(self) -> None:  # noqa: B027 - most clients have nothing to prepare
        """Open connections and sessions before the completion time starts."""

    @abstractmethod
    async def set(self, output: ProgramOutput, text: PromptText) -> None: ...

    @abstractmethod
    async def read(self, *outputs: ProgramOutput) -> None:
        """Wait for all of them, with low latency as the goal. Outputs of `streamed` calls are read
        as streams."""

    @abstractmethod
    async def read_first(self, outputs: Sequence[ProgramOutput], count: int) -> list[ProgramOutput]:
        """Wait for the first `count` outputs and cancel the others."""

    async def stream(self, output: ProgramOutput) -> StreamTimes:
        """Wait for the output of a `streamed` call."""
        await self.read(output)
        return self.account.streams[output]

    @abstractmethod
    async def end(self) -> None:
        """Complete the account and release everything. The completion time does not include
        this."""

    @abstractmethod
    def _add(self, call: ProgramCall) -> None: ...

    @abstractmethod
    def _add_input(self, output: ProgramOutput) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """A server that runs programs. `program`: returns a new run of the application of this name.
    `close`: releases connections."""

    program: Callable[[str], Program]
    close: Callable[[], Awaitable[None]]


class Network:
    """Adds no delay. Subclasses add one to each request of the client."""

    def trip(self) -> AbstractAsyncContextManager[float]:
        """Simulate one request around the block, which runs at the server. Yields the latency of
        the answer, in seconds."""
        return nullcontext(0.0)
