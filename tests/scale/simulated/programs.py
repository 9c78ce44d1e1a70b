"""Programs of each kind of session, which call ServeCore's methods. They also count the prompt
tokens that a KV cache of unlimited size would have."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from benchmark.agents.replay import MIN_OUTPUT, Recorded, recorded_sessions
from parrot.protocol.errors import EngineFailed, Unavailable
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import (
    CallParameter,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.template import placeholder
from parrot.serve.core import ServeCore
from tests.scale.simulated.traffic import App, Kind, Start

SCALE = 0.25  # Factor on the lengths of recorded agents, as in the measured replay.
_MAX_LEN = 32_000
_MAX_WAIT_S = 120.0
_LAST_STARTED = 20  # An agent that starts mid-session skips to a turn before the last 20.
_THINK_S = 20.0

_sessions = cache(recorded_sessions)


@dataclass(slots=True)
class Call:
    """A submitted call and its outcome."""

    kind: Kind
    submitted: float
    ideal: int  # prompt tokens that an earlier call of any session has computed
    prompt: int
    ended: float | None = None  # None until the call ends
    waited_s: float = 0.0
    cached: int = 0
    computed: int = 0
    attempts: int = 0
    num_ends: int = 0
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of work that a user waits for: a turn, a completion, or a whole map-reduce."""

    kind: Kind
    began: float
    took_s: float


class Text:
    """A part of a prompt that is the value of a variable."""

    def __init__(self, var_id: str, length: int) -> None:
        self.var_id, self.length = var_id, length


class Client:
    """Runs the programs of one ServeCore and records their calls. After `core` has ended, programs
    wait until `serves` is set: a successor then continues their sessions."""

    def __init__(self, core: ServeCore) -> None:
        self.core = core
        self.serves = asyncio.Event()
        self.serves.set()
        self.calls: dict[tuple[int, int], Call] = {}
        self.jobs: list[Job] = []
        self._now = asyncio.get_running_loop().time

    async def run(self, start: Start) -> None:
        """Run a session. A session ends early if one of its calls fails. A new session follows in
        an agent's seat."""
        await self._sleep(start.at - self._now())
        draw, app, is_old = random.Random(start.seed), start.app, start.is_old
        while self._now() < start.until:
            with suppress(EngineFailed):
                if app.kind is Kind.AGENT:
                    await self._agent(draw, app, start.until, is_old=is_old)
                else:
                    await self._session(draw, app)
            if app.kind is not Kind.AGENT:
                return
            is_old = False

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.serves.wait()

    async def _session(self, draw: random.Random, app: App) -> None:
        if app.kind is Kind.CHAT:
            await self._chat(draw, app)
        elif app.kind is Kind.MAP:
            await self._map_reduce(draw, app)
        else:
            session = Session(self, app)
            text = _words(draw, draw.randint(117, 2385))
            await session.ask([session.give(text)], draw.randint(183, 800), ideal=app.shared)
            session.end()

    async def _agent(self, draw: random.Random, app: App, until: float, *, is_old: bool) -> None:
        recorded: list[Recorded] = draw.choice(_sessions())
        begin = draw.randrange(max(1, len(recorded) - _LAST_STARTED)) if is_old else 0
        session, history, before = Session(self, app), list[Text](), 0
        for number, turn in enumerate(recorded[begin:]):
            size, output = int(turn.input * SCALE), max(MIN_OUTPUT, int(turn.output * SCALE))
            if size + output > _MAX_LEN:
                break
            if number:
                await self._sleep(min(turn.wait_s, _MAX_WAIT_S) * draw.uniform(0.8, 1.2))
                if self._now() >= until:
                    break
                kept = int(turn.shared * SCALE)
                if kept < 0.98 * before:
                    while history and app.shared + _length(history) > max(kept, app.shared):
                        history.pop()
            known = app.shared + _length(history)
            new = session.give(_words(draw, max(MIN_OUTPUT, size - known)))
            answer = await session.ask([*history, new], output, ideal=known)
            history += [new, answer]
            before = known + new.length
        session.end()

    async def _chat(self, draw: random.Random, app: App) -> None:
        session, history = Session(self, app), list[Text]()
        for number in range(draw.randint(2, 8)):
            if number:
                await self._sleep(draw.expovariate(1 / _THINK_S))
            new = session.give(_words(draw, draw.randint(20, 200)))
            known = app.shared + _length(history)
            answer = await session.ask([*history, new], draw.randint(50, 250), ideal=known)
            history += [new, answer]
        session.end()

    async def _map_reduce(self, draw: random.Random, app: App) -> None:
        session, began, parts = Session(self, app), self._now(), list[Text]()
        for _ in range(draw.randint(6, 14)):
            text = session.give(_words(draw, draw.randint(300, 900)))
            parts.append(session.submit([text], draw.randint(30, 80), ideal=app.shared))
        total = session.submit(parts, 200, ideal=app.shared)
        await session.read(total)
        self.jobs.append(Job(app.kind, began, self._now() - began))
        session.end()


class Session:
    def __init__(self, client: Client, app: App) -> None:
        self._client, self._app = client, app
        self._now = asyncio.get_running_loop().time
        begun = client.core.begin_session(app.tenant, SessionCreateRequest())
        self._id, self._auth = begun.session_id, begun.session_auth
        self._head = _head(app)

    def give(self, text: str) -> Text:
        var_id = self._client.core.create_var(self._id, self._auth, "given", text)
        return Text(var_id, len(text))

    def submit(self, pieces: list[Text], output: int, *, ideal: int) -> Text:
        """Submit a call whose prompt is the application's shared prefix and then `pieces`."""
        template, size, parameters = self._head, len(self._head), []
        for number, piece in enumerate(pieces):
            name = f"i{number}"
            parameters.append(CallParameter(name=name, is_output=False, var_id=piece.var_id))
            template += placeholder(name)
            size += piece.length
        sampling = SamplingConfig(max_gen_length=output, ignore_tokenizer_eos=True)
        parameters.append(CallParameter(name="out", is_output=True, sampling_config=sampling))
        request = SemanticCallRequest(
            session_id=self._id,
            session_auth=self._auth,
            template=template + placeholder("out"),
            parameters=parameters,
            func_name=f"{self._app.kind}",
        )
        response = self._client.core.submit_call(request)
        self._client.calls[self._id, response.request_id] = Call(
            self._app.kind, self._now(), ideal, size
        )
        return Text(response.param_info[-1].var_id, output)

    async def read(self, text: Text) -> None:
        """Wait for a value. Retries at the successor if ServeCore ends meanwhile."""
        request = VarGetRequest(
            session_id=self._id, session_auth=self._auth, criteria=PerformanceCriteria.LATENCY
        )
        while True:
            core = self._client.core
            try:
                await core.read(request, text.var_id)
                return
            except Unavailable:
                if not core.is_closing:
                    raise
            finally:
                await self._client.serves.wait()

    async def ask(self, pieces: list[Text], output: int, *, ideal: int) -> Text:
        """Submit a call, wait for its answer, and record both as a job."""
        began = self._now()
        answer = self.submit(pieces, output, ideal=ideal)
        await self.read(answer)
        self._client.jobs.append(Job(self._app.kind, began, self._now() - began))
        return answer

    def end(self) -> None:
        self._client.core.delete_session(self._id, self._auth)


def _length(texts: list[Text]) -> int:
    return sum(text.length for text in texts)


@cache
def _head(app: App) -> str:
    """Return the prefix that all prompts of the application share."""
    return _words(random.Random(f"{app.tenant} {app.name}"), app.shared)


def _words(draw: random.Random, size: int) -> str:
    """Return `size` random letters. Each letter is one token."""
    return (f"{draw.getrandbits(128):x} " * (size // 16 + 1))[:size]
