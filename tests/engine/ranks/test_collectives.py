"""What ranks say to each other over loopback."""

import pytest
import torch

from parrot.engine.runner.ranks.group import RankGroup
from tests.support.rank_threads import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_collectives(dtype: torch.dtype) -> None:
    def work(ranks: RankGroup) -> list[object]:
        own = torch.full((2, 3), float(ranks.rank + 1), dtype=dtype)
        columns = torch.arange(4).view(2, 2).to(dtype) + 10 * ranks.rank
        token_ids = torch.tensor([7, 8] if ranks.rank == 0 else [0, 0], dtype=torch.int32)
        ranks.broadcast(token_ids)
        total = ranks.all_reduce(own)
        assert total is own, "it is done in place"
        everything = ranks.all_gather(columns)
        return [
            total.tolist(),
            everything.tolist(),
            token_ids.tolist(),
            ranks.least(9 - ranks.rank),
        ]

    want = [[[6.0] * 3] * 2, [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]], [7, 8], 7]
    assert on_ranks(3, work) == [want] * 3
