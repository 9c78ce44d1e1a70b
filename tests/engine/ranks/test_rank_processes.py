"""Whole engines whose ranks are processes."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import DeviceLost, Transfer
from parrot.engine.engine_types import create_service
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner import load
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.host.copies import GIB, RankTransfers
from parrot.engine.runner.kv_cache import KVLayout
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.ranks import RankStep, processes
from parrot.engine.runner.ranks.group import RankGroup
from parrot.engine.runner.sizes import KvSizes
from parrot.engine.service import RunnerService, ServiceState
from parrot.protocol.engine_api import GenerateRequest, ScoreRequest, ScoreResponse
from parrot.protocol.errors import Unavailable
from parrot.utils.config import ConfigError
from tests.support import forked_modules
from tests.support.processes import LOOPBACK, children, needs_proc, own_addresses
from tests.support.rank_threads import on_ranks
from tests.support.runner_driver import Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.timeout(300), needs_proc]
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = "one two three four five six "
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.1, "seed": 4, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 1.0},
    {"temperature": 1.0, "regex": "[a-z]{3} [0-9]{4}"},
    {"temperature": 0, "json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
]


def config(folder: Path, ranks: int, **instance: Any) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "cluster_token": "that nobody else is to know",
            "instance": {"num_kv_cache_blocks": 64, "num_threads": 1, "tensor_parallel": ranks}
            | instance,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", overrides=SIZES)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "subprocess", forked_modules.instead_of_subprocess())


@asynccontextmanager
async def engine(config: BuiltinConfig) -> AsyncIterator[RunnerService]:
    service = create_service(config)
    assert isinstance(service, RunnerService)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def requests() -> Iterator[GenerateRequest]:
    """The first request has drafts, because its text repeats. The last two requests use forks of
    its context."""
    for i, sampling in enumerate(SAMPLINGS):
        text = TEXT * 3 if i == 0 else f"{TEXT}{i}"
        yield GenerateRequest.model_validate(
            {
                "context_id": 10 + i,
                "fills": [{"context_id": 10 + i, "text": text}],
                "sampling_config": {"max_gen_length": 24, "ignore_tokenizer_eos": True} | sampling,
                "drafts": {"texts": [[*b"three four five six one"]]} if i == 0 else None,
            }
        )
    for child, length in ((30, 20), (31, 9)):
        yield GenerateRequest.model_validate(
            {
                "context_id": child,
                "parent_context_id": 10,
                "parent_len": length,
                "fills": [],
                "sampling_config": {"temperature": 0, "max_gen_length": 6},
            }
        )


async def outputs(service: RunnerService) -> list[Any]:
    answers = [await service.generate(request) for request in requests()]
    scored = await service.read(ScoreRequest(inputs=[TEXT], num_top=2))
    assert isinstance(scored, ScoreResponse)
    service.check_integrity()
    ids = [(answer.generated_ids, answer.finish_reason) for answer in answers]
    (row,) = scored.logprobs
    return [ids, row.ids]


async def test_two_processes_give_the_answers_of_one_and_exit_together(folder: Path) -> None:
    async with engine(config(folder, 1)) as alone:
        want = await outputs(alone)
    before = {*children(os.getpid())}
    async with engine(config(folder, 2)) as divided:
        assert divided.runtime_info().num_ranks == 2
        assert await outputs(divided) == want
        (rank,) = {*children(os.getpid())} - before
        assert own_addresses(rank) == {LOOPBACK}, "the rank must listen on loopback only"
        lost = threading.Event()
        divided._require_core()._runner._runner.on_lost(lost.set)  # type: ignore[attr-defined]
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.to_thread(lost.wait, 60), "the loss is noticed without a step"
        assert divided.state() is ServiceState.LOST
        with pytest.raises(Unavailable):
            await divided.generate(next(requests()))
    assert {*children(os.getpid())} == before


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_two_processes_have_the_same_window_slots(tmp_path: Path, family: str) -> None:
    """There are so few slots that windows are evicted, copied to CPU memory and loaded again."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 20}
    folder = make_tiny_model(tmp_path / "model", family, overrides=sizes)
    async with engine(config(folder, 1, num_window_slots=0)) as alone:
        want = await outputs(alone)
    slots = {"num_window_slots": 9, "host_kv_gb": 0.1}
    async with engine(config(folder, 2, **slots)) as divided:
        info = divided.runtime_info()
        assert info.window_slots is not None
        assert (info.num_ranks, info.window_slots.num_slots) == (2, 9)
        assert await outputs(divided) == want
        assert divided.runtime_info().host_tier.stored_bytes > 0


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_hangs_in_a_step_is_killed(folder: Path) -> None:
    """The step on rank 0 ends when the other rank is killed."""
    runner = load_runner(config(folder, 2)).runner
    driver = Driver(runner)
    driver.generate([driver.context([1, 2])], 2)
    assert isinstance(runner, ModelRunner)
    assert runner._unit is not None
    runner._unit._patience_s = 1.0
    (rank,) = forked_modules.running()
    os.kill(rank, signal.SIGSTOP)
    # Otherwise a stopped rank would outlive this test.
    rescue = threading.Timer(60, os.kill, (rank, signal.SIGKILL))
    rescue.start()
    with pytest.raises(DeviceLost, match="a step has not ended for 1 s"):
        driver.generate([driver.context([1, 2])], 2)
    rescue.cancel()
    runner.close()
    assert not forked_modules.running()


@pytest.mark.usefixtures("forked_ranks")
def test_a_model_that_cannot_be_divided_is_refused_and_leaves_no_process(folder: Path) -> None:
    with pytest.raises(ConfigError, match="which 3 ranks cannot divide among them; set it to 1, 2"):
        load_runner(config(folder, 3))
    assert not forked_modules.running()


@pytest.mark.usefixtures("forked_ranks")
def test_a_transfer_that_fails_on_another_rank_ends_the_unit(folder: Path) -> None:
    layout = KVLayout.of(open_checkpoint(str(folder)).spec, 16, torch.float32)
    runner = load_runner(config(folder, 2, host_kv_gb=4 * layout.block_bytes / GIB)).runner
    assert isinstance(runner, ModelRunner)
    driver, lost = Driver(runner), threading.Event()
    runner.on_lost(lost.set)
    runner.transfer([Transfer(1, True, (5,), (3,))])
    assert [one.transfer_id for one in runner.landed(wait=True)] == [1]
    driver.generate([driver.context([1, 2])], 1)
    assert runner._unit is not None
    runner._unit.send(RankStep.of(RankTransfers((Transfer(2, True, (5,), (4,)),))))
    assert lost.wait(60)
    with pytest.raises(DeviceLost, match="rank 1 has ended"):
        runner.transfer([Transfer(3, True, (5,), (3,))])
    with pytest.raises(DeviceLost, match="rank 1 has ended"):
        runner.landed(wait=False)
    runner.close()


LAYOUT, CPU = (
    KVLayout((LayerGroup(tuple(range(1)), 1, 16),), 16, torch.float32),
    torch.device("cpu"),
)


@pytest.mark.usefixtures("forked_ranks")
def test_devices_of_different_kinds_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such devices might choose different kernels and graphs, and then wait for each other
    forever."""
    # Only the rank in this process.
    monkeypatch.setattr(processes, "device_kind", lambda _: "another")
    with pytest.raises(ConfigError, match="rank 0 has another and rank 1 cpu"):
        load_runner(config(folder, 2))
    assert not forked_modules.running()


def test_all_ranks_have_the_same_number_of_blocks_and_refuse_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def agreed(free: list[int]) -> list[Any]:
        free_sizes = iter(free)
        monkeypatch.setattr(load, "blocks_in_free_memory", lambda *_: next(free_sizes))

        def ask(group: RankGroup) -> object:
            try:
                return load.blocks_for_all(LAYOUT, CPU, group)
            except ConfigError:
                return ConfigError

        return on_ranks(3, ask)

    assert agreed([7, 5, 6]) == [5, 5, 5]
    assert agreed([7, 0, 6]) == [ConfigError] * 3


def test_ranks_divide_the_host_tier_and_refuse_more_than_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 30 * LAYOUT.block_bytes

    def agreed(num_blocks: float | None) -> list[Any]:
        free_sizes = iter([2 * free, free, 3 * free])
        monkeypatch.setattr(load, "available_memory", lambda: next(free_sizes))
        gib = None if num_blocks is None else num_blocks * LAYOUT.block_bytes / GIB

        def ask(group: RankGroup) -> object:
            try:
                num_bytes = load.host_bytes_for_all(gib, KvSizes(LAYOUT, 100), group)
                return num_bytes // LAYOUT.block_bytes
            except ConfigError:
                return ConfigError

        return on_ranks(3, ask)

    assert agreed(30) == [10, 10, 10]
    assert agreed(31) == [ConfigError] * 3
    assert agreed(None) == [5, 5, 5]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_three_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    """The model has 3 KV heads, as the embedded model, so 3 is its only number of ranks above 1."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
    folder = make_tiny_model(tmp_path / "model", overrides=heads | {"intermediate_size": 96})
    found = []
    for ranks in (1, 3):
        runner = load_runner(config(folder, ranks)).runner
        driver = Driver(runner)
        contexts = [driver.context([*b"one two"]), driver.context([*b"one"])]
        found.append(driver.generate(contexts, 16))
        runner.close()
    assert found[0] == found[1]
