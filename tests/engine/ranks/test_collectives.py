"""The collectives of ranks, over loopback."""

import time
from dataclasses import replace

import pytest
import torch

from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.parallel import VocabularyShard
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
        assert total is own, "all_reduce works in place"
        everything = ranks.all_gather(columns)
        assert everything.is_contiguous()
        assert ranks.all_gather(columns[:, :1]).is_contiguous()
        return [
            total.tolist(),
            everything.tolist(),
            token_ids.tolist(),
            ranks.least(9 - ranks.rank),
        ]

    want = [[[6.0] * 3] * 2, [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23]], [7, 8], 7]
    assert on_ranks(3, work) == [want] * 3


@pytest.mark.parametrize("vocab_size", [9, 8, 5])
def test_the_best_token_over_all_shards_is_that_of_the_whole_vocabulary(vocab_size: int) -> None:
    """Four ranks divide the vocabulary. The last rank may have fewer tokens than the others, or
    none. Ties go to the lowest token. A row with a number that is not finite gives -1."""
    logits = torch.randint(0, 3, (64, vocab_size), generator=torch.Generator().manual_seed(1))
    logits = torch.cat((logits.float(), torch.full((1, vocab_size), -7.0)))
    logits[3, 1], logits[4, 4], logits[5, -1] = torch.nan, torch.inf, -torch.inf
    want = torch.where(logits.sum(dim=1).isfinite(), logits.argmax(dim=1), -1)
    spec = replace(open_checkpoint("embedded").spec, vocab_size=vocab_size)

    def best(ranks: RankGroup) -> tuple[list[int], list[list[float]]]:
        shard = VocabularyShard(spec, ranks)
        own = logits[:, shard.first : shard.first + shard.count]
        # The padding is zeros, which are larger than -7.
        own = shard.padded(own.t()).t().contiguous()
        return shard.best(own).tolist(), shard.gather(own)[6:].tolist()

    for tokens, everything in on_ranks(4, best):
        assert tokens == want.tolist()
        assert everything == logits[6:].tolist()


def test_connecting_waits_until_all_ranks_have_read_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may be closed after `connect` returns, so the slowest rank must have read it by
    then."""
    from parrot.engine.runner.ranks import group

    read: list[int] = []

    def share(store: object, rank: int, layout: object, device: object) -> None:
        time.sleep(0.3 * rank)
        read.append(rank)

    monkeypatch.setattr(group, "reaches_all", lambda *_: True)
    monkeypatch.setattr(group, "_share_memory", share)
    layout = MemoryLayout.of(3, 8, 1)
    assert on_ranks(3, lambda _: len(read), layout) == [3, 3, 3]
