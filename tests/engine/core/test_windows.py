"""Contexts of models with sliding windows: which windows are kept, reused and computed again."""

import pytest

from parrot.engine.core.steps import WindowInfo
from parrot.engine.core.windows import WindowedTree
from parrot.protocol.engine_api import DraftSources
from tests.support.core_harness import Harness, piece

# Blocks of 4 tokens, and windows of 8.
TEXT = "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"  # 10 blocks.


def harness(num_slots: int, num_blocks: int = 64, **config) -> Harness:
    return Harness(
        num_blocks=num_blocks, max_seq_len=200, window=WindowInfo(num_slots, 8), **config
    )


def computed(world: Harness, context_id: int, text: str) -> int:
    """Fill a context of its own, free it, and return the number of computed tokens."""
    answer = world.fill(piece(context_id, text))
    world.run()
    world.free(context_id)
    world.core.check_integrity()
    return answer.response.computed_tokens


def slots_of(world: Harness) -> WindowedTree:
    tree = world.core._tree
    assert isinstance(tree, WindowedTree)
    return tree


def test_a_running_context_holds_its_window_only() -> None:
    world = harness(num_slots=9)
    answer = world.generate(piece(1, TEXT), length=40)
    most = 0
    while not answer.has_ended:
        world.step()
        most = max(most, slots_of(world).slots.num_held)
    assert most <= 7
    info = world.core.runtime_info().window_slots
    assert (info.num_slots, info.num_held, info.num_kept, info.window) == (9, 0, 3, 8)
    assert world.bytes_of(1) == (TEXT + TEXT[14:26] + TEXT[:26] * 2)[:80].encode()


def test_a_continued_prompt_finds_the_end_of_the_earlier_one() -> None:
    """Each prompt needs 3 slots for its end, and 12 more while it runs."""
    world = harness(num_slots=4 * 3 + 12, num_blocks=64)
    seats = [chr(97 + i) + TEXT for i in range(4)]
    for number in range(5):
        for i, seat in enumerate(seats):
            text = seat + "+" * (4 * number)
            missing = computed(world, 10 * number + i, text)
            assert missing == (len(text) if number == 0 else 5), (number, i)


def test_sessions_with_too_many_windows_still_find_some() -> None:
    """5 sessions need 15 slots. While one session runs, 12 slots are free for the others."""
    world = harness(num_slots=24, num_blocks=80)
    texts = [chr(97 + i) + TEXT for i in range(5)]
    found = []
    for number in range(12):
        for i, text in enumerate(texts):
            texts[i] = text + "+++++"
            found.append(len(text) - computed(world, 10 * number + i, texts[i]) + 5)
    assert sum(length > 0 for length in found[5:]) > 0.3 * len(found[5:])


def test_windows_that_all_contexts_have_passed_are_evicted_first() -> None:
    world = harness(num_slots=14)
    assert computed(world, 1, TEXT) == 40
    # This prompt reuses slots that the first prompt has passed.
    assert computed(world, 2, "z" + TEXT[:35]) == 36
    assert computed(world, 3, TEXT + "z") == 1
    assert computed(world, 4, TEXT[:16] + "zzzz") == 20


def test_the_end_of_a_common_prefix_is_kept_after_its_second_use() -> None:
    world = harness(num_slots=10)
    found = [computed(world, i, TEXT[:20] + chr(65 + i) * 40) for i in range(8)]
    assert found == [60, 60, *[40] * 6]


def test_a_fork_without_a_window_computes_from_the_last_complete_window() -> None:
    world = harness(num_slots=12)
    world.fill(piece(1, TEXT))
    world.run()
    world.fill(piece(2, "z" * 32))
    world.run()
    answer = world.fill(piece(3, "!", parent=1, length=18))
    world.run()
    assert answer.response.computed_tokens == 19
    answer = world.fill(piece(4, "!", parent=1))
    world.run()
    assert answer.response.computed_tokens == 1
    # The fork at 18 has assigned its slots to the blocks of its parent.
    assert slots_of(world).pool.num_used == 10 + 8 + 1 + 1
    world.core.check_integrity()


def test_jobs_share_too_few_slots() -> None:
    """The last jobs are preempted, and all outputs are right."""
    world = harness(num_slots=10, scheduler={"max_num_batched_tokens": 16})
    answers = [world.generate(piece(i, chr(96 + i) * 13), length=30) for i in range(1, 6)]
    world.run()
    for number, answer in enumerate(answers, 1):
        letters = TEXT[number:] + TEXT[26:] * 3
        assert answer.text == letters[:30], number
    world.core.check_integrity()


def test_a_chunk_never_needs_more_than_all_slots() -> None:
    world = harness(num_slots=8)
    answer = world.fill(piece(1, TEXT * 4))
    world.run()
    assert answer.response.filled_len == 160
    assert max(plan.num_tokens for plan in world.runner.plans) == 8


@pytest.mark.parametrize("num_slots", range(10, 20))
def test_accepted_drafts_release_the_window_that_they_pass(num_slots: int) -> None:
    """A window of 8 blocks of one token. Drafts take all other slots."""
    window = WindowInfo(num_slots, num_tokens=8)
    world = Harness(64, 1, 200, draft_sizes=(2, 4, 8), window=window)
    alphabet = TEXT[:26] * 3
    drafts = DraftSources(texts=([*alphabet.encode()],))
    answer = world.generate(piece(1, "abc"), length=60, drafts=drafts)
    world.run()
    assert answer.text == alphabet[3:63]
    assert answer.response.usage.accepted_tokens > 10
