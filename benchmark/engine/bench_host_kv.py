"""What copies of KV between a GPU and its host cost: an 8B model with random weights, in bfloat16.

    python -m benchmark.engine.bench_host_kv --output benchmark/results/host_kv_h200.json

`rates`: how fast blocks are copied each way, alone and both at once. `returns`: from a request to
its first token when most of its prompt is on the host, on the device, or nowhere. `beside`: steps
while blocks are copied. `load256`: an engine core with a host tier and without, where there is
nothing to bring back.
"""

import argparse
import gc
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

import torch

from benchmark.apps.workloads.shared_prompts import requests_256
from benchmark.engine.core_load import serve_all
from benchmark.engine.gpu_cases import Decode, Row, Sequences
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Outcome, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.plan import Transfer
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

MODEL, BLOCK_SIZE = "llama-3.1-8b", 64
PER_TRANSFER = 8
NUM_COPIED = 256  # blocks, 2 GiB
WARM_STEPS, STEPS = 10, 100
REPEATS = 5
SAMPLING = SamplingConfig(temperature=0.0, max_gen_length=1, ignore_tokenizer_eos=True)


def config_of(host_kv_gb: float, kv: str, num_blocks: int | None = None) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": MODEL,
            "device": "cuda",
            "dtype": "bfloat16",
            "scheduler": {"max_batch_size": 256, "max_num_batched_tokens": 8192},
            "instance": {
                "load_format": "dummy",
                "max_seq_len": 65536,
                "kv_cache_dtype": kv,
                "host_kv_gb": host_kv_gb,
                "num_kv_cache_blocks": num_blocks,
            },
        }
    )


def make_core(config: BuiltinConfig) -> tuple[EngineCore, CudaRunner]:
    runner, tokenizer = load_runner(config)
    assert isinstance(runner, CudaRunner)
    return EngineCore(config, runner, Language.of(tokenizer), MonotonicClock()), runner


class Copier:
    """Copies blocks at the end of the pool, where nobody else is, to and from slots."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self._first = runner.info.num_blocks - 2 * NUM_COPIED
        self._num_begun = 0
        self.num_under_way = 0

    def begin(self, num_blocks: int, *, to_host: bool) -> None:
        for at in range(0, num_blocks, PER_TRANSFER):
            places = range(at, min(at + PER_TRANSFER, num_blocks))
            shift = 0 if to_host else NUM_COPIED
            blocks = tuple(self._first + shift + place for place in places)
            slots = tuple(shift + place for place in places)
            self._num_begun += 1
            self.num_under_way += 1
            self._runner.transfer([Transfer(self._num_begun, to_host, blocks, slots)])

    def take_landed(self, *, wait: bool) -> None:
        landed = self._runner.landed(wait=wait)
        assert all(report.succeeded for report in landed), landed
        self.num_under_way -= len(landed)

    def finish(self) -> None:
        while self.num_under_way:
            self.take_landed(wait=True)


def rates(runner: CudaRunner) -> Row:
    """GB/s."""
    copier = Copier(runner)
    size = NUM_COPIED * runner.info.block_bytes

    def seconds(*directions: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for to_host in directions:
            copier.begin(NUM_COPIED, to_host=to_host)
        copier.finish()
        return time.perf_counter() - began

    def rate(*directions: bool) -> float:
        return size / statistics.median([seconds(*directions) for _ in range(REPEATS)]) / 1e9

    rate(True)
    return {
        "block_bytes": runner.info.block_bytes,
        "to_host": rate(True),
        "from_host": rate(False),
        "each_way_at_once": rate(True, False),
    }


def beside(runner: CudaRunner, batch: int) -> Row:
    """Milliseconds of a decode step at 2k, alone and while copies are under way."""
    copier = Copier(runner)

    def step_ms(directions: Sequence[bool]) -> float:
        sequences, times = Sequences(Decode("", batch, 2048), runner.info), []
        for _ in range(WARM_STEPS + STEPS):
            for to_host in directions if copier.num_under_way < 4 * len(directions) else ():
                copier.begin(4 * PER_TRANSFER, to_host=to_host)
            plan = sequences.next_plan()
            began = time.perf_counter()
            copier.take_landed(wait=False)
            runner.run(plan)
            times.append((time.perf_counter() - began) * 1e3)
        copier.finish()
        return statistics.median(times[WARM_STEPS:])

    return {
        "batch": batch,
        "alone_ms": step_ms(()),
        "to_host_ms": step_ms((True,)),
        "from_host_ms": step_ms((False,)),
        "both_ms": step_ms((True, False)),
    }


def first_token_s(core: EngineCore, key: int, prompt: "array[int]") -> tuple[float, int]:
    """Seconds to the first token of a new context, and the tokens of it that were found. The
    context is freed, and what can be copied has been."""
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    request = EngineRequest(key, (Piece(key, prompt),), sampling=SAMPLING)
    core.requests.submit(request, outcomes.append)
    while not (deliveries := core.requests.outbox.take()):
        core.step()
    seconds = time.perf_counter() - began
    for call, argument in deliveries:
        call(argument)
    core.requests.free([key])
    while core.has_work and core.step():
        pass
    answer = outcomes[0]
    assert isinstance(answer, GenerateResponse), answer
    return seconds, answer.usage.cached_tokens


def returns(core: EngineCore, num_tokens: int) -> Row:
    """The device has room for one such prompt and a bit. It is asked for with 64 tokens more each
    time."""
    rng = torch.Generator().manual_seed(num_tokens)

    def prompt(length: int) -> "array[int]":
        return array("i", torch.randint(100, 30000, (length,), generator=rng).tolist())

    text, key = prompt(num_tokens), 0
    found: dict[str, list[tuple[float, int]]] = {"nowhere": [], "device": [], "host": []}
    for _ in range(REPEATS + 1):
        text = prompt(num_tokens)
        for place, rows in found.items():
            if place == "host":
                first_token_s(core, key, prompt(core.tokens_capacity - BLOCK_SIZE))
            key += 2
            rows.append(first_token_s(core, key - 1, text + prompt(BLOCK_SIZE)))
    row: Row = {"tokens": num_tokens}
    for place, rows in found.items():
        row[place] = {
            "first_token_s": statistics.median(seconds for seconds, _ in rows[1:]),
            "found_tokens": statistics.median(cached for _, cached in rows[1:]),
        }
    return row


def load256(config: BuiltinConfig) -> Row:
    """Seconds for 256 requests that share prompts; no room is ever short."""
    core, _ = make_core(config)
    times = []
    for attempt in range(3):  # other tokens: nothing is found
        requests = [
            (array("i", [token + attempt for token in prompt]), output)
            for prompt, output in requests_256()
        ]
        times.append(serve_all(core, requests).seconds)
    return {"host_kv_gb": config.instance.host_kv_gb, "s": times[1:]}


def in_turn(make: Callable[[], Row]) -> Row:
    """The row, with all of the device's memory free again."""
    row = make()
    gc.collect()
    torch.cuda.empty_cache()
    return row


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host_kv_gb", type=float, default=25.0)
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")


def measure(args: argparse.Namespace, report: Report) -> None:
    def copies() -> Row:
        began = time.perf_counter()
        _, runner = make_core(config_of(args.host_kv_gb, args.kv))
        load_s = time.perf_counter() - began
        return {
            "load_s": load_s,
            "rates_gb_s": rates(runner),
            "beside": [beside(runner, batch) for batch in (1, 8, 64)],
        }

    def tiers() -> Row:
        core, _ = make_core(config_of(args.host_kv_gb, args.kv, num_blocks=32768 // BLOCK_SIZE))
        return {"returns": [returns(core, tokens) for tokens in (2048, 8192, 24576)]}

    report |= {"model": MODEL, **in_turn(copies), **in_turn(tiers)}
    sizes = (0.0, args.host_kv_gb, 0.0, args.host_kv_gb)
    report["load256"] = [
        in_turn(lambda size=size: load256(config_of(size, args.kv)))  # type: ignore[misc]
        for size in sizes
    ]


if __name__ == "__main__":
    run(__name__)
