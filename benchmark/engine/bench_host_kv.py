"""The cost of KV copies between GPU and CPU memory: an 8B model with random weights in bfloat16.

    python -m benchmark.engine.bench_host_kv --output benchmark/results/host_kv_h200.json
    python -m benchmark.engine.bench_host_kv --ranks 2 --parts rates returns beside

`pinning`: the time to pin memory. `rates`: the copy rate in each direction, alone and both at once.
`returns`: the time to first token if most of the prompt's KV is in CPU memory, in GPU memory, or
not kept. `beside`: decode steps while blocks are copied. `load256`: an engine core with and without
a host tier, with no KV to restore. The model is loaded once, and each row is shown at once.
"""

import argparse
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmark.engine.gpu_cases import Decode, Row, Sequences
from benchmark.results import Report, run
from parrot.cli.bench.requests import requests_256
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Outcome, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import Transfer
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.host.copies import GIB, HostMemory, block_parts
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock

PARTS = ("pinning", "rates", "beside", "returns", "load256")
MODEL = "llama-3.1-8b"
PER_TRANSFER = 8
NUM_COPIED = 128  # Blocks; 1 GiB.
WARM_STEPS, STEPS = 10, 60
REPEATS = 3
DEVICE_TOKENS = 32768  # The size of the pool from which KV is evicted.


def config_of(host_kv_gb: float, kv: str, ranks: int) -> BuiltinConfig:
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
                "tensor_parallel": ranks,
            },
        }
    )


def greedy(num_tokens: int) -> SamplingConfig:
    return SamplingConfig(temperature=0.0, max_gen_length=num_tokens, ignore_tokenizer_eos=True)


def pinning(runner: CudaRunner) -> Row:
    """Seconds in which one rank allocates one GiB, and whether it is pinned."""
    parts = block_parts(runner._cache.block_tensors)
    began = time.perf_counter()
    memory = HostMemory(parts, GIB // runner.info.block_bytes)
    return {"gib": 1, "s": time.perf_counter() - began, "is_pinned": memory.is_pinned}


class Copier:
    """Copies blocks at the end of the pool, which no context uses, to and from host slots."""

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


def rates(runner: CudaRunner, ranks: int) -> Row:
    """GB/s, summed over all ranks."""
    copier = Copier(runner)
    size = NUM_COPIED * ranks * runner.info.block_bytes

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
        "block_bytes": ranks * runner.info.block_bytes,
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
        "case": "beside",
        "batch": batch,
        "alone_ms": step_ms(()),
        "to_host_ms": step_ms((True,)),
        "from_host_ms": step_ms((False,)),
        "both_ms": step_ms((True, False)),
    }


def drain(core: EngineCore) -> None:
    """Run steps until no copy is left."""
    while core.has_work and core.step():
        pass


def first_token_s(core: EngineCore, key: int, prompt: "array[int]") -> tuple[float, int]:
    """Seconds to the first token of a new context, and its number of cached tokens. The context is
    then freed."""
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    core.requests.submit(
        EngineRequest(key, (Piece(key, prompt),), sampling=greedy(1)), outcomes.append
    )
    while not (deliveries := core.requests.outbox.take()):
        core.step()
    seconds = time.perf_counter() - began
    for call, argument in deliveries:
        call(argument)
    core.requests.free([key])
    drain(core)
    answer = outcomes[0]
    assert isinstance(answer, GenerateResponse), answer
    return seconds, answer.usage.cached_tokens


def returns(core: EngineCore, num_tokens: int) -> Row:
    """A new prompt, the same prompt with one more block, and again after other KV has evicted it
    from the device."""
    generator = torch.Generator().manual_seed(num_tokens)

    def prompt(length: int) -> "array[int]":
        return array("i", torch.randint(100, 30000, (length,), generator=generator).tolist())

    size = core.info.block_size
    found: dict[str, list[tuple[float, int]]] = {"nowhere": [], "device": [], "host": []}
    key = num_tokens
    for _ in range(REPEATS + 1):
        text = prompt(num_tokens)
        for rows in found.values():
            if rows is found["host"]:
                first_token_s(core, key, prompt(core.tokens_capacity - size))
            key += 2
            rows.append(first_token_s(core, key - 1, text + prompt(size)))
    row: Row = {"case": "returns", "tokens": num_tokens}
    for place, rows in found.items():
        row[f"{place}_s"] = statistics.median(seconds for seconds, _ in rows[1:])
        row[f"{place}_found"] = statistics.median(cached for _, cached in rows[1:])
    return row


def load256_s(core: EngineCore, attempt: int) -> float:
    """Seconds for 256 requests without cached tokens."""
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    for number, (tokens, output) in enumerate(requests_256()):
        prompt = array("i", [token + attempt for token in tokens])
        request = EngineRequest(number, (Piece(number, prompt),), sampling=greedy(output))
        core.requests.submit(request, outcomes.append)
    while len(core.requests):
        core.step()
    seconds = time.perf_counter() - began
    core.requests.free(range(256))
    core.requests.outbox.take()
    drain(core)
    return seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--host_kv_gb", type=float, default=8.0)
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--ranks", type=int, default=1)


def measure(args: argparse.Namespace, report: Report) -> None:
    config = config_of(args.host_kv_gb, args.kv, args.ranks)
    report.uses(MODEL, {"config": config.model_dump(mode="json")})
    began = time.perf_counter()
    runner, tokenizer, _ = load_runner(config)
    assert isinstance(runner, CudaRunner)
    report.add("rows", {"case": "loading", "s": time.perf_counter() - began})

    def core_of(tokens: int | None = None) -> EngineCore:
        sized = config.model_copy(update={"tokens_capacity": tokens})
        return EngineCore(sized, runner, Language.of(tokenizer), MonotonicClock())

    def load256(*, with_host: bool) -> Row:
        info = runner.info
        runner._info = replace(info, num_host_blocks=info.num_host_blocks if with_host else 0)
        seconds = load256_s(core_of(), len(report["rows"]))
        runner._info = info
        return {"case": "load256", "with_host": with_host, "s": seconds}

    makers: dict[str, list[Callable[[], Row]]] = {
        "pinning": [lambda: {"case": "pinning", **pinning(runner)}],
        "rates": [lambda: {"case": "rates, GB/s", **rates(runner, args.ranks)}],
        "beside": [lambda n=n: beside(runner, n) for n in (1, 8, 64)],  # type: ignore[misc]
        "returns": [lambda n=n: returns(core_of(DEVICE_TOKENS), n) for n in (24576, 8192)],  # type: ignore[misc]
        "load256": [lambda w=w: load256(with_host=w) for w in (False, True, False, True)],  # type: ignore[misc]
    }
    for part in args.parts:
        for make in makers[part]:
            report.add("rows", make())
    runner.close()


if __name__ == "__main__":
    run(__name__)
