"""The cost of constrained outputs: host time per token, and the engine's steps.

    python -m benchmark.engine.bench_grammar --device cuda --output benchmark/results/grammar.json
    python -m benchmark.engine.bench_grammar --device cpu --batch 4 --steps 8 --repeats 1

Each step has `--batch` decoding sequences. None, half or all of them are constrained, in turns.
A step is timed from the end of the previous step to its own end, so host work in parallel with the
device costs nothing.
"""

import argparse
import asyncio
import random
import time
from array import array
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.grammar.compiler import GrammarCompiler
from parrot.engine.grammar.constraint import fill_masks
from parrot.engine.runner.load import load_runner
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# No output of these grammars ends before the measured steps.
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": {"type": "array", "items": PERSON, "minItems": 10_000}},
    "any json": {"json_schema": {"type": "array", "minItems": 10_000}},
    "regex": {"regex": "([a-z]+ ){10000}"},
    "call in text": {"grammar": 'start: head "{}"\nhead[lazy]: TEXT "<call>"\nTEXT: /(.|\\n)*/'},
}
PROMPT = 64


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * len(times))]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = BuiltinConfig(
            model=args.model, device=args.device, instance={"load_format": args.load_format}
        )
        self.runner, tokenizer, _ = load_runner(self.config)
        began = time.perf_counter()
        grammars = GrammarCompiler.of(tokenizer, self.runner.info.vocab_size)
        assert grammars is not None, "the bytes of this model's tokens are not known"
        self.load_s = time.perf_counter() - began
        self.grammars = grammars
        language = Language.of(tokenizer, grammars)
        self.core = EngineCore(self.config, self.runner, language, MonotonicClock())
        self.num_requests = 0

    def host(self, kind: str) -> dict[str, Any]:
        """Microseconds to follow an output of random allowed tokens without a model, and to compute
        the masks of `--batch` outputs in parallel."""
        sampling = SamplingConfig(**KINDS[kind])
        began = time.perf_counter()
        asyncio.run(self.grammars.constraint(sampling))
        compiled_s = time.perf_counter() - began
        masks, takes = self.followed(sampling, 1)
        together, _ = self.followed(sampling, self.args.batch)
        return {
            "kind": kind,
            "compile_ms": compiled_s * 1e3,
            "mask_us": median(masks) * 1e6,
            "mask_p99_us": percentile(masks, 0.99) * 1e6,
            "take_us": median(takes) * 1e6,
            "batch": self.args.batch,
            "batch_masks_us": median(together) * 1e6,
            "batch_masks_p99_us": percentile(together, 0.99) * 1e6,
        }

    def followed(self, sampling: SamplingConfig, num_outputs: int) -> tuple[list[float], ...]:
        """Seconds to compute the masks of each step, and to accept each token."""
        numbers = random.Random(0)
        masks, takes = [], []
        for _ in range(self.args.repeats):
            found = [asyncio.run(self.grammars.constraint(sampling)) for _ in range(num_outputs)]
            constraints = [constraint for constraint in found if constraint is not None]
            num_words = constraints[0].vocabulary.num_words
            for place in range(self.args.steps):
                began = time.perf_counter()
                words = np.zeros((num_outputs, num_words), dtype=np.int32)
                fill_masks(constraints, words)
                masks.append(time.perf_counter() - began)
                bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
                for constraint, row in zip(constraints, bits, strict=True):
                    token = int(numbers.choice(np.flatnonzero(row)))
                    began = time.perf_counter()
                    constraint.take(place, token)
                    takes.append(time.perf_counter() - began)
                if any(constraint.is_complete for constraint in constraints):
                    break
        return masks, takes

    def step_ms(self, kind: str, num_constrained: int) -> float:
        """The median step of a batch with `num_constrained` constrained sequences."""
        batch, steps, core = self.args.batch, self.args.steps, self.core
        length = steps + 8
        numbers = random.Random(num_constrained)
        for i in range(batch):
            fields = KINDS[kind] if i < num_constrained else {}
            sampling = SamplingConfig(
                temperature=1.0, seed=i, max_gen_length=length, ignore_tokenizer_eos=True, **fields
            )
            self.num_requests += 1
            key = self.num_requests
            prompt = array("i", numbers.choices(range(100, 1000), k=PROMPT))
            constraint = asyncio.run(self.grammars.constraint(sampling))
            core.requests.submit(
                EngineRequest(key, (Piece(key, prompt),), sampling=sampling, constraint=constraint),
                lambda outcome: None,
            )
        times = [time.perf_counter()]
        while core.has_work and core.step():
            times.append(time.perf_counter())
        core.requests.free(range(self.num_requests - batch + 1, self.num_requests + 1))
        core.requests.outbox.take()
        gaps = [(after - before) * 1e3 for before, after in pairwise(times)]
        return median(gaps[4:steps])

    def steps(self, kind: str) -> dict[str, Any]:
        batch = self.args.batch
        counts = {"free": 0, "half": batch // 2, "all": batch}
        found: dict[str, list[float]] = {name: [] for name in counts}
        for _ in range(self.args.repeats):
            for name, count in counts.items():
                found[name].append(self.step_ms(kind, count))
        row = {name: median(times) for name, times in found.items()}
        return {
            "kind": kind,
            "batch": batch,
            **{f"{name}_ms": value for name, value in row.items()},
            "half_over_free": row["half"] / row["free"],
            "all_over_free": row["all"] / row["free"],
        }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded")
    parser.add_argument(
        "--load-format",
        default="auto",
        choices=["auto", "dummy"],
        help="dummy: random weights, of a folder with config.json and tokenizer.json",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])


def measure(args: argparse.Namespace, report: Report) -> None:
    bench = Bench(args)
    report.uses(args.model, bench.config.model_dump(mode="json"))
    info = bench.runner.info
    report |= {"vocabulary": info.vocab_size, "tokenizer_s": bench.load_s}
    bench.step_ms(args.kinds[0], args.batch // 2)  # Warm up.
    for kind in args.kinds:
        report.add("host", bench.host(kind))
    for kind in args.kinds:
        report.add("steps", bench.steps(kind))


if __name__ == "__main__":
    run(__name__)
