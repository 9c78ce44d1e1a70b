"""The accuracy of KV or weights in e4m3, on a CPU: logits of texts, and greedy outputs.

    python -m benchmark.engine.bench_quantised_kv [--models embedded] [--variants "bfloat16" ...]
        [--output FILE.json]

The embedded model reads pages of docs/, models with random weights read random tokens. `logits`
compares all positions of a text with the same model in float32, by KL divergence in nats. `greedy`
decodes 48 tokens after each of 16 prompts. A model with weights and KV in bfloat16 is the
reference for usual errors. AWQ and GPTQ are only formats here: numbers are rounded to nearest, with
the range of a group (AWQ) or with its largest number (GPTQ). With weights in e4m3 the rows are
rounded too, as on a GPU. A head in int8 has the numbers of `head_dtype: int8`, in bfloat16.

The embedded model is a file in Q4_1, so Q4_1 changes nothing. Its width is 576: FP8 blocks of 128
and K formats of GGUF, whose blocks have 256 numbers, do not fit."""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmark.results import ROOT, Report, run
from parrot.engine.attention.torch_attention import WHOLE_SPANS, TorchAttention
from parrot.engine.attention.work_list import StepRows, plan_work
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.models.codes import CodedMatrix
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.fp8 import Fp8Matrix
from parrot.engine.models.packed import Packed
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.models.tensors import head_name, tensor_plans
from parrot.engine.runner.cpu import CpuOptions, ModelRunner
from parrot.engine.runner.kv_cache import KVCache, KVLayout
from tests.support.four_bit_checkpoints import rounded
from tests.support.runner_driver import Driver

Row = dict[str, Any]


class Variant(NamedTuple):
    dtype: torch.dtype
    quantised: bool = False  # KV in e4m3.
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None  # Each matrix of the layers.
    packed: Callable[[torch.Tensor], Fp8Matrix] | None = None  # The same, in e4m3.
    head: Callable[[torch.Tensor], CodedMatrix] | None = None


def fp8_with_powers(numbers: torch.Tensor) -> Fp8Matrix:
    """As with `dtype: fp8`."""
    return Fp8Matrix.of(numbers.bfloat16())


def fp8_with_one_factor(numbers: torch.Tensor) -> Fp8Matrix:
    factor = numbers.abs().max() / 448.0
    codes = (numbers / factor).to(torch.float8_e4m3fn)
    return Fp8Matrix(codes, factor.expand(len(numbers)).contiguous())


def gguf_numbers(kind: gguf.GGMLQuantizationType, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers of a GGUF file with these matrices. `gguf` does not write K formats."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(numbers.numpy(), kind), kind))


def four_bit_numbers(group: int, numbers: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    return rounded(numbers, group, symmetric=symmetric).numbers()


PAGES = (
    "internals/architecture",
    "engines",
    "internals/kernels",
    "internals/scheduling",
    "security",
    "api",
)
NUM_TEXT, NUM_PROMPTS, NUM_OUTPUT, BLOCK_SIZE = 512, 16, 48, 16
CPU, BF16, GGUF = torch.device("cpu"), torch.bfloat16, gguf.GGMLQuantizationType
EXACT = Variant(torch.float32)
VARIANTS = {
    "float32, KV e4m3": Variant(torch.float32, True),
    "bfloat16": Variant(BF16),
    "bfloat16, KV e4m3": Variant(BF16, True),
    "bfloat16, weights e4m3": Variant(BF16, packed=fp8_with_powers),
    "bfloat16, FP8 with one factor": Variant(BF16, packed=fp8_with_one_factor),
    "bfloat16, GGUF Q8_0": Variant(BF16, rounded=partial(gguf_numbers, GGUF.Q8_0)),
    "bfloat16, GGUF Q4_0": Variant(BF16, rounded=partial(gguf_numbers, GGUF.Q4_0)),
    "bfloat16, AWQ g32": Variant(BF16, rounded=partial(four_bit_numbers, 32, symmetric=False)),
    "bfloat16, AWQ g64": Variant(BF16, rounded=partial(four_bit_numbers, 64, symmetric=False)),
    "bfloat16, GPTQ g64": Variant(BF16, rounded=partial(four_bit_numbers, 64, symmetric=True)),
    "bfloat16, head int8": Variant(BF16, head=CodedMatrix.rounded),
    "bfloat16, weights e4m3, head int8": Variant(
        BF16, packed=fp8_with_powers, head=CodedMatrix.rounded
    ),
}
_RANDOM = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
RANDOM = {
    "random Llama": _RANDOM | {"architectures": ["LlamaForCausalLM"]},
    "random Qwen3": _RANDOM | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
}


@dataclass(frozen=True)
class Subject:
    """A model and its inputs. `take` returns a tensor by its name, in float32."""

    spec: DecoderSpec
    take: Callable[[str], torch.Tensor]
    texts: list[list[int]]

    def load(self, variant: Variant) -> Decoder:
        def take(name: str) -> torch.Tensor:
            numbers = self.take(name)
            if variant.rounded is not None and name.endswith("proj.weight"):
                numbers = variant.rounded(numbers)
            return numbers.to(variant.dtype)

        def take_packed(name: str) -> Packed | None:
            if name == head_name(self.spec):
                return None if variant.head is None else variant.head(self.take(name))
            return None if variant.packed is None else variant.packed(self.take(name))

        return Decoder(self.spec, take, variant.dtype, CPU, take_packed=take_packed)


def embedded() -> Subject:
    checkpoint = open_checkpoint("embedded")
    tokenizer = Tokenizer.from_str(checkpoint.load_tokenizer().tokenizer_json)
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in PAGES]
    texts = [tokenizer.encode(page).ids[:NUM_TEXT] for page in pages]
    return Subject(checkpoint.spec, lambda name: checkpoint.take(name).float(), texts)


def random_model(config: dict[str, Any]) -> Subject:
    """A model whose random weights are scaled so that a layer adds about as much as its input."""
    spec = spec_from_config(config, "a random model")
    shapes = {name: plan.shape for name, plan in tensor_plans(spec).items()}

    def take(name: str) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shapes[name])
        generator = torch.Generator().manual_seed(sum(name.encode()))
        scale = shapes[name][-1] ** -0.5
        return torch.empty(shapes[name]).normal_(0.0, scale, generator=generator)

    numbers = random.Random(0)
    texts = [numbers.choices(range(spec.vocab_size), k=NUM_TEXT) for _ in PAGES]
    return Subject(spec, take, texts)


@torch.inference_mode()
def logits_of(model: Decoder, text: list[int], quantised: bool) -> torch.Tensor:
    """Float32 [tokens, vocab]. As in decoding, attention reads all KV from the pool."""
    num_blocks = -(-len(text) // BLOCK_SIZE)
    layout = KVLayout.of(model.spec, BLOCK_SIZE, model.dtype, quantised=quantised)
    attention = TorchAttention(
        KVCache(layout, num_blocks, CPU).pooled, model.spec.attention.num_heads
    )
    tables = np.arange(num_blocks + 1, dtype=np.int32)[None] % num_blocks
    step = StepRows(tables, np.zeros(1, dtype=np.int32), np.array([len(text)], dtype=np.int32))
    plan = attention.plan(plan_work(step, attention.shape, None, WHOLE_SPANS), step)
    tokens, positions = torch.tensor(text), torch.arange(len(text))
    return model.logits(model.forward(tokens, positions, partial(attention.run, plan=plan)))


def compare_logits(exact: torch.Tensor, other: torch.Tensor, text: list[int]) -> Row:
    difference = (other - exact).abs()
    logs, other_logs = exact.log_softmax(-1), other.log_softmax(-1)
    divergence = F.kl_div(other_logs, logs, log_target=True, reduction="none").sum(-1)
    same = exact.argmax(-1) == other.argmax(-1)
    targets = torch.tensor(text[1:])
    return {
        "max_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "mean_kl": float(divergence.mean()),
        "max_kl": float(divergence.max()),
        "same_best": float(same.float().mean()),
        "loss": float(F.cross_entropy(other[:-1], targets)),
        "exact_loss": float(F.cross_entropy(exact[:-1], targets)),
    }


def bench_logits(subject: Subject, variants: list[str]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    model = subject.load(EXACT)
    expected = [logits_of(model, text, False) for text in subject.texts]
    spread = float(torch.stack([logits.std() for logits in expected]).mean())
    for name in variants:
        model = subject.load(VARIANTS[name])
        rows = [
            compare_logits(exact, logits_of(model, text, VARIANTS[name].quantised), text)
            for exact, text in zip(expected, subject.texts, strict=True)
        ]
        found[name] = {
            key: max(row[key] for row in rows) if key.startswith("max") else _mean(rows, key)
            for key in rows[0]
        } | {"spread_of_logits": spread}
    return found


def _mean(rows: list[Row], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def greedy(model: Decoder, prompts: list[list[int]], quantised: bool) -> list[list[int]]:
    num_blocks = len(prompts) * (-(-(len(prompts[0]) + NUM_OUTPUT) // BLOCK_SIZE) + 1)
    driver = Driver(ModelRunner(model, num_blocks, BLOCK_SIZE, CpuOptions(quantised=quantised)))
    return driver.generate([driver.context(prompt) for prompt in prompts], NUM_OUTPUT)


def bench_greedy(subject: Subject, variants: list[str]) -> dict[str, Row]:
    """Greedy outputs after prompts of 40 to 220 tokens from the texts."""
    numbers = random.Random(1)
    prompts = []
    for index in range(NUM_PROMPTS):
        text, length = subject.texts[index % len(subject.texts)], 40 + 12 * index
        first = numbers.randrange(len(text) - length + 1)
        prompts.append(text[first : first + length])
    prompts.sort(key=len, reverse=True)
    expected = greedy(subject.load(EXACT), prompts, EXACT.quantised)
    found: dict[str, Row] = {}
    for name in variants:
        outputs = greedy(subject.load(VARIANTS[name]), prompts, VARIANTS[name].quantised)
        firsts = [
            next((i for i in range(NUM_OUTPUT) if a[i] != b[i]), NUM_OUTPUT)
            for a, b in zip(expected, outputs, strict=True)
        ]
        found[name] = {
            "same_outputs": sum(first == NUM_OUTPUT for first in firsts) / len(firsts),
            "median_first_different": median(firsts),
            "first_different": sorted(firsts),
        }
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["embedded", *RANDOM])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))


def measure(args: argparse.Namespace, report: Report) -> None:
    report |= {"text_tokens": NUM_TEXT, "texts": len(PAGES), "output_tokens": NUM_OUTPUT}
    for name in args.models:
        report.uses(name, RANDOM.get(name, name))
        subject = random_model(RANDOM[name]) if name in RANDOM else embedded()
        for key, bench in (("logits", bench_logits), ("greedy", bench_greedy)):
            for variant, row in bench(subject, args.variants).items():
                report.add(key, {"model": name, "variant": variant} | row)


if __name__ == "__main__":
    run(__name__)
