"""Which jobs run, wait and are preempted, observed through the plans that the core runs."""

import pytest

from parrot.engine.core.scheduler import _MAX_PASSED_LENGTHS, POLICIES, JobQueue
from tests.support.core_harness import Harness, piece


def contexts(plan) -> list[int]:
    return [sequence.context_id for sequence in plan.sequences]


def sizes(plan) -> list[int]:
    return [len(sequence.token_ids) for sequence in plan.sequences]


def test_there_is_no_plan_without_work():
    assert Harness().step() is False


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_fills_are_computed_in_chunks(chunk):
    engine = Harness(fill_chunk_size=chunk)
    answer = engine.fill(piece(1, "abcdefghijklmno"))
    engine.run()
    assert [sizes(plan) for plan in engine.runner.plans] == [
        [min(chunk, 15 - start)] for start in range(0, 15, chunk)
    ]
    assert answer.response.computed_tokens == 15


def test_the_token_budget_is_used_in_order_of_arrival():
    engine = Harness(scheduler={"max_num_batched_tokens": 6})
    engine.fill(piece(1, "abcd"))
    engine.fill(piece(2, "bcde"))
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([1, 2], [4, 2])
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([2], [2])


def test_decodes_come_before_fills_and_share_their_steps():
    engine = Harness(scheduler={"max_num_batched_tokens": 5})
    engine.generate(piece(1, "a"), length=4)
    engine.step()
    engine.fill(piece(2, "abcdefgh"))
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([1, 2], [1, 4])
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([1, 2], [1, 4])


@pytest.mark.parametrize(("priority", "expected"), [(5, [1, 3]), (0, [1, 9]), (-1, [1, 9])])
def test_fills_are_small_next_to_decodes_of_a_higher_priority(priority, expected):
    engine = Harness(scheduler={"max_num_batched_tokens": 10, "mixed_fill_tokens": 3})
    engine.generate(piece(1, "a"), length=2, priority=0)
    engine.step()
    engine.fill(piece(2, "abcdefghijklmno"), priority=priority)
    engine.step()
    assert sizes(engine.last_plan) == expected
    engine.step()  # No job generates.
    assert sizes(engine.last_plan) == [min(10, 15 - expected[1])]


def test_fills_of_all_priorities_share_the_rest_of_the_budget():
    engine = Harness(scheduler={"max_num_batched_tokens": 10, "mixed_fill_tokens": 5})
    engine.generate(piece(1, "a"), length=4, priority=1)
    engine.step()
    engine.fill(piece(2, "abc"), priority=0)
    engine.fill(piece(3, "abcdefgh"), priority=2)
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([1, 2, 3], [1, 3, 2])


def test_batch_size_is_a_limit():
    engine = Harness(scheduler={"max_batch_size": 2})
    for context_id in (1, 2, 3):
        engine.fill(piece(context_id, "ab"))
    engine.step()
    assert contexts(engine.last_plan) == [1, 2]
    engine.step()
    assert contexts(engine.last_plan) == [3]


def test_total_tokens_are_a_limit_except_for_a_single_sequence():
    engine = Harness(scheduler={"max_total_tokens": 6})
    engine.fill(piece(1, "abcdefgh"))
    engine.fill(piece(2, "abc"))
    engine.fill(piece(3, "abc"))
    engine.step()
    assert contexts(engine.last_plan) == [2, 3]
    engine.step()
    assert contexts(engine.last_plan) == [1]


def test_short_prompts_pass_earlier_long_ones():
    engine = Harness(fill_chunk_size=4, scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "a" * 12))
    engine.step()
    engine.fill(piece(2, "b"))
    engine.run()
    assert [contexts(plan) for plan in engine.runner.plans] == [[1], [2], [1], [1]]


def test_a_long_prompt_is_passed_until_four_times_its_length_is_computed():
    engine = Harness(fill_chunk_size=2, scheduler={"max_batch_size": 1, "prefix_caching": False})
    engine.fill(piece(1, "a" * 8))
    num_short = 0
    while engine.context(1).num_computed == 0:
        num_short += 1
        engine.fill(piece(1 + num_short, "bb"))
        engine.step()
    # The last short prompt came too late to pass the long one.
    num_passed = 2 * (num_short - 1)
    assert num_passed == _MAX_PASSED_LENGTHS * (8 - 2)


def test_cached_tokens_do_not_count_for_the_length_of_a_prompt():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    engine.fill(piece(2, "zyxw"))
    engine.fill(piece(3, "abcdefghijklm"))  # The KV of this prompt is cached.
    engine.step()
    assert contexts(engine.last_plan) == [3]


def test_a_decode_is_not_preempted_for_a_prompt_of_its_priority():
    engine = Harness(num_blocks=5)
    engine.generate(piece(1, "a" * 12), length=8)
    engine.step()
    engine.fill(piece(2, "bcdefghi"))
    engine.step()
    assert contexts(engine.last_plan) == [1]


def test_lower_priority_values_run_first():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "ab"), priority=5)
    engine.fill(piece(2, "ab"), priority=-1)
    engine.fill(piece(3, "ab"), priority=5)
    engine.run()
    assert [contexts(plan) for plan in engine.runner.plans] == [[2], [1], [3]]


def test_fcfs_ignores_priorities():
    engine = Harness(scheduler={"max_batch_size": 1, "policy": "fcfs"})
    engine.fill(piece(1, "ab"), priority=5)
    engine.fill(piece(2, "ab"), priority=-1)
    engine.run()
    assert [contexts(plan) for plan in engine.runner.plans] == [[1], [2]]


def test_a_parent_inherits_the_priority_of_its_most_urgent_fork():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "ab"), priority=9)
    engine.fill(piece(2, "ab"), priority=5)
    engine.generate(piece(3, "c", parent=1), length=1, priority=0)
    engine.run()
    assert [contexts(plan) for plan in engine.runner.plans] == [[1], [3], [2]]


def test_idle_kv_is_evicted_least_recently_used_first():
    engine = Harness(num_blocks=6)
    engine.fill(piece(1, "abcdefgh"))
    engine.fill(piece(2, "bcdefghi"))
    engine.run()
    engine.fill(piece(1, "i"))
    engine.run()
    engine.fill(piece(3, "cdefghij"))
    engine.run()
    assert engine.context(1).num_computed == 9
    assert engine.context(2).num_computed == 4  # Only the required blocks were evicted.
    assert engine.context(3).num_computed == 8


def test_evicted_kv_is_computed_again_when_it_is_used():
    engine = Harness(num_blocks=6)
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    engine.fill(piece(2, "bcdefghijklmnopqrstu"))
    engine.run()
    assert engine.context(1).num_computed == 4
    answer = engine.generate(piece(1, "i"), length=2)
    engine.run()
    assert answer.text == "jk"
    assert answer.response.usage.computed_tokens == 5
    assert answer.response.usage.cached_tokens == 4


def test_a_prefix_that_running_jobs_share_is_not_evicted():
    engine = Harness(num_blocks=8)
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    for context_id in (2, 3):
        engine.generate(piece(context_id, "x", parent=1), length=10)
    engine.run()
    assert engine.context(1).num_computed == 8
    computed = sum(plan.num_tokens for plan in engine.runner.plans)
    assert computed == 8 + 2 * (1 + 9)


def test_the_newest_job_is_preempted_and_still_gets_the_same_text():
    alone = Harness()
    expected = [alone.generate(piece(i, text), length=18) for i, text in ((1, "ab"), (2, "xb"))]
    alone.run()
    engine = Harness(num_blocks=7, scheduler={"prefix_caching": False})
    answers = [engine.generate(piece(i, text), length=18) for i, text in ((1, "ab"), (2, "xb"))]
    engine.run()
    assert [a.text for a in answers] == [a.text for a in expected]
    # Some tokens are computed twice.
    assert sum(plan.num_tokens for plan in engine.runner.plans) > 2 * 19
    usage = answers[1].response.usage
    assert (usage.cached_tokens, usage.computed_tokens) == (0, 2)


def test_an_urgent_fill_preempts_a_running_decode():
    engine = Harness(num_blocks=4)
    slow = engine.generate(piece(1, "abcdefgh"), length=8, priority=1)
    engine.step()
    engine.step()
    urgent = engine.generate(piece(2, "abcdefghij"), length=2, priority=0)
    engine.step()
    assert contexts(engine.last_plan)[-1] == 2
    while not urgent.has_ended:
        engine.step()
    assert not slow.has_ended
    engine.run()
    assert len(slow.text) == 8


def test_an_older_job_never_waits_for_a_newer_one():
    engine = Harness(num_blocks=4)
    first = engine.generate(piece(1, "abcdef"), length=10)
    second = engine.generate(piece(2, "abcdef"), length=10)
    order = []
    while engine.step():
        order += [i for i, a in enumerate((first, second)) if a.has_ended and i not in order]
    assert order == [0, 1]


def test_later_jobs_do_not_pass_a_job_that_waits_for_blocks():
    engine = Harness(num_blocks=5)
    engine.generate(piece(1, "abcdefgh"), length=6)
    engine.step()
    engine.fill(piece(2, "bcdefghijklm"))
    engine.fill(piece(3, "a"), priority=1)
    engine.step()
    assert contexts(engine.last_plan) == [1]
    engine.run()
    planned = [context_id for plan in engine.runner.plans for context_id in contexts(plan)]
    assert planned.index(2) < planned.index(3)


def test_queues_keep_the_order_of_keys():
    class Item:
        def __init__(self, key):
            self.key = key

    queue = JobQueue()
    items = [Item((1, 5)), Item((0, 9)), Item((1, 2))]
    for item in items:
        queue.add(item)
    assert [item.key for item in queue] == [(0, 9), (1, 2), (1, 5)]
    assert items[1] in queue
    assert Item((0, 9)) not in queue
    queue.remove(items[1])
    assert len(queue) == 2
    items[1].job_id = 0
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(items[1])


def test_policies_are_total_orders():
    class FakeJob:
        is_background = False

        priority, queue_position, job_id = 3, 5, 7

    assert POLICIES["priority"](FakeJob) == (3, 5, 7)
    assert POLICIES["fcfs"](FakeJob) == (0, 7)


def test_an_urgent_request_preempts_the_least_urgent_one():
    engine = Harness(num_blocks=6)
    engine.generate(piece(1, "abcdef"), priority=5, length=20)
    engine.generate(piece(2, "ghijkl"), priority=9, length=20)
    engine.step()
    engine.fill(piece(3, "mnopqrstuvwx"), priority=0)
    engine.step()
    assert contexts(engine.last_plan) == [1, 3]
    assert engine.context(1).num_computed == 7
    assert engine.context(2).num_computed == 4


def test_a_step_counts_no_tokens_of_jobs_preempted_in_it() -> None:
    engine = Harness(num_blocks=6)
    engine.generate(piece(1, "abcdef"), priority=5, length=20)
    engine.generate(piece(2, "ghijkl"), priority=9, length=20)
    engine.step()
    scheduler = engine.core._scheduler
    steps, schedule = [], scheduler.schedule
    scheduler.schedule = lambda *given: steps.append(schedule(*given)) or steps[-1]
    engine.fill(piece(3, "mnopqrstuvwx"), priority=0)
    engine.step()
    assert (steps[0].num_decodes, steps[0].num_fill_tokens) == (1, 12)


def test_the_tokens_of_a_preempted_job_are_used_by_others_in_the_step():
    engine = Harness(num_blocks=4, scheduler={"max_num_batched_tokens": 9})
    engine.generate(piece(1, "abcdefghi"), priority=9, length=20)
    engine.step()
    engine.fill(piece(2, "jklmnopq"), priority=0)
    engine.fill(piece(3, "rs"), priority=1)
    engine.step()
    assert (contexts(engine.last_plan), sizes(engine.last_plan)) == ([2, 3], [8, 1])
