"""The CUDA runner on the CPU, in Triton's interpreter, gives the tokens of the plain runner."""

import asyncio
import functools
import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import numpy as np
import torch

from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import KernelConfig
from parrot.engine.attention.triton_attention import TritonAttention
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import (
    PoolSpec,
    SampleSpec,
    ScoreSpec,
    SequenceStep,
    StepPlan,
    StepRunner,
)
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.kernels.linear import products
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.models import decoder, gguf_file
from parrot.engine.models.checkpoint import load_decoder, open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.ggml_blocks import GPU_FORMATS
from parrot.engine.models.layers import Linear, PlainLinear
from parrot.engine.models.packed import Head, Packed, Weights, packed_linear
from parrot.engine.models.words_linear import WordsLinear, words_of
from parrot.engine.runner import step_computer as token_choice
from parrot.engine.runner import step_computer as warm_up
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.runner.cuda import CudaOptions, CudaRunner
from parrot.engine.runner.inputs import StepInputs
from parrot.protocol.engine_api import NO_PARENT, GenerateResponse
from parrot.protocol.errors import ModelNumerics
from parrot.protocol.sampling import Logprobs, ResolvedSampling
from parrot.utils.clock import MonotonicClock
from tests.support.answer import Answer
from tests.support.byte_tokenizer import plain_byte_tokenizer
from tests.support.four_bit_checkpoints import quantise_folder
from tests.support.gguf_models import Kind, write_gguf
from tests.support.kernel_cases import SHARE_ALL
from tests.support.runner_driver import Context, Driver
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.timeout(300),
]

BLOCKS, SIZE = 64, 16
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1},
    "qwen2": {"hidden_size": 64, "num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "mistral": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "sliding_window": 8,
    },
    "smollm3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
    },
    "gemma2": {"num_attention_heads": 4, "sliding_window": 8},
    "gemma3": {"num_attention_heads": 4, "sliding_window": 8},
    "glm4": {"num_hidden_layers": 1},
    "granite": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1},
    "olmo2": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1},
    "cohere": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1},
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    },
}
MakeRunners = Callable[..., tuple[ModelRunner, CudaRunner]]


WEIGHTS = {
    "": Weights.PLAIN,
    "e4m3": Weights.E4M3,
    "four bits": Weights.KEPT,
    "GGUF types": Weights.KEPT,
    "int8 head": Weights.PLAIN,
}
# q, k and v become 8-bit codes with offsets and out becomes signed codes. The other matrices become
# 4-bit codes.
GGUF_TYPES = {"attn_v": Kind.Q8_0, "attn_o": Kind.Q8_0, "blk": Kind.Q4_1}


def packed_as_on_a_gpu(parts: Sequence[Packed], bias: torch.Tensor | None) -> Linear | None:
    four_bit = [part for part in parts if isinstance(part, CodedMatrix)]
    whole = CodedMatrix.joined(four_bit) if four_bit else None
    if whole is None:
        return packed_linear(parts, bias)
    words = words_of(whole)
    assert words is not None
    return WordsLinear(words, bias)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def load(family: str) -> Decoder:
        name, _, kind = family.partition(" in ")
        overrides = OVERRIDES[name]
        if kind == "four bits":
            # The sizes are whole groups.
            overrides = overrides | {"hidden_size": 64, "intermediate_size": 96}
        path = make_tiny_model(folder / family, name, overrides=overrides)
        if kind == "four bits":
            quantise_folder(path, folder / kind / name, "awq", 32)
            path = folder / kind / name
        if kind == "GGUF types":
            path /= "model.gguf"
            write_gguf(path, kind=GGUF_TYPES)
        checkpoint = open_checkpoint(str(path))
        cpu = torch.device("cpu")
        weights = WEIGHTS[kind]
        with pytest.MonkeyPatch.context() as patch:  # The kernels read plain weights.
            patch.setattr(decoder, "make_linear", PlainLinear)
            patch.setattr(decoder, "packed_linear", packed_as_on_a_gpu)
            patch.setattr(gguf_file, "CPU_TYPES", GPU_FORMATS)
            head = Head.INT8 if kind == "int8 head" else Head.PLAIN
            model = load_decoder(checkpoint, torch.float32, cpu, weights=weights, head=head)
        assert isinstance(model.lm_head, WordsLinear) == (head is Head.INT8)
        linears = [linear for layer in model.layers for linear in layer.linears]
        is_coded = all(isinstance(linear, WordsLinear) for linear in linears)
        assert is_coded == (weights is Weights.KEPT)
        return model

    return load


@pytest.fixture
def make_runners(model_of: Callable[[str], Decoder]) -> MakeRunners:
    def make(
        family: str,
        gate: GateConfig | None = None,
        max_rows: int = 8,
        quantised: bool = False,
        size: int = SIZE,
        num_slots: int = 0,
    ) -> tuple[ModelRunner, CudaRunner]:
        model = model_of(family)
        options = CudaOptions(
            max_rows=max_rows,
            max_tokens=128,
            gate=gate,
            use_graphs=False,
            upcast=True,
            quantised=quantised,
            num_slots=num_slots,
        )
        plain = ModelRunner(model, BLOCKS, size, CpuOptions(quantised=quantised))
        return plain, CudaRunner(model, BLOCKS, size, options)

    return make


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that few programs fill, so that the warm-up takes seconds."""
    monkeypatch.setattr(warm_up, "config_for", lambda _: KernelConfig(deep_resident=4))


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("family", "quantised"),
    [
        *itertools.product(OVERRIDES, (False,)),
        # One family for each kind of attention. The other families do not differ in their KV.
        *itertools.product(("llama", "mistral", "gemma2", "gemma3", "qwen3"), (True,)),
        *((f"{family} in e4m3", False) for family in ("llama", "gemma3")),
        *((f"{family} in four bits", False) for family in ("llama", "gemma3")),
        ("llama in GGUF types", False),
        # The second model has a tied head.
        *((f"{family} in int8 head", False) for family in ("llama", "gemma3")),
    ],
)
def test_greedy_tokens(make_runners: MakeRunners, family: str, quantised: bool) -> None:
    """Prompts run at once and in chunks. A single sequence takes the path for a batch of one. In
    plain numbers, all prompts fit the kernels for few rows; `test_log_probabilities_of_prompts`
    covers longer ones."""
    is_plain = not quantised and " in " not in family
    prompts = random_prompts(5, 17, 9) if is_plain else random_prompts(5, 29, 17)
    plain, own = (Driver(runner) for runner in make_runners(family, quantised=quantised))
    want = plain.generate([plain.context(p) for p in prompts], 2)
    assert own.generate([own.context(p) for p in prompts], 1) == [[first] for first, _ in want]
    assert own.generate([own.context(p) for p in prompts], 2, 13) == want
    assert own.generate([own.context(prompts[0])], 2) == want[:1]


def pool_of(context: Context) -> PoolSpec:
    return PoolSpec(context.context_id, len(context.tokens) // 2, len(context.tokens))


def check_sums(want: Any, own: Any) -> None:
    vectors = [torch.tensor(np.frombuffer(s.unit() or b"", dtype="<f4")) for s in (want, own)]
    torch.testing.assert_close(*vectors, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", OVERRIDES)
@pytest.mark.parametrize("lengths", [(5, 9, 1), (1, 1)])
def test_sums_of_hidden_states_next_to_sampling(
    make_runners: MakeRunners, family: str, lengths: tuple[int, ...]
) -> None:
    """Sums over few rows and over single tokens, in a step with a sequence that samples."""
    found = []
    for driver in map(Driver, make_runners(family)):
        contexts = [driver.context(p) for p in random_prompts(*lengths)]
        read = {c.context_id: pool_of(c) for c in contexts[1:]}
        result = driver.step([(c, c.wanted) for c in contexts], read=read)
        assert result.read.keys() == read.keys()
        found.append(result)
    assert found[0].tokens == found[1].tokens
    for context_id, want in found[0].read.items():
        check_sums(want, found[1].read[context_id])


@pytest.mark.parametrize("family", OVERRIDES)
def test_log_probabilities_of_prompts(make_runners: MakeRunners, family: str) -> None:
    """Ranges of few rows, of more rows than a slice, and of no rows, in a step with a sum and a
    sequence that samples. The step has more rows than the kernels for few rows take."""
    found = []
    sums, tokens = [], []
    for driver in map(Driver, make_runners(family)):
        sampled, pooled, *contexts = [driver.context(p) for p in random_prompts(5, 9, 70, 3, 1)]
        read: dict[int, PoolSpec | ScoreSpec] = {pooled.context_id: pool_of(pooled)}
        for num_top, context in enumerate(contexts):
            targets = context.tokens[2:]
            read[context.context_id] = ScoreSpec(context.context_id, 1, targets, num_top)
        work = [sampled, pooled, *contexts]
        result = driver.step([(c, c.wanted) for c in work], read=read)
        assert result.read.keys() == read.keys()
        found.append([result.read[c.context_id] for c in contexts])
        sums.append(result.read[pooled.context_id])
        tokens.append(result.tokens[sampled.context_id])
    assert tokens[0] == tokens[1]
    check_sums(*sums)
    for num_top, (want, own) in enumerate(zip(*found, strict=True)):
        assert isinstance(want, Logprobs)
        assert isinstance(own, Logprobs)
        assert (own.width, len(own)) == (1 + num_top, len(want))
        np.testing.assert_allclose(own.values, want.values, rtol=1e-3, atol=1e-4)
        assert own.ids[:: own.width] == want.ids[:: want.width]
    assert [len(rows) for rows in found[0]] == [68, 1, 0]


@pytest.mark.parametrize(
    ("gate", "quantised", "size"),
    [(SHARE_ALL, False, 16), (None, False, 16), (SHARE_ALL, True, 16), (SHARE_ALL, True, 64)],
)
def test_forks_with_and_without_sharing(
    make_runners: MakeRunners, gate: GateConfig | None, quantised: bool, size: int
) -> None:
    plain, own = make_runners("llama", gate, quantised=quantised, size=size)
    lengths = (3 * size + 2, 2 * size + 1, 2 * size)
    (prompt,) = random_prompts(lengths[0])
    outputs = []
    for driver in (Driver(plain), Driver(own)):
        parent = driver.context(prompt)
        driver.step([(parent, len(prompt))])
        children = [driver.fork(parent, length) for length in lengths]
        for index, child in enumerate(children):
            child.tokens += [index, 3]
        outputs.append(driver.generate(children, 3))
    assert outputs[0] == outputs[1]
    assert (own.planner.num_shared_tokens > 0) == (gate is not None)
    assert (own.planner.num_shared_steps > 0) == (gate is not None)


class Launches:
    """Replaces a kernel. Records each kind of arguments that Triton would compile separately."""

    def __init__(self, seen: set[Any]) -> None:
        self._seen = seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = tuple(_specialised(argument) for argument in arguments)
            self._seen.add((kinds, tuple(constants.items())))

        return launch


def _specialised(argument: Any) -> Any:
    if isinstance(argument, int):
        return 1 if argument == 1 else argument % 16 == 0
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


@pytest.mark.usefixtures("small_device")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Values of padding are undefined.
def test_warm_up_compiles_products_of_any_few_rows(
    make_runners: MakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = make_runners("llama", max_rows=FEW_ROWS)
    monkeypatch.setattr(TritonAttention, "attend", lambda _, layer, q, *__, **___: q.flatten(1))
    seen: set[Any] = set()
    kernels = [f"{few}_{what}_kernel" for few in ("few_rows", "row") for what in ("linear", "qkv")]
    for name in kernels:
        monkeypatch.setattr(products, name, Launches(seen))
    reports: list[str] = []
    runner.warm_up(reports.append)
    assert reports[0].startswith("compiling kernels of step 1 of ")
    warm = set(seen)
    driver = Driver(runner)
    for count in (1, 2, 16, 17, 33, 48):
        contexts = [driver.context([7]) for _ in range(count)]
        driver.step([(context, 1) for context in contexts])
        for context in contexts:
            driver.release(context)
    assert seen == warm


def core_answers(runner: StepRunner, samplings: list[ResolvedSampling]) -> list[GenerateResponse]:
    """The answers to requests of different lengths. The last request arrives while the others
    decode."""
    tokenizer = plain_byte_tokenizer(259)
    grammars = GrammarCompiler.of(tokenizer, 259)
    assert grammars is not None
    language = Language.of(tokenizer, grammars)
    config = BuiltinConfig(fill_chunk_size=16)
    core = EngineCore(config, runner, language, MonotonicClock())
    answers = [Answer() for _ in samplings]
    prompts = random_prompts(5, 20, 17)
    for number, (sampling, answer) in enumerate(zip(samplings, answers, strict=True)):
        limits = {"max_gen_length": 3 + number, "ignore_tokenizer_eos": True}
        order = EngineRequest(
            number,
            (Piece(number, array("i", prompts[number])),),
            sampling=sampling.model_copy(update=limits),
            constraint=asyncio.run(grammars.constraint(sampling)),
        )
        if number == len(samplings) - 1:
            for _ in range(3):
                core.step()
        core.requests.submit(order, answer)
    while core.has_work and core.step():
        pass
    for call, argument in core.requests.outbox.take():
        call(argument)
    core.check_integrity()
    return [a.response for a in answers if isinstance(a.response, GenerateResponse)]


def core_outputs(runner: StepRunner, samplings: list[ResolvedSampling]) -> list[list[int]]:
    return [answer.generated_ids for answer in core_answers(runner, samplings)]


# Tokens that repeat often.
FEW = {"logit_bias": {7: 50.0, 8: 49.3, 9: 48.9}}
DRAWN: list[dict[str, Any]] = [{"temperature": 0.9, "top_p": 0.9}]
PENALIZED: list[dict[str, Any]] = [
    {"frequency_penalty": 2.0, "repetition_penalty": 1.5, **FEW},
    {},
]
# The regex decides with each first letter which letters may follow.
CONSTRAINED: list[dict[str, Any]] = [
    {"temperature": 0, "regex": "([a-m][A-M]|[n-z][N-Z])+", "frequency_penalty": 2.0},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.9, "regex": "([a-m][A-M]|[n-z][N-Z])+", "logit_bias": {7: 90}},
]


@pytest.mark.parametrize(
    ("overlap", "fields"),
    [
        (True, [{"temperature": 0}]),
        (True, [{"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 1.0, **FEW}]),
        (True, [{"temperature": 0, "repetition_penalty": 10.0, **FEW}, {"temperature": 0}]),
        *((overlap, fields) for fields in (DRAWN, PENALIZED) for overlap in (True, False)),
        *((overlap, CONSTRAINED) for overlap in (True, False)),
    ],
    ids=str,
)
def test_steps_launched_ahead_under_the_engine_core(
    make_runners: MakeRunners,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    fields: list[dict[str, Any]],
) -> None:
    """Tokens go from step to step on the device. Penalties count them there."""
    plain, own = make_runners("llama")
    own._overlap = overlap
    pending: list[int] = []
    build = own._inputs.build

    def recording(plan: StepPlan) -> StepInputs:
        inputs = build(plan)
        pending.extend(inputs.pending)
        return inputs

    monkeypatch.setattr(own._inputs, "build", recording)
    samplings = [ResolvedSampling(**fields[i % len(fields)], seed=i) for i in range(3)]
    want = core_outputs(plain, samplings)
    assert core_outputs(own, samplings) == want
    assert [len(output) for output in want] == [3, 4, 5]
    assert Counter(pending) == ({0: 2, 1: 3, 2: 4} if overlap else {})


@pytest.mark.parametrize(
    ("family", "quantised", "size"),
    [("gemma3", False, 16), ("mistral", False, 16), ("gemma2", True, 16), ("gemma3", True, 64)],
)
def test_window_slots_under_the_engine_core(
    make_runners: MakeRunners, family: str, quantised: bool, size: int
) -> None:
    """The slots are NaN at first, so that a read outside the windows would change the tokens."""
    plain, own = make_runners(family, SHARE_ALL, quantised=quantised, size=size, num_slots=9)
    assert own.info.window is not None
    for tensor in own._cache.slot_tensors:
        tensor.fill_(255 if tensor.dtype is torch.uint8 else torch.nan)
    core_of = [windowed_outputs(runner, size) for runner in (plain, own)]
    assert core_of[0] == core_of[1]


def windowed_outputs(runner: StepRunner, size: int) -> list[list[int]]:
    """The outputs of a context and of forks inside its prompt. All contexts are longer than the
    window."""
    language = Language.of(plain_byte_tokenizer(259))
    core = EngineCore(BuiltinConfig(), runner, language, MonotonicClock())
    (prompt,) = random_prompts(3 * size)
    sampling = ResolvedSampling(temperature=0, max_gen_length=4, ignore_tokenizer_eos=True)
    outputs = []
    for number, length in enumerate((0, 3 * size, 2 * size + 3)):
        parent = (number and 1, length) if number else (NO_PARENT, None)
        tokens = array("i", prompt if not number else [number])
        answer = Answer()
        piece = Piece(number + 1, tokens, *parent)
        core.requests.submit(EngineRequest(number, (piece,), sampling=sampling), answer)
        while core.has_work and core.step():
            core.check_integrity()
        for call, argument in core.requests.outbox.take():
            call(argument)
        assert isinstance(answer.response, GenerateResponse), answer.error
        outputs.append(answer.response.generated_ids)
    return outputs


@pytest.mark.parametrize("overlap", [True, False])
def test_log_probabilities(make_runners: MakeRunners, overlap: bool) -> None:
    """Log probabilities come from the logits before adjustments change them in place. One row
    requests none, and steps are launched ahead."""
    plain, own = make_runners("llama")
    own._overlap = overlap
    samplings = [
        ResolvedSampling(temperature=0, logprobs=3, frequency_penalty=2.0, **FEW),
        ResolvedSampling(temperature=0.9, seed=4),
        ResolvedSampling(temperature=1.0, top_p=0.9, seed=5, logprobs=0),
    ]
    want, found = core_answers(plain, samplings), core_answers(own, samplings)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.generated_ids == theirs.generated_ids
        if theirs.logprobs is None:
            assert ours.logprobs is None
            continue
        assert ours.logprobs is not None
        assert ours.logprobs.ids == theirs.logprobs.ids
        assert list(ours.logprobs.values) == pytest.approx(list(theirs.logprobs.values), abs=1e-4)
    assert [a.logprobs and len(a.logprobs) for a in want] == [3, None, 5]


def test_steps_without_log_probabilities_copy_no_logits(
    make_runners: MakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, own = make_runners("llama")
    scored: list[int] = []
    score = token_choice.score_tokens

    def recording(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        scored.append(len(logits))
        return score(logits, tokens, num_top)

    monkeypatch.setattr(token_choice, "score_tokens", recording)
    core_answers(own, [ResolvedSampling(temperature=0)] * 2)
    assert scored == []
    core_answers(
        own, [ResolvedSampling(temperature=0), ResolvedSampling(temperature=0, logprobs=1)]
    )
    assert scored == [1] * 4


def test_a_failed_launch_repeats_the_step_and_gives_the_same_tokens(
    make_runners: MakeRunners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step may have been launched before the failure is known."""
    plain, own = make_runners("llama")
    samplings = [ResolvedSampling(temperature=0, frequency_penalty=2.0, **FEW)] * 3
    want = core_outputs(plain, samplings)
    forward, calls = own.computer._forward, 0

    def fail(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (2, 7):
            raise torch.OutOfMemoryError("out of memory")
        return forward(*arguments)

    monkeypatch.setattr(own.computer, "_forward", fail)
    assert core_outputs(own, samplings) == want
    assert calls > 7


SAMPLINGS = [
    ResolvedSampling(),
    ResolvedSampling(temperature=0.7, top_p=0.8),
    ResolvedSampling(temperature=0),
    ResolvedSampling(top_k=20, min_p=0.01),
    ResolvedSampling(temperature=1.5, presence_penalty=1.0, logit_bias={7: 2.0}),
]


def test_sampled_tokens_in_mixed_steps(make_runners: MakeRunners) -> None:
    """Rows with different samplings, with and without a prompt in the step. In the last step, one
    row does not sample."""
    outputs: list[list[dict[int, int]]] = []
    for runner in make_runners("llama"):
        driver = Driver(runner)
        contexts = [driver.context(p) for p in random_prompts(5, 9, 3, 4, 6)]
        found = [driver.step([(c, 1) for c in contexts]).tokens]
        specs = []
        for c, sampling in zip(contexts, SAMPLINGS, strict=True):
            spec = SampleSpec(c.context_id, sampling, 7, len(c.tokens), (), tuple(c.tokens))
            tokens = c.tokens[c.done :]
            specs.append(SequenceStep(c.context_id, tokens, c.done, c.blocks, spec))
        found.append(runner.run(StepPlan(tuple(specs))).tokens)
        again = [s._replace(token_ids=[1], start=s.end, sample=s.sample) for s in specs]
        again[2] = again[2]._replace(sample=None)
        found.append(runner.run(StepPlan(tuple(again))).tokens)
        outputs.append(found)
    assert [len(tokens) for tokens in outputs[0]] == [0, 5, 4]
    assert outputs[0] == outputs[1]


def test_nan_fails_only_its_own_job(make_runners: MakeRunners) -> None:
    _, own = make_runners("llama")
    driver = Driver(own)
    good, bad = driver.context([5, 6, 7]), driver.context(list(range(20)))
    driver.step([(good, 2), (bad, 19)])
    own._cache.pools[0][:, :, :, bad.blocks[0]] = float("nan")
    result = driver.step([(good, 1), (bad, 1)])
    assert isinstance(result.errors[bad.context_id], ModelNumerics)
    assert result.tokens.keys() == {good.context_id}


@pytest.mark.usefixtures("small_device")
def test_warming_up_writes_no_block_of_a_context(make_runners: MakeRunners) -> None:
    _, own = make_runners("opt")
    own.warm_up()
    assert not own._cache.pools[0][:, :, :, :BLOCKS].any()
