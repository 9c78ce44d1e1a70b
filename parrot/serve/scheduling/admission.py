"""Admission by program: whose KV has a place on an engine, and who waits for one.

A program that goes on, turn after turn, needs its KV again with each. When those of all programs
are more than an engine's memory, device and host, and everybody runs in turn, everybody's KV is
gone when it is needed. So as many programs as fit have a *place*, which they keep while they think
between turns; the turns of others wait, whole, first come first served:

    room of an engine   | a runs | b thinks | c runs | d thinks | free |       waiting: e, f

A program that thinks gives way to one that waits if it is the one whose next turn is farthest, and
will have to be computed again when it returns. An engine spends no more than a part of its time on
that (`_SHARE`), so there is a credit: as long as computing again costs little, nobody waits at all;
where it costs much, programs wait and change places at the pace that the credit allows, so that all
get their turn. Programs that are not expected back soon give way for nothing.

Without a place run: calls that nothing is expected to continue, and programs so small that they
matter to nobody; these are counted all the same. A program that fits in what is free goes before
one that does not, but not for ever."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from parrot.protocol.engine_api import StepCosts
from parrot.serve.contexts.think_time import Source, ThinkTimes
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock

_USABLE = 0.9  # of what an engine holds: both tiers have some of it, and turns grow
_SHARE = 0.6  # of an engine's time, for computing again what gave way
_MAX_CREDIT_S = 2.0
_USUAL_COSTS = StepCosts()
_GONE_S = 600.0  # who is expected later than this gives way for nothing
_SMALL = 1 / 64  # of an engine's room
_MAX_LOOKS = 64  # at programs that think, and at those that wait
_MAX_PASSED = 32  # times that others go before the first that waits


@dataclass(slots=True, eq=False)
class Program:
    """A session. `tasks` are queued or run. `room`: where it has a place of `size` tokens, if it
    has one; `source`: the call that it has thought about since `idle_since`."""

    session_id: int
    tasks: set[CompletionTask] = field(default_factory=set)
    room: "Room | None" = None
    size: int = 0
    source: Source | None = None
    idle_since: float = 0.0
    waits_at: "Room | None" = None
    waits_since: float = 0.0
    waited_s: float = 0.0


@dataclass(slots=True, eq=False)
class Room:
    """The places on one engine, of `capacity` tokens; `token_s`: what computing one again costs.
    `idle`: programs with a place that think, the longest first; `waiting`: in order, with the
    tokens that each wants; `num_passed`: how often others went before the first."""

    engine_id: int
    capacity: int
    token_s: float
    used: int = 0
    num_places: int = 0
    credit_s: float = _MAX_CREDIT_S
    credit_at: float = 0.0
    idle: dict[Program, None] = field(default_factory=dict)
    waiting: dict[Program, int] = field(default_factory=dict)
    num_passed: int = 0

    def fits(self, size: int) -> bool:
        return self.used + size <= self.capacity or not self.num_places

    def is_small(self, size: int) -> bool:
        return size <= _SMALL * self.capacity

    def earn(self, now: float) -> None:
        earned_s = _SHARE * (now - self.credit_at)
        self.credit_s, self.credit_at = min(_MAX_CREDIT_S, self.credit_s + earned_s), now

    def next_credit(self) -> float:
        """When there is credit again."""
        return self.credit_at + max(0.0, -self.credit_s) / _SHARE


class Admission:
    """Keeps the places, on engines that were added. Calls that run elsewhere always may."""

    def __init__(
        self,
        clock: Clock,
        think_times: ThinkTimes,
        on_given_up: Callable[[int, int], None],
        *,
        is_on: bool = True,
    ) -> None:
        """`on_given_up` is told the ids of an engine and of a session that has lost its place on it
        and will have to wait for another: its KV there is the first to go."""
        self._clock = clock
        self._think_times = think_times
        self._on_given_up = on_given_up
        self._is_on = is_on
        self._rooms: dict[int, Room] = {}
        self._programs: dict[int, Program] = {}
        self._released: dict[CompletionTask, None] = {}

    @property
    def num_waiting(self) -> int:
        """Programs that wait for a place."""
        return sum(len(room.waiting) for room in self._rooms.values())

    def add_engine(self, engine_id: int, num_tokens: int, costs: StepCosts | None) -> None:
        """`num_tokens`: of KV that it keeps, on the device and elsewhere. No effect if this is
        switched off."""
        if self._is_on:
            capacity, token_s = int(_USABLE * num_tokens), (costs or _USUAL_COSTS).prefill_s
            self._rooms[engine_id] = Room(engine_id, capacity, token_s, credit_at=self._clock.now())

    def remove_engine(self, engine_id: int) -> None:
        """Who waited there may look elsewhere."""
        room = self._rooms.pop(engine_id, None)
        if room is None:
            return
        for program in list(room.waiting):
            self._release(program)
        for program in [p for p in self._programs.values() if p.room is room]:
            self._leave(program)

    # Tasks

    def arrived(self, task: CompletionTask) -> None:
        program = self._programs.get(task.completion.session_id)
        if program is None:
            program = Program(task.completion.session_id)
            self._programs[program.session_id] = program
        program.tasks.add(task)
        if program.room is not None:
            program.room.idle.pop(program, None)

    def ended(self, task: CompletionTask) -> None:
        """It will not run any more, whether it did or not."""
        program = self._programs[task.completion.session_id]
        program.tasks.discard(task)
        self._released.pop(task, None)
        if program.tasks:
            return
        if program.waits_at is not None:
            self._stop_waiting(program)
        if program.room is None:
            del self._programs[program.session_id]
        elif not self._goes_on(task):
            self._leave(program)
        else:
            program.source, program.idle_since = Source.of(task.completion), self._clock.now()
            program.room.idle[program] = None

    def forget(self, session_id: int) -> None:
        """The session has ended: so has its place."""
        program = self._programs.get(session_id)
        if program is None:
            return
        if program.room is not None:
            self._leave(program)
        if not program.tasks:
            self._programs.pop(session_id, None)

    def admit(
        self, task: CompletionTask, engine_id: int, others: Callable[[], Iterable[int]]
    ) -> int | None:
        """The engine on which the task may run: the wanted one or, where its program has its place
        or gets one, another of `others`. None: it has to wait, until `due` names it."""
        program = self._programs[task.completion.session_id]
        room = self._rooms.get(engine_id)
        if room is None or (program.room is None and not self._goes_on(task)):
            return engine_id
        size = task.prompt_len + task.expected_output
        if program.room is room or room.is_small(size):
            self._enter(program, room, size)
            return engine_id
        if program.waits_at is None or program.room is not None:
            for other_id in (engine_id, *others()):
                other = self._rooms.get(other_id)
                if other is not None and (other is program.room or self._may_pass(other, size)):
                    self._enter(program, other, size)
                    return other_id
            if program.room is not None:  # and that engine is not open now
                self._leave(program)
            if not room.waiting and self._make_room(room, size):
                self._enter(program, room, size)
                return engine_id
        if program.waits_at is None:
            program.waits_at, program.waits_since = room, self._clock.now()
            room.waiting[program] = size
        return None

    def due(self) -> list[CompletionTask]:
        """Tasks that had to wait and need not any more."""
        for room in self._rooms.values():
            if room.waiting:
                self._fill(room)
        released, self._released = list(self._released), {}
        return released

    def next_change(self) -> float | None:
        """When `due` may name a task though nothing has happened until then."""
        now = self._clock.now()
        if self._released:
            return now
        times = [room.next_credit() for room in self._rooms.values() if room.waiting and room.idle]
        return min([when for when in times if when > now], default=None)

    def check_integrity(self, tasks: Iterable[CompletionTask]) -> None:
        """`tasks`: all that are queued or run. Raises AssertionError with what differs."""
        own = {task for program in self._programs.values() for task in program.tasks}
        assert own == set(tasks), own
        for room in self._rooms.values():
            here = [p for p in self._programs.values() if p.room is room]
            assert room.num_places == len(here), room
            assert room.used == sum(p.size for p in here), room
            assert set(room.idle) == {p for p in here if not p.tasks}, room
            assert set(room.waiting) == {p for p in self._programs.values() if p.waits_at is room}
            assert all(p.tasks and p.room is None for p in room.waiting), room

    # Inside

    def _goes_on(self, task: CompletionTask) -> bool:
        """Whether it is expected to be continued, as what has continued something often is."""
        completion = task.completion
        if completion.previous is not None:
            return True
        return self._think_times.chance(Source.of(completion)) > 0.5

    def _may_pass(self, room: Room, size: int) -> bool:
        return room.fits(size) and (not room.waiting or room.num_passed < _MAX_PASSED)

    def _enter(self, program: Program, room: Room, size: int) -> None:
        """Let it have a place of this size. If it was there, others may have to give way."""
        if program.waits_at is not None:
            self._release(program)
        elif room.waiting and program.room is not room:
            room.num_passed += 1
        if program.room is not None:
            self._leave(program)
        program.room, program.size = room, size
        room.used += size
        room.num_places += 1
        while room.used > room.capacity and (farthest := self._farthest(room)) is not None:
            self._give_up(*farthest)

    def _leave(self, program: Program) -> None:
        room, program.room = program.room, None
        assert room is not None, program
        room.used -= program.size
        room.num_places -= 1
        room.idle.pop(program, None)
        if not program.tasks:
            del self._programs[program.session_id]

    def _stop_waiting(self, program: Program) -> None:
        room, program.waits_at = program.waits_at, None
        assert room is not None, program
        if next(iter(room.waiting)) is program:
            room.num_passed = 0
        del room.waiting[program]
        program.waited_s = self._clock.now() - program.waits_since

    def _release(self, program: Program) -> None:
        self._stop_waiting(program)
        self._released.update(dict.fromkeys(program.tasks))

    def _fill(self, room: Room) -> None:
        """Give places to those who wait, as far as there are any."""
        for program in list(islice(room.waiting, _MAX_LOOKS)):
            size, is_first = room.waiting[program], next(iter(room.waiting)) is program
            if is_first or room.num_passed < _MAX_PASSED:
                fits = room.fits(size) or (is_first and self._make_room(room, size))
                if fits:
                    if not is_first:
                        room.num_passed += 1
                    self._enter(program, room, size)

    def _make_room(self, room: Room, size: int) -> bool:
        """Let programs that think give way, if there is the credit for it, and if it is enough."""
        room.earn(self._clock.now())
        if room.credit_s < 0:
            return False
        ranked = sorted(self._ranked(room), key=_unneeded_s, reverse=True)
        free, chosen = room.capacity - room.used, []
        for item in ranked:
            if free >= size:
                break
            chosen.append(item)
            free += item[1].size
        if free < size:
            return False
        for rest_s, program in chosen:
            self._give_up(rest_s, program)
        return True

    def _farthest(self, room: Room) -> tuple[float, Program] | None:
        return max(self._ranked(room), key=_unneeded_s, default=None)

    def _ranked(self, room: Room) -> list[tuple[float, Program]]:
        """Those that have thought for longest, with the seconds until they are expected."""
        now = self._clock.now()
        return [
            (self._think_times.expected_s(program.source, now - program.idle_since), program)
            for program in islice(room.idle, _MAX_LOOKS)
            if program.source is not None
        ]

    def _give_up(self, rest_s: float, program: Program) -> None:
        room = program.room
        assert room is not None, program
        if rest_s < _GONE_S:
            room.earn(self._clock.now())
            room.credit_s -= program.size * room.token_s
        self._leave(program)
        if room.credit_s < 0:  # else what is evicted when is decided as if there were no places
            self._on_given_up(room.engine_id, program.session_id)


def _unneeded_s(item: tuple[float, Program]) -> float:
    """How long its place is of no use to it, less the time that it has waited for it."""
    rest_s, program = item
    return rest_s - program.waited_s
