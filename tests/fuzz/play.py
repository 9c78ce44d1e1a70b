"""Run a trace on an engine core, step by step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import Outcome
from parrot.engine.core.steps import RunnerInfo
from parrot.protocol.engine_api import StreamChunk
from tests.fuzz.alone import echo, engine_request
from tests.fuzz.engines import FuzzedRunner, make_core
from tests.fuzz.expectations import Expectations, SentRequest
from tests.fuzz.traces import Act, Ask, Trace

STUCK = 20_000  # Steps after which a trace counts as stuck. Traces have some 1,000 tokens.


@dataclass(eq=False)
class Following:
    """A follower of an output's chunks. With `is_early`, it started before the end of the
    output."""

    asked: SentRequest
    is_early: bool
    chunks: list[StreamChunk | None] = field(default_factory=list)
    has_left: bool = False

    def __call__(self, chunk: StreamChunk | None) -> None:
        assert not self.chunks or self.chunks[-1] is not None, "a chunk after the last one"
        self.chunks.append(chunk)


@dataclass(slots=True)
class Counts:
    """Counts of events, so that a run can report what it has covered."""

    requests: int = 0
    steps: int = 0
    launched: int = 0
    drafted: int = 0
    accepted: int = 0
    from_host: int = 0
    cached: int = 0
    failed: int = 0


class Play:
    """Runs a trace, and raises an error for each violated invariant."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.core: EngineCore
        self.runner: FuzzedRunner
        self.core, self.runner = make_core(trace.setup)
        self.expected = Expectations()
        self.followings: list[Following] = []
        self.num_steps = 0

    def run(self) -> None:
        for op in self.trace.ops:
            if isinstance(op, Ask):
                self._ask(op)
            else:
                self._act(op)
        self._drain()
        self._end()

    def counts(self) -> Counts:
        totals = self.core.requests.prompts
        usages = [
            a.response.usage for a in self.expected.asked.values() if hasattr(a.response, "usage")
        ]
        return Counts(
            len(self.expected.asked),
            self.num_steps,
            self.runner.num_launched,
            sum(usage.drafted_tokens for usage in usages),
            sum(usage.accepted_tokens for usage in usages),
            totals.num_on_host,
            totals.num_on_device,
            sum(asked.error is not None for asked in self.expected.asked.values()),
        )

    def _ask(self, ask: Ask) -> None:
        asked = self.expected.enter(ask)
        if asked is None:
            return
        asked.began = self.num_steps
        drafts = echo(self.trace.setup, asked) if ask.echoes else ()
        request = engine_request(ask, (*ask.drafts, *drafts))
        self.core.requests.submit(request, partial(self._sink, asked))
        self._deliver()
        for line in asked.lines:
            if self.core._tree.get(line.context) is None:
                self.expected.refused(line)

    def _sink(self, asked: SentRequest, outcome: Outcome) -> None:
        if isinstance(outcome, StreamChunk):
            assert not asked.has_ended, f"a chunk after the end of {asked.ask.number}"
            asked.chunks.append(outcome)
        else:
            asked.end(outcome)
            asked.ended = self.num_steps

    def _act(self, act: Act) -> None:
        verbs: dict[str, Callable[[Act], None]] = {
            "steps": self._steps,
            "cancel": self._cancel,
            "free": self._free,
            "follow": self._follow,
            "leave": self._leave,
            "fault": self._fault,
            "reset": self._reset,
        }
        verbs[act.kind](act)
        self._deliver()
        self.core.check_integrity()

    def _steps(self, act: Act) -> None:
        for _ in range(act.number):
            self._step()

    def _cancel(self, act: Act) -> None:
        self.expected.cancelled(act.number)
        self.core.requests.abort(act.number)
        self._deliver()
        asked = self.expected.asked.get(act.number)
        assert asked is None or asked.has_ended, f"{act.number} was cancelled and still runs"

    def _free(self, act: Act) -> None:
        self.expected.freed(act.contexts)
        self.core.requests.free(act.contexts)

    def _follow(self, act: Act) -> None:
        if (asked := self.expected.asked.get(act.number)) is not None and asked.ask.sampling:
            following = Following(asked, not asked.has_ended)
            self.followings.append(following)
            self.core.requests.followers.add(asked.lines[-1].context, following)

    def _leave(self, act: Act) -> None:
        for following in self.followings:
            if following.asked.ask.number == act.number:
                self._end_following(following)

    def _end_following(self, following: Following) -> None:
        following.has_left = True
        self.core.requests.followers.remove(following.asked.lines[-1].context, following)

    def _fault(self, act: Act) -> None:
        self.runner.breaks_next = True

    def _reset(self, act: Act) -> None:
        self.expected.gone()
        self.core.requests.reset()

    def _step(self) -> bool:
        self.core.wait_until_due()
        ran = self.core.has_work and self.core.step()
        self.num_steps += ran
        self._deliver()
        self.core.check_integrity()
        return ran

    def _deliver(self) -> None:
        for call, argument in self.core.requests.outbox.take():
            call(argument)

    def _drain(self) -> None:
        while self._step():
            assert self.num_steps < STUCK, "the trace never ends"
        left = [a.ask.number for a in self.expected.asked.values() if not a.has_ended]
        assert not left, f"no step can be made, and requests {left} are left"

    def _end(self) -> None:
        """End all followers, free all contexts, and check that nothing remains."""
        for following in self.followings:
            if not following.has_left:
                assert not following.is_early or following.chunks[-1:] == [None], (
                    f"a follower of {following.asked.ask.number} got no end"
                )
                self._end_following(following)
        self.core.requests.free([context.context_id for context in self.core._tree])
        self._drain()
        info: RunnerInfo = self.runner.info
        assert self.core.runtime_info().num_free_blocks == info.num_blocks, "blocks were not freed"
        left = (
            self.core._tree._contexts,
            self.core._tree.pending_forks,
            self.core.requests._requests,
        )
        assert not any(left), f"not everything was freed: {left}"
        assert not self.core.requests.followers.by_context, "followers were not removed"
        assert not list(self.core._scheduler.idle), "idle contexts were not freed"
        assert not self.core.requests.outbox.take()
