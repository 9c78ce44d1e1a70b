"""Which outputs are searched, and which drafts are used."""

from array import array

from parrot.engine.config import SchedulerConfig
from parrot.engine.drafts.drafter import Drafter, OutputDrafts, make_drafter
from parrot.engine.drafts.finder import DraftFinder
from parrot.engine.drafts.pace import Acceptance

TEXT = [*range(10, 60)]


class TickingClock:
    """Each call of `now` takes `tick_s`. The default of 1 s is longer than any step."""

    def __init__(self, tick_s: float = 1.0) -> None:
        self.seconds = 0.0
        self._tick_s = tick_s

    def now(self) -> float:
        self.seconds += self._tick_s
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


class Output:
    """An output that repeats TEXT token by token."""

    def __init__(self, drafter: Drafter) -> None:
        self.ids = array("i", TEXT[:4])
        self.output: list[int] = [*TEXT[:4]]
        finder = DraftFinder([TEXT], in_context=False)
        acceptance = Acceptance(drafter.acceptance)
        self.drafts = OutputDrafts(finder, self.ids, self.output, 40, None, acceptance)

    def append_next(self) -> None:
        token = TEXT[len(self.output)]
        self.ids.append(token)
        self.output.append(token)


def test_a_draft_found_before_the_newest_token_is_not_used():
    """A CPU without idle time searches one output per step."""
    drafter = Drafter(8, (2, 4, 8, 16), TickingClock())
    outputs = [Output(drafter) for _ in range(3)]
    drafts = [output.drafts for output in outputs]
    for number in range(9):
        drafter.search(drafts)
        found = [output.candidate().length for output in drafts]
        assert found.index(max(found)) == number % 3
        assert sorted(found)[:2] == [0, 0]
        for output in outputs:
            output.append_next()


def test_the_cpu_searches_during_steps_only_while_it_is_idle():
    drafter = Drafter(8, (2, 64), TickingClock(1e-3))
    drafter.costs.plain_s = 0.1
    outputs = [Output(drafter) for _ in range(40)]

    def num_looked_at(*, has_prompts: bool = False) -> int:
        drafter.search_during_step([output.drafts for output in outputs], has_prompts=has_prompts)
        found = sum(output.drafts.candidate().length > 0 for output in outputs)
        for output in outputs:
            output.append_next()
        return found

    assert num_looked_at() == 25  # The step takes 100 ms, and the idle time is not known yet.
    for _ in range(30):
        drafter.record_wait(0.0, has_prompts=False)
        drafter.record_wait(0.1, has_prompts=True)
    assert num_looked_at() == 3
    for _ in range(30):
        drafter.record_wait(0.02, has_prompts=False)
    assert 8 <= num_looked_at() <= 12
    assert num_looked_at(has_prompts=True) == 3


def test_new_outputs_start_with_the_acceptance_of_earlier_ones():
    drafter = Drafter(8, (2, 4, 8, 16), TickingClock())
    first = Output(drafter)
    before = drafter.acceptance.rate(3)
    for _ in range(20):
        drafter.search([first.drafts])
        first.append_next()
    assert drafter.acceptance.rate(3) > before
    assert Output(drafter).drafts.candidate().length == 0  # The output was not searched.
    second = Output(drafter)
    drafter.search([second.drafts])
    assert second.drafts.candidate().rate > before


def test_drafts_can_be_turned_off():
    clock = TickingClock()
    assert make_drafter(SchedulerConfig(max_draft_tokens=0), (8,), clock) is None
    assert make_drafter(SchedulerConfig(), (), clock) is None
    assert make_drafter(SchedulerConfig(max_batch_size=4), (8,), clock) is None
