"""Agents that replay recorded sessions: growing chats with tool calls or users between turns.

A seat runs one agent after the other. An agent sends its whole history with every turn, as chat
APIs require, and then pauses as long as in the recording. The first agent of a seat begins in the
middle of its session, so that agents have different ages."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from parrot.protocol.transport import Transport

RECORDED = Path(__file__).parent / "sessions.json"
MIN_OUTPUT = 8  # The shortest output, in tokens.
_LAST_STARTED = 20  # First agents do not begin in this many last turns of a session.
_STAGGER = 0.1  # The first agents begin within this fraction of the duration.

MakeText = Callable[[random.Random, int], str]
"""Makes a text of about this number of tokens."""


class Recorded(NamedTuple):
    """A recorded turn: the tokens of its input, of its output, and of the prefix that its input
    shares with the previous turn's input, and the seconds between the turns."""

    input: int
    output: int
    shared: int
    wait_s: float


@dataclass(frozen=True)
class Setup:
    """`scale` multiplies all lengths. Sessions end before `max_len` tokens. Pauses are at most
    `max_wait_s`. Turns that begin in the first `warm_up_s` are not counted."""

    num_agents: int
    scale: float
    max_len: int
    max_wait_s: float = 45.0
    warm_up_s: float = 210.0
    duration_s: float = 600.0
    seed: int = 11


@dataclass(slots=True)
class Turn:
    """`first` and `end` are None until they happen. `ideal`: prompt tokens that the previous turn
    had computed."""

    seat: int
    start: float
    ideal: int
    first: float | None = None
    end: float | None = None
    prompt: int = 0
    cached: int = 0


@dataclass
class History:
    """The messages of a chat, each with its tokens."""

    messages: list[dict[str, str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def add(self, role: str, text: str, num_tokens: int) -> None:
        self.messages.append({"role": role, "content": text})
        self.lengths.append(num_tokens)

    def rewind(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        while self.messages and self.num_tokens > num_tokens:
            message, length = self.messages.pop(), self.lengths.pop()
            if (rest := num_tokens - self.num_tokens) > 0:
                text = message["content"]
                self.add(message["role"], text[: len(text) * rest // length], rest)


def recorded_sessions() -> list[list[Recorded]]:
    content = json.loads(RECORDED.read_text())
    return [[Recorded(*turn) for turn in session] for session in content["sessions"]]


class Replay:
    """Sends chat completions for `model` to `transport`."""

    def __init__(self, setup: Setup, transport: Transport, model: str, text: MakeText) -> None:
        self.setup = setup
        self.turns: list[Turn] = []
        self._transport = transport
        self._model = model
        self._text = text
        sessions = recorded_sessions()
        random.Random(setup.seed).shuffle(sessions)
        self._sessions: Iterator[list[Recorded]] = cycle(sessions)
        self._now = asyncio.get_running_loop().time
        self._began = self._now()

    async def run(self) -> None:
        """Raises the first error that an agent gets."""
        seats = (self._seat(seat) for seat in range(self.setup.num_agents))
        with suppress(TimeoutError):
            async with asyncio.timeout(self.setup.duration_s):
                await asyncio.gather(*seats)

    async def _seat(self, seat: int) -> None:
        draw = random.Random(self.setup.seed * 1000 + seat)
        session = next(self._sessions)
        await asyncio.sleep(draw.random() * self.setup.duration_s * _STAGGER)
        begin = draw.randrange(max(1, len(session) - _LAST_STARTED))
        for number in range(10**6):
            await self._agent(seat, f"agent {seat}.{number}", session[begin:], draw)
            session, begin = next(self._sessions), 0

    async def _agent(
        self, seat: int, name: str, session: list[Recorded], draw: random.Random
    ) -> None:
        setup, history, last_input = self.setup, History(), 0
        for number, turn in enumerate(session):
            num_in, num_shared = int(turn.input * setup.scale), int(turn.shared * setup.scale)
            num_out = max(MIN_OUTPUT, int(turn.output * setup.scale))
            if num_in + num_out > setup.max_len:
                return
            if number:
                await asyncio.sleep(min(turn.wait_s, setup.max_wait_s))
                if num_shared < int(0.98 * last_input):
                    history.rewind(num_shared)
            num_new = max(MIN_OUTPUT, num_in - history.num_tokens)
            history.add("user", self._text(draw, num_new), num_new)
            last_input = history.num_tokens
            entry = Turn(seat, self._now(), min(num_shared, num_in) if number else 0)
            self.turns.append(entry)
            answer = await self._ask(name, entry, history.messages, num_out)
            history.add("assistant", answer, num_out)

    async def _ask(
        self, name: str, turn: Turn, messages: list[dict[str, str]], num_out: int
    ) -> str:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": num_out,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "prompt_cache_key": name,
        }
        text = ""
        path = "/v1/chat/completions"
        events = self._transport.stream("POST", path, body=body, idle_timeout_s=900.0)
        async with aclosing(events):
            async for _, data in events:
                if data.strip() == b"[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                for choice in event["choices"]:
                    if new := choice["delta"].get("content"):
                        turn.first = turn.first or self._now()
                        text += new
                if usage := event.get("usage"):
                    turn.prompt = usage["prompt_tokens"]
                    turn.cached = usage["prompt_tokens_details"]["cached_tokens"]
        turn.end = self._now()
        return text

    def figures(self) -> dict[str, Any]:
        """Figures of the turns after the warm-up; first turns of sessions are separate."""
        setup = self.setup
        begin, end = self._began + setup.warm_up_s, self._began + setup.duration_s
        counted = [turn for turn in self.turns if begin <= turn.start < end and turn.ideal]
        done = [turn for turn in counted if turn.end is not None and turn.first is not None]
        firsts = sorted(turn.first - turn.start for turn in done if turn.first is not None)
        waits = self._waits(counted, end)
        finished = [t for t in self.turns if t.end is not None and begin <= t.end < end]
        ideal = sum(turn.ideal for turn in done)
        return {
            "num_turns": len(done),
            "hit_of_ideal": sum(min(t.cached, t.ideal) for t in done) / ideal if ideal else 0.0,
            "ttft_p50_s": median(firsts) if firsts else None,
            "ttft_p90_s": firsts[int(0.9 * len(firsts))] if firsts else None,
            "turns_per_s": len(finished) / (end - begin),
            "computed_tokens_per_s": sum(t.prompt - t.cached for t in finished) / (end - begin),
            "mean_prompt": fmean(t.prompt for t in done) if done else 0.0,
            "mean_wait_s": fmean(waits) if waits else None,
            "longest_wait_over_mean": max(waits) / fmean(waits) if any(waits) else None,
        }

    def _waits(self, counted: list[Turn], end: float) -> list[float]:
        """The mean time to first token of each seat, in seconds, including a turn that still waits.

        Turns from the warm-up are left out, since all agents began at once there. First turns are
        left out, since their time depends on the session's initial length."""
        spent: dict[int, list[float]] = {}
        for turn in counted:
            spent.setdefault(turn.seat, []).append((turn.first or end) - turn.start)
        return [fmean(seconds) for seconds in spent.values()]
