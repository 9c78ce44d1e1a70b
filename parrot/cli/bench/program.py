"""The words of workloads: texts of given lengths, and the calls of one run, on any backend."""

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PromptText:
    """A piece of a prompt and its length in tokens. `is_data`: the caller passes it in at run time;
    otherwise it belongs to the function, like an instruction."""

    content: str
    tokens: int
    is_data: bool = False


class TextSource:
    """Words that are `tokens_per_word` each: one wherever they stand, or so many at the mean. The
    same key gives the same text; `salt` (of a repetition) gives other texts of the same lengths."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        salt: object = 0,
        documents: Sequence[str] | None = None,
        tokens_per_word: float = 1.0,
    ) -> None:
        self._words = words
        self._salt = salt
        self._documents = documents
        self._tokens_per_word = tokens_per_word

    def salted(self, salt: object) -> "TextSource":
        return TextSource(
            self._words,
            salt=salt,
            documents=self._documents,
            tokens_per_word=self._tokens_per_word,
        )

    def constant(self, tokens: int, *key: object) -> PromptText:
        rng = random.Random(hashlib.sha256(repr((self._salt, key)).encode()).digest())
        num_words = max(1, round(tokens / self._tokens_per_word))
        return PromptText("".join(rng.choices(self._words, k=num_words)), tokens)

    def data(self, tokens: int, *key: object) -> PromptText:
        return replace(self.constant(tokens, *key), is_data=True)

    def document(self, number: int, tokens: int, chunk: int) -> list[PromptText]:
        """A document of `tokens` in chunks, the last of which may be shorter."""
        sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
        if self._documents is None:
            return [self.data(n, "document", number, i, chunk) for i, n in enumerate(sizes)]
        pieces = _cut(self._documents[number % len(self._documents)], sizes)
        return [PromptText(piece, n, is_data=True) for piece, n in zip(pieces, sizes, strict=False)]


def _cut(document: str, sizes: Sequence[int]) -> Iterator[str]:
    """Parts with as many words each: a real text's tokens are counted by the server."""
    words = re.findall(r"\s*\S+", document)
    start = 0
    for size in sizes:
        if part := "".join(words[start : start + size]):
            yield part
        start += size


# Words that most vocabularies have as one token each, with the space before them.
_WORDS = """
about after again all also always and another any area around ask away back because become
before begin being best better between big book both bring business but call came can car change
child children city close come company could country course day did different do does door down
each early end even every face fact family far feel few find first follow food for form found
four friend from full game gave get girl give go good government great group grow had half hand
hard has have head hear help here high him hold home hour house how human idea important in into
it job just keep kind know land large last late law lead learn leave left less let letter life
light like line list little live local long look lost made main make man many may mean meet
member men mind minute money month more morning most mother move much music must name near need
never new next night no not now number of off office often old on once one only open or order
other our out over own page paper part party past pay people place plan play point power problem
public put question read real reason right river road room run said same saw say school sea see
seem service set she short should show side since small so some sound state still stop story
street such sun sure system table take talk team tell than that the them then there these they
thing think third this those thought three through time to today together told too took top town
tree true turn two under until up us use very voice walk want war was watch water way we week
well went were what when where which while white who whole why will with without woman word work
world would write year yes yet young your
"""
COMMON_WORDS = [" " + word for word in _WORDS.split()]


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
