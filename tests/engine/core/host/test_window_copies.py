"""Windows are copied to CPU memory when their slots are reused, and loaded again."""

from parrot.engine.core.steps import Transfer, WindowInfo
from tests.engine.core.host.test_tier import Tiered, fill_the_device
from tests.support.core_harness import piece

TEXT = "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"  # 10 blocks of 4 tokens.


def harness(num_slots: int, num_blocks: int, num_host_slots: int = 20) -> Tiered:
    window = WindowInfo(num_slots, 8, slot_bytes=3, num_host_slots=num_host_slots)
    return Tiered(num_blocks=num_blocks, block_bytes=2, window=window)


def of_windows(world: Tiered, *, to_host: bool) -> list[Transfer]:
    return [transfer for transfer in world.started(to_host=to_host) if transfer.of_windows]


def fill(world: Tiered, context_id: int, text: str) -> int:
    """Fill a context of its own, free it, and return the number of computed tokens."""
    answer = world.fill(piece(context_id, text))
    world.run()
    world.free(context_id)
    assert not world.runner.violations
    return answer.response.computed_tokens


def reuse_slots(world: Tiered) -> None:
    """Keep the windows of other contexts in all slots."""
    for number, letter in enumerate("xyz"):
        assert fill(world, 70 + number, letter * 12) == 12


def test_only_a_window_is_loaded_if_the_gpu_has_the_blocks() -> None:
    world = harness(num_slots=7, num_blocks=64)
    assert fill(world, 1, TEXT) == 40
    reuse_slots(world)
    assert sum(len(t.blocks) for t in of_windows(world, to_host=True)) >= 2
    assert fill(world, 3, TEXT + "+") == 1
    assert [len(t.blocks) for t in world.started(to_host=False)] == [2]
    assert of_windows(world, to_host=False) == world.started(to_host=False)


def test_blocks_and_their_window_are_loaded() -> None:
    world = harness(num_slots=7, num_blocks=16)
    assert fill(world, 1, TEXT) == 40
    fill_the_device(world)
    assert fill(world, 3, TEXT + "+") == 1
    loaded = world.started(to_host=False)
    assert {t.of_windows: len(t.blocks) for t in loaded} == {False: 10, True: 2}
    info = world.core.runtime_info().host_tier
    assert info.returned_bytes == 10 * 2 + 2 * 3


def test_passed_windows_are_not_copied() -> None:
    world = harness(num_slots=7, num_blocks=64)
    assert fill(world, 1, TEXT + TEXT[:20]) == 60
    reuse_slots(world)
    # At most the last windows of the first prompt and of one other prompt are copied.
    assert sum(len(t.blocks) for t in of_windows(world, to_host=True)) <= 4


def test_a_failed_load_computes_the_window_again() -> None:
    world = harness(num_slots=7, num_blocks=64)
    assert fill(world, 1, TEXT) == 40
    reuse_slots(world)
    world.runner.fail_every = 1
    assert fill(world, 3, TEXT + "+") == 41
    assert world.core.runtime_info().host_tier.failed_transfers > 0


def test_the_host_keeps_the_newest_windows() -> None:
    world = harness(num_slots=7, num_blocks=200, num_host_slots=8)
    for number in range(4):
        fill(world, number, chr(97 + number) + TEXT)
    reuse_slots(world)
    assert fill(world, 10, "d" + TEXT + "+") == 2
    assert fill(world, 11, "a" + TEXT + "+") == 42
