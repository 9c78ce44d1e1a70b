"""The CPU runner, called as the engine core calls it, with a tiny model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import SampleSpec, SequenceStep, StepPlan
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner import load
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.errors import ModelNumerics
from parrot.protocol.sampling import ResolvedSampling
from parrot.utils.config import ConfigError
from tests.support.kernel_cases import SHARE_ALL
from tests.support.runner_driver import GREEDY, Driver
from tests.support.tiny_model import BOS_ID, EOS_ID, make_tiny_model


def config(folder: Path, **instance: Any) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "instance": {"num_kv_cache_blocks": 64, "block_size": 4, "num_threads": 1} | instance,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return load_runner(config(folder))[0]


def test_info_and_tokenizer_of_a_loaded_runner(folder: Path) -> None:
    runner, tokenizer, _ = load_runner(config(folder, max_seq_len=100))
    info = runner.info
    assert (info.num_blocks, info.block_size, info.max_seq_len, info.vocab_size) == (
        64,
        4,
        100,
        259,
    )
    assert info.cache_mem == pytest.approx(2 * 2 * 2 * 64 * 4 * 8 * 4 / 2**20)
    assert info.kv_dtype == "float32"
    assert info.architecture == "LlamaForCausalLM"
    assert 0 < info.model_mem < 1
    assert tokenizer.special_ids.model_dump() == {"bos": BOS_ID, "eos": [EOS_ID], "add_bos": False}
    assert tokenizer.vocab_size == 259


def test_fp8_kv_takes_a_quarter_of_float32(folder: Path) -> None:
    info = load_runner(config(folder, kv_cache_dtype="fp8"))[0].info
    assert info.cache_mem == pytest.approx(2 * 2 * 2 * 64 * 4 * (8 + 1) / 2**20)
    assert info.kv_dtype == "e4m3"


def test_max_seq_len_never_exceeds_the_models(folder: Path) -> None:
    assert load_runner(config(folder, max_seq_len=10**6))[0].info.max_seq_len == 512


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_warming_up_leaves_an_empty_pool(folder: Path, kv: str) -> None:
    runner = load_runner(config(folder, kv_cache_dtype=kv))[0]
    assert not any(tensor.any() for tensor in runner._cache.block_tensors)


def test_an_empty_plan_does_nothing(runner: ModelRunner) -> None:
    result = runner.run(StepPlan(()))
    assert result.tokens == result.errors == {}


def test_only_sequences_with_a_sample_get_a_token(runner: ModelRunner) -> None:
    driver = Driver(runner)
    first, second = driver.context([1, 2, 3]), driver.context([4, 5, 6, 7, 8])
    assert driver.step([(first, 2), (second, 5)]).tokens.keys() == {second.context_id}
    assert driver.step([(first, 1)]).tokens.keys() == {first.context_id}
    assert driver.step([(driver.context([1, 2]), 1)]).tokens == {}


def test_block_ids_and_earlier_contents_of_blocks_do_not_matter(runner: ModelRunner) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7], list(range(30))]
    clean = Driver(runner, seed=1)
    want = clean.generate([clean.context(p) for p in prompts], 20)
    dirty = Driver(runner, seed=2)
    assert dirty.generate([dirty.context(p) for p in prompts], 20) == want


def test_forks_decode_for_longer_than_a_plan_is_valid(folder: Path) -> None:
    """The planner reuses a plan while contexts grow. With and without shared reads, each fork gets
    the tokens that it gets alone."""
    model = load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    outputs = []
    for gate in (SHARE_ALL, None):
        runner = ModelRunner(model, 300, 4, CpuOptions(gate=gate))
        driver = Driver(runner)
        parent = driver.context([i % 250 for i in range(33)])
        driver.step([(parent, 33)])
        children = [driver.fork(parent, length) for length in (33, 32, 19)]
        for i, child in enumerate(children):
            child.tokens += [100 + i]
        outputs.append(driver.generate(children, 140))
        assert (runner.planner.num_shared_tokens > 140 * 32) == (gate is not None)
    prompts = [c.tokens[: -c.num_output] for c in children]
    outputs.append([driver.generate([driver.context(p)], 140)[0] for p in prompts])
    assert all(output == outputs[0] for output in outputs)


def test_contexts_take_turns_in_a_small_block_table(folder: Path) -> None:
    """There are more contexts than rows in the block table."""
    model = load_decoder(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    few, many = (Driver(ModelRunner(model, 64, 4, CpuOptions(max_rows=rows))) for rows in (1, 8))
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]
    want = many.generate([many.context(p) for p in prompts], 6)
    contexts = [few.context(p) for p in prompts]
    for _ in range(6):
        for context in contexts:
            (token,) = few.step([(context, context.wanted)]).tokens.values()
            context.tokens.append(token)
    assert [c.tokens[len(p) :] for c, p in zip(contexts, prompts, strict=True)] == want


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nan_in_one_job_fails_only_that_job(folder: Path, kv: str) -> None:
    """The blocks of the failed job are full of NaN when other contexts receive them. The tokens of
    these contexts must not change."""
    runner = load_runner(config(folder, num_kv_cache_blocks=9, kv_cache_dtype=kv))[0]
    driver = Driver(runner)
    want = driver.generate([driver.context([5, 6, 7])], 10)
    runner._cache.pools[0].zero_()
    driver = Driver(runner)
    good, bad = driver.context([5, 6, 7]), driver.context(list(range(20)))
    driver.step([(good, 2), (bad, 19)])
    for block in bad.blocks:
        for tensor in runner._cache.block_tensors:
            tensor[:, :, :, block] = 255 if kv == "fp8" else float("nan")
    result = driver.step([(good, 1), (bad, 1)])
    assert isinstance(result.errors[bad.context_id], ModelNumerics)
    assert result.tokens == {good.context_id: want[0][0]}
    driver.release(bad)
    good.tokens.append(want[0][0])
    heirs = [driver.context([5, 6, 7]) for _ in range(2)]
    assert driver.generate([good], 9) == [want[0][1:]]
    assert driver.generate(heirs, 10) == want * 2


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(runner: ModelRunner) -> None:
    sampling = ResolvedSampling(temperature=1.5, top_p=0.95)

    def plan(*seeds: int) -> StepPlan:
        return StepPlan(
            tuple(
                SequenceStep(i, [3, 1, 4], 0, [i], SampleSpec(seed, sampling, seed, 2))
                for i, seed in enumerate(seeds)
            )
        )

    together = runner.run(plan(*range(40))).tokens
    assert len(set(together.values())) > 5
    assert all(runner.run(plan(seed)).tokens[seed] == together[seed] for seed in range(0, 40, 7))


def test_token_sequences_of_any_kind_are_accepted(runner: ModelRunner) -> None:
    spec = SampleSpec(1, GREEDY, 0, 0)
    results = [
        runner.run(StepPlan((SequenceStep(0, tokens, 0, blocks, spec),))).tokens
        for tokens, blocks in (([1, 2], [3]), ((1, 2), (3,)), (np.array([1, 2]), np.array([3])))
    ]
    assert results[0] == results[1] == results[2]


def test_bfloat16_runs(folder: Path) -> None:
    bf16 = config(folder).model_copy(update={"dtype": "bfloat16"})
    driver = Driver(load_runner(bf16)[0])
    assert len(driver.generate([driver.context([1, 2, 3])], 5)[0]) == 5


def test_a_separate_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    changed = config(folder).model_copy(update={"tokenizer": str(other)})
    assert load_runner(changed)[1].special_ids.add_bos


def test_default_number_of_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "blocks_in_free_memory", lambda *_: 11)
    assert load_runner(config(folder, num_kv_cache_blocks=None))[0].info.num_blocks == 11


def test_settings_without_support_on_this_machine_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="triton"):
        load_runner(config(folder, attn_func="triton"))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            load_runner(config(folder).model_copy(update={"device": "cuda:1"}))
