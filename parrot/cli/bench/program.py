"""The interface that workloads are written against: the calls of one run, on any backend."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from parrot.cli.bench.text import Text
from parrot.cli.bench.times import StreamTimes


@dataclass(eq=False, slots=True, repr=False)  # a repr would show the whole graph
class Output:
    """A value that a call will give, or (`call` None) what the program will set later."""

    name: str
    tokens: int
    call: "Call | None" = None


Piece = Text | Output


@dataclass(eq=False, slots=True, repr=False)  # a repr would show the whole graph
class Call:
    """`seed`: sampled, with this seed; None: greedy. `streamed`: its reader takes it piece by
    piece. `stop`: a text that ends the output. Without one, lengths are exact: the end of text is
    ignored."""

    function: str
    prompt: tuple[Piece, ...]
    output: Output
    seed: int | None = None
    streamed: bool = False
    stop: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)

    @property
    def inputs(self) -> list[Output]:
        return [piece for piece in self.prompt if isinstance(piece, Output)]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a completed call as the server counted them; None: it does not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    engine: str | None = None


@dataclass(slots=True)
class Account:
    """`calls`: all that the program made. `usages`: those the server ran to their end. `streams`:
    outputs that were read piece by piece."""

    calls: list[Call] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    streams: dict[Output, StreamTimes] = field(default_factory=dict)


class Program(ABC):
    """One run of an application. `call` returns at once; only reads wait. `began`: since when its
    completion time counts, in the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.account = Account()
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
    ) -> Output:
        """A call of a semantic function whose output has exactly `tokens`, or with a `stop` as
        many at most."""
        output = Output(f"{function}_{len(self.account.calls)}", max(1, tokens))
        output.call = Call(function, tuple(prompt), output, seed, streamed, stop)
        self.account.calls.append(output.call)
        self._add(output.call)
        return output

    def later(self, name: str, tokens: int) -> Output:
        """An input that `set` gives its value."""
        output = Output(name, tokens)
        self._add_input(output)
        return output

    async def prepare(self) -> None:  # noqa: B027 - most clients have nothing to prepare
        """Do what a client may do before anybody asks for anything, like opening a connection."""

    @abstractmethod
    async def set(self, output: Output, text: Text) -> None: ...

    @abstractmethod
    async def read(self, *outputs: Output) -> None:
        """Wait for all of them; the last reader wants low latency. Outputs of `streamed` calls are
        taken piece by piece."""

    @abstractmethod
    async def read_first(self, outputs: Sequence[Output], count: int) -> list[Output]:
        """Wait for the first `count`; nobody wants the others any more."""

    async def stream(self, output: Output) -> StreamTimes:
        """Wait for the output of a `streamed` call."""
        await self.read(output)
        return self.account.streams[output]

    @abstractmethod
    async def end(self) -> None:
        """Complete the account and release everything. Not part of the program's time."""

    @abstractmethod
    def _add(self, call: Call) -> None: ...

    @abstractmethod
    def _add_input(self, output: Output) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Where the programs of a run run. `program`: a new run of the application of this name.
    `close`: releases connections."""

    program: Callable[[str], Program]
    close: Callable[[], Awaitable[None]]
