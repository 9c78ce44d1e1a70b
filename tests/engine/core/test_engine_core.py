"""The core's guarantees about requests, contexts and failures."""

import asyncio
from array import array

import pytest

from parrot.engine.core.jobs import Piece
from parrot.protocol.engine_api import FinishReason
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    NotFound,
    PromptTooLong,
    QuotaExceeded,
)
from tests.support.core_harness import Harness, next_letter, piece

NAN, CRASH = ord("?"), ord("!")


def test_fill_then_generate_on_one_context():
    engine = Harness()
    fill = engine.fill(piece(1, "abc"))
    answer = engine.generate(piece(1), length=3)
    engine.run()
    assert fill.response.filled_len == 3
    assert answer.text == "def"
    assert engine.bytes_of(1) == b"abcdef"
    assert engine.context(1).num_missing == 1  # The KV of the last token is not needed yet.


def test_a_whole_completion_is_one_prompt():
    engine = Harness()
    answer = engine.generate(piece(1, "abcdefgh"), length=3)
    assert engine.run() == 3
    usage = answer.response.usage
    assert (usage.cached_tokens, usage.computed_tokens, usage.output_tokens) == (0, 8, 3)


def test_a_fork_computes_only_its_own_tokens():
    engine = Harness(num_blocks=64, max_seq_len=200)
    engine.fill(piece(1, "a" * 100))
    engine.run()
    answer = engine.generate(piece(2, "xyz", parent=1), length=2)
    engine.run()
    usage = answer.response.usage
    assert (usage.cached_tokens, usage.computed_tokens) == (100, 3)
    assert engine.num_free == 64 - 25 - 1


def test_a_fork_at_a_length_begins_with_that_prefix():
    engine = Harness()
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    answer = engine.generate(piece(2, parent=1, length=5), length=2)
    engine.run()
    assert answer.text == "fg"
    assert answer.response.usage.computed_tokens == 0


def test_siblings_wait_for_a_prefix_that_is_still_being_filled():
    engine = Harness(fill_chunk_size=4)
    answers = [
        engine.generate(piece(1, "abcdefgh"), piece(i, "xy", parent=1), length=1)
        if i == 2
        else engine.generate(piece(i, "xy", parent=1, length=8), length=1)
        for i in (2, 3, 4)
    ]
    engine.run()
    assert [a.text for a in answers] == ["z"] * 3
    assert sum(plan.num_tokens for plan in engine.runner.plans) == 8 + 3 * 2
    assert [a.response.usage.computed_tokens for a in answers] == [10, 2, 2]


def test_a_fork_without_a_length_has_the_tokens_at_its_arrival():
    engine = Harness()
    engine.fill(piece(1, "abc"))
    answer = engine.generate(piece(2, parent=1), length=1)
    engine.fill(piece(1, "xyz"))
    engine.run()
    assert answer.text == "d"
    assert engine.bytes_of(1) == b"abcxyz"


def test_a_fork_of_a_generating_context_gets_its_output():
    engine = Harness()
    engine.generate(piece(1, "abc"), length=3)
    answer = engine.generate(piece(2, "x", parent=1), length=1)
    engine.run()
    assert engine.bytes_of(2) == b"abcdefxy"
    assert answer.text == "y"


def test_kv_that_a_prefix_lost_is_computed_once_for_all_forks():
    engine = Harness(num_blocks=8)
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    engine.fill(piece(2, "a" * 31))
    engine.run()
    assert engine.context(1).num_computed == 0
    num_before = len(engine.runner.plans)
    answers = [engine.generate(piece(i, "x", parent=1), length=1) for i in (3, 4, 5)]
    engine.run()
    computed = sum(plan.num_tokens for plan in engine.runner.plans[num_before:])
    assert computed == 8 + 3
    assert [a.response.usage.computed_tokens for a in answers] == [9, 1, 1]


def test_freeing_a_parent_does_not_change_its_forks():
    engine = Harness(fill_chunk_size=4)
    engine.fill(piece(1, "abcdefgh"))
    answer = engine.generate(piece(2, "x", parent=1, length=8), length=2)
    engine.step()
    assert engine.free(1) == 8
    engine.run()
    assert answer.text == "yz"
    assert engine.bytes_of(2) == b"abcdefghxyz"


def test_freeing_a_parent_fails_forks_that_need_its_later_tokens():
    engine = Harness()
    parent = engine.generate(piece(1, "abc"), length=20)
    child = engine.generate(piece(2, "x", parent=1, length=10), length=1)
    grandchild = engine.generate(piece(3, "x", parent=2), length=1)
    engine.step()
    engine.free(1)
    engine.run()
    assert isinstance(parent.error, Cancelled)
    assert isinstance(child.error, NotFound)
    assert isinstance(grandchild.error, NotFound)


def test_a_fork_of_the_later_tokens_of_a_freed_context_is_not_found():
    engine = Harness()
    parent = engine.generate(piece(1, "abc"), length=20)
    child = engine.generate(piece(2, "x", parent=1), length=1)
    engine.step()
    engine.free(1)
    late = engine.generate(piece(3, "x", parent=1), length=1)
    engine.run()
    assert isinstance(parent.error, Cancelled)
    assert isinstance(child.error, NotFound)
    assert isinstance(late.error, NotFound)


def test_a_fork_of_a_fork_that_a_free_has_failed_can_still_be_used():
    engine = Harness(num_blocks=32)
    engine.generate(piece(1, "ab"), length=40)
    failing = [
        engine.fill(piece(2, "c", 1, 30)),
        engine.fill(piece(3, "d", 2, 31)),
        engine.fill(piece(4, "e", 3)),
    ]
    engine.free(2)
    assert all(answer.error is not None for answer in failing)
    later = engine.fill(piece(4, "f"))
    engine.run()
    assert later.response.filled_len == 1


def test_forks_continue_when_the_parent_that_they_restore_is_freed():
    engine = Harness(num_blocks=8, fill_chunk_size=4)
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    engine.fill(piece(9, "z" * 31))  # This context uses all blocks.
    engine.run()
    engine.free(9)
    answers = [engine.generate(piece(i, "x", parent=1), length=2) for i in (2, 3)]
    engine.step()
    assert engine.context(2).num_computed == 0  # Context 2 waits for context 1.
    assert engine.free(1) == 8
    engine.run()
    assert [answer.text for answer in answers] == ["yz", "yz"]
    assert engine.bytes_of(3) == b"abcdefghxyz"


def test_a_fork_of_a_fork_whose_writer_was_aborted_has_the_inherited_tokens():
    engine = Harness()
    engine.fill(piece(1, "abcd"))
    engine.fill(piece(2, "", parent=1))
    by_length = engine.fill(piece(4, "x", parent=2, length=3))
    of_all = engine.generate(piece(3, "x", parent=2), length=1)
    engine.core.requests.abort(2)
    engine.run()
    assert by_length.response.filled_len == 1
    assert (of_all.text, engine.bytes_of(3)) == ("y", b"abcdxy")
    assert engine.bytes_of(4) == b"abcx"


def test_a_fork_of_tokens_that_an_aborted_request_never_wrote_is_not_found():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.fill(piece(1, "a" * 20))
    writer = engine.generate(piece(2, "bcd", parent=1, length=20), length=5)
    fork = engine.generate(piece(3, "x", parent=2, length=23), length=1)
    engine.core.requests.abort(2)
    engine.run()
    assert isinstance(writer.error, Cancelled)
    assert isinstance(fork.error, NotFound)


def test_free_returns_the_number_of_tokens_and_aborts_within_a_step():
    engine = Harness()
    answer = engine.generate(piece(1, "abc"), length=50)
    engine.step()
    assert engine.free(1, 99) == 4
    assert isinstance(answer.error, Cancelled)
    assert engine.num_free == 16
    assert engine.step() is False
    assert engine.free(1) == 0


def test_abort_keeps_the_context():
    engine = Harness()
    answer = engine.generate(piece(1, "abc"), length=50)
    engine.step()
    engine.core.requests.abort(1)
    engine.deliver()
    assert isinstance(answer.error, Cancelled)
    again = engine.generate(piece(1), length=2)
    engine.run()
    assert again.text == "ef"
    engine.core.requests.abort(12345)  # Unknown ids are ignored.


def test_jobs_after_a_failed_one_fail_too():
    engine = Harness()
    first = engine.generate(piece(1, "abc"), length=50)
    second = engine.generate(piece(1, "x"), length=2)
    fork = engine.generate(piece(2, "x", parent=1), length=2)
    other = engine.generate(piece(3, "abc"), length=2)
    engine.step()
    engine.core.requests.abort(1)
    engine.run()
    assert all(isinstance(a.error, Cancelled) for a in (first, second))
    assert isinstance(fork.error, NotFound)
    assert other.text == "de"


def test_reset_frees_everything():
    engine = Harness()
    engine.fill(piece(1, "abcdefgh"))
    engine.run()
    answers = [engine.generate(piece(2, "x", parent=1), length=5), engine.fill(piece(3, "ab"))]
    engine.core.requests.reset()
    engine.deliver()
    assert all(isinstance(a.error, Cancelled) for a in answers)
    assert engine.num_free == 16
    assert engine.context(1) is None
    again = engine.generate(piece(1, "m"), length=1)
    engine.run()
    assert again.text == "n"


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([piece(2, "x", parent=77)], NotFound, "context 77"),
        ([piece(2, "x", parent=1, length=9)], NotFound, "has 3 tokens"),
        ([piece(2, "x" * 65)], PromptTooLong, "at most 64"),
        ([piece(2, "x" * 64)], PromptTooLong, "first generated token"),
        ([piece(1, "x" * 62)], PromptTooLong, "65 tokens"),
        ([piece(2, "x" * 40), piece(3, "x" * 40, parent=2)], PromptTooLong, "80 tokens"),
        ([Piece(2, array("i", [259]))], InvalidRequest, "vocabulary of 259"),
        ([piece(2)], InvalidRequest, "the context is empty"),
    ],
)
def test_rejected_requests_leave_no_trace(order, error, message):
    engine = Harness()
    engine.fill(piece(1, "abc"))
    engine.run()
    free = engine.num_free
    answer = engine.generate(*order)
    engine.run()
    assert isinstance(answer.error, error)
    assert message in answer.error.message
    assert engine.num_free == free
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("creator", "later"),
    [
        (piece(2, "x"), piece(2, parent=1)),
        (piece(2, "x", parent=1), piece(2, "y", parent=3)),
        (piece(2, "x", parent=1, length=2), piece(2, "y", parent=1, length=3)),
    ],
)
def test_a_request_that_names_two_parents_of_a_context_is_rejected(creator, later):
    engine = Harness()
    engine.fill(piece(1, "abc"), piece(3, "abc"))
    engine.run()
    answer = engine.generate(creator, later)
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.param == "parent_context_id"
    assert engine.context(2) is None
    again = engine.generate(piece(2, "d", parent=1, length=3), piece(2, "e", parent=1), length=1)
    engine.run()
    assert (again.text, engine.bytes_of(2)) == ("f", b"abcdef")


def test_a_prompt_that_becomes_too_long_fails_when_its_job_is_opened():
    engine = Harness(num_blocks=4)
    engine.generate(piece(1, "abc"), length=8)
    late = engine.fill(piece(1, "x" * 8))
    engine.run()
    assert isinstance(late.error, PromptTooLong)


def test_generation_ends_where_the_context_is_full():
    engine = Harness(num_blocks=3)
    answer = engine.generate(piece(1, "abcdefgh"), length=50)
    engine.run()
    assert len(answer.text) == 4
    assert answer.response.finish_reason is FinishReason.LENGTH


def test_a_backlog_is_bounded():
    engine = Harness(tasks_capacity=1)
    answers = [engine.fill(piece(i, "a")) for i in range(1025)]
    assert isinstance(answers[-1].error, QuotaExceeded)
    assert not answers[-2].has_ended


def test_an_empty_fill_ends_at_once():
    engine = Harness()
    answer = engine.fill(piece(1, ""))
    assert answer.response.filled_len == 0
    many = engine.fill(*[piece(i % 3 + 2, "") for i in range(2000)])
    assert many.response.filled_len == 0


def test_first_id_is_inserted_only_before_the_first_token():
    engine = Harness()
    bos = Piece(1, array("i", [97, 98]), first_id=257)
    engine.fill(bos)
    engine.fill(bos)
    engine.run()
    assert list(engine.tokens_of(1)) == [257, 97, 98, 97, 98]


def test_nan_fails_its_own_request_only():
    engine = Harness(faults={"nan_token": NAN})
    bad = engine.generate(piece(1, "ab?"), length=3)
    good = engine.generate(piece(2, "abc"), length=3)
    engine.run()
    assert isinstance(bad.error, ModelNumerics)
    assert good.text == "def"
    assert engine.context(1).num_computed == 0  # The KV of context 1 was dropped.


def test_a_crash_fails_only_the_sequence_that_causes_it():
    engine = Harness(faults={"crash_token": CRASH})
    good = engine.generate(piece(1, "abc"), length=3)
    engine.fill(piece(2, "abcdef"))
    engine.step()
    bad = engine.fill(piece(3, "a!", parent=2))
    fork = engine.generate(piece(4, "x", parent=2), length=2)
    engine.run()
    assert isinstance(bad.error, EngineFailed)
    assert good.text == "def"
    assert fork.text == "yz"
    again = engine.generate(piece(5, "k"), length=1)
    engine.run()
    assert again.text == "l"


def test_a_step_that_failed_after_a_write_to_a_copied_block_reads_no_foreign_kv():
    """The step copies the shared block for one fork. The other fork is then the only holder and
    writes to the block. After the failure of the step, the copy must not contain these writes."""
    engine = Harness(faults={"crash_token": CRASH})
    engine.fill(piece(1, "abc"))
    engine.run()
    fork = engine.fill(piece(2, "d", parent=1, length=3))
    other = engine.fill(piece(3, "xyz", parent=1, length=1))
    bad = engine.fill(piece(4, "!"))
    engine.free(1)
    engine.run()
    assert isinstance(bad.error, EngineFailed)
    assert isinstance(fork.error, EngineFailed)
    assert other.error is None
    answers = [engine.generate(piece(number), length=1) for number in (2, 3)]
    engine.run()
    assert [answer.text for answer in answers] == ["e", "a"]
    assert not engine.runner.violations


def test_a_request_with_two_failing_contexts_fails_once():
    engine = Harness(faults={"crash_token": CRASH})
    answer = engine.fill(piece(1, "a!"), piece(2, "b!"), piece(3, "c"))
    engine.run()
    assert isinstance(answer.error, EngineFailed)
    assert not engine.core.has_work


def test_streams_carry_every_token():
    engine = Harness()
    answer = engine.generate(piece(1, "abc"), length=5, stream=True)
    engine.run()
    assert [chunk.text for chunk in answer.chunks] == list("defgh")
    assert answer.text == "defgh"


def test_seeds_are_fixed_by_request_or_by_the_engine():
    def seeds(**sampling):
        engine = Harness(random_seed=5)
        for i in (1, 2):
            engine.generate(piece(i, "abc"), length=1, **sampling)
        engine.run()
        return [s.sample.seed for plan in engine.runner.plans for s in plan.sequences]

    assert seeds(seed=11) == [11, 11]
    first, second = seeds()
    assert first != second
    assert seeds() == [first, second]


def test_sample_specs_show_the_output_and_the_context():
    seen = []

    def model(context_ids):
        seen.append(bytes(list(context_ids)))
        return next_letter(context_ids)

    engine = Harness(model=model)
    engine.generate(piece(1, "ab"), length=3)
    engine.run()
    assert seen == [b"ab", b"abc", b"abcd"]
    positions = [plan.sequences[0].sample.position for plan in engine.runner.plans]
    assert positions == [2, 3, 4]


async def test_usage_divides_the_time_of_a_request():
    engine = Harness(scheduler={"max_batch_size": 1})
    engine.generate(piece(1, "ab"), length=1)
    answer = engine.generate(piece(2, "ab"), length=3)

    async def timed_step(seconds):
        step = engine.core.plan()
        await asyncio.gather(engine.clock.advance(seconds))
        engine.core.deliver(step, engine.core.run(step))
        engine.deliver()

    for seconds in (1.0, 2.0, 4.0, 8.0):
        await timed_step(seconds)
    usage = answer.response.usage
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (1.0, 2.0, 12.0)
    info = engine.core.runtime_info()
    assert info.num_steps == 4
    assert info.recent_average_latency > 0
    assert (info.model_mem, info.cache_mem) == (1.0, 2.0)


def test_usage_reports_the_steps_of_the_engine():
    engine = Harness(scheduler={"max_num_batched_tokens": 8})
    engine.generate(piece(1, "before"), length=1)
    engine.run()
    long = engine.generate(piece(2, "abcd"), length=5)
    engine.step()
    late = engine.generate(piece(3, "efghijkl"), length=2)
    engine.run()
    steps = [len(plan.sequences) for plan in engine.runner.plans]
    assert steps == [1, 1, 2, 2, 2, 1]
    assert (long.response.usage.steps, late.response.usage.steps) == (5, 3)
    assert long.response.usage.step_sequences == 1 + 2 + 2 + 2 + 1
    assert late.response.usage.step_sequences == 2 + 2 + 2
    assert long.response.usage.step_prompt_tokens == 4 + 8
    assert late.response.usage.step_prompt_tokens == 8


def test_runtime_info_counts_blocks_and_jobs():
    engine = Harness()
    engine.generate(piece(1, "abcdef"), length=9)
    engine.fill(piece(2, "x", parent=1))
    engine.step()
    info = engine.core.runtime_info()
    assert (info.num_running_jobs, info.num_total_jobs) == (1, 2)
    assert info.num_free_blocks == 14
    assert info.num_cached_tokens == 8


def test_tokens_capacity_limits_the_pool():
    engine = Harness(tokens_capacity=10)
    assert engine.core.tokens_capacity == 12
    assert engine.core.max_context_len == 12
