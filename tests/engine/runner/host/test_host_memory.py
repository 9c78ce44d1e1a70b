"""How the host's memory is divided."""

import torch

from parrot.engine.runner.host.memory import HostMemory


def test_slots_are_divided_into_the_parts_of_a_block_also_if_there_are_none() -> None:
    parts = [torch.zeros((rows, 5, size), dtype=torch.uint8) for rows, size in ((4, 8), (2, 3))]
    for num_slots in (0, 3):
        memory = HostMemory(parts, num_slots)
        shapes = [tuple(view.shape) for view in memory.split(memory.slots)]
        assert shapes == [(num_slots, 4, 8), (num_slots, 2, 3)]
