"""Fit the `sim` engine's cost model to measurements of the builtin engine on an H200.

    python -m benchmark.engine.fit_sim --output benchmark/results/sim_fit.json [--write]

`--write` updates sample_configs/engine/sim_*.json. Only steps are fitted. The load `256`, a whole
run of many steps, then shows the accuracy of the fit.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmark.engine.gpu_cases import (
    CROWD,
    DECODES,
    MIXED,
    MODELS,
    PREFILLS,
    Decode,
    Row,
    Shape,
)
from benchmark.kernels import MEMORY_RATE
from benchmark.results import ROOT, Report, load, run
from parrot.cli.bench.requests import requests_256
from parrot.engine.config import SimConfig, load_engine_config
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import FillPiece, GenerateRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.simulation import LoopClock, run_virtual

CONFIGS = ROOT / "sample_configs" / "engine"
DEVICE_BYTES = 139 * 2**30
CACHE_SHARE = 0.9  # The KV pool's share of the memory without the weights.
BLOCK_SIZE = 64
MEAN_OUTPUT = 64  # Mean growth of contexts in a measured decode, in tokens.
MAX_SEQ_LEN = 32768  # Also for Llama-2, whose limit is 4096: only its shape matters here.
# Measured with the kernels alone.
SHARED_STEP = Decode("B=64, 6144 shared + 500", 64, 500, shared=6144)
# Only one prompt length was measured. Heads and layers are the same.
PAIRS_OF = {"llama-2-7b": "llama-3.1-8b"}
MIXED_PROMPT = 8192


@dataclass(frozen=True)
class Costs:
    """The costs of `SimInstance`."""

    step_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0


@dataclass(frozen=True)
class Point:
    """A measured time, and the multiple of each cost in it, in the order of `Costs`."""

    name: str
    counts: tuple[float, float, float, float, float]
    seconds: float


def decode_point(case: Decode, ms: float) -> Point:
    tokens = sum(case.own_lengths()) + case.shared * case.roots + MEAN_OUTPUT * case.batch
    return Point(case.name, (1, case.batch, tokens, 0, 0), ms / 1e3)


def prefill_point(num_tokens: int, chunk: int, ms: float) -> Point:
    steps = num_tokens // chunk
    read = chunk * steps * (steps + 1) / 2
    name = f"prefill {num_tokens} by {chunk}"
    return Point(name, (steps, steps, read, num_tokens, num_tokens**2 / 2), ms / 1e3)


def mixed_point(chunk: int, ms: float) -> Point:
    """The point of the middle chunk of the prompt."""
    crowd, before = decode_point(CROWD, ms), (MIXED_PROMPT - chunk) // 2
    _, sequences, tokens, _, _ = crowd.counts
    counts = (1, sequences + 1, tokens + before + chunk, chunk, chunk * (before + chunk / 2))
    return Point(f"{CROWD.name} + {chunk}", counts, crowd.seconds)


def measured(model: str) -> tuple[list[Point], list[Point]]:
    """Decodes (over HTTP, as in a cluster, if this was measured), and prompts."""
    rows = load(f"engine_gpu_{model}.json")["rows"]
    ms = {row["case"]: row["ms"] for row in rows if "ms" in row and "chunk" not in row}
    decodes = [
        decode_point(case, ms.get(f"HTTP {case.name}", ms[case.name])) for case in DECODES[model]
    ]
    if model == "llama-3.1-8b":
        steps = load("kernels_step_h200.json")["steps"]
        alone = {row["case"]: row["ms"] for row in steps if row["model"] == "Llama-3.1-8B"}
        around = ms["HTTP decode B=64 ctx 2k"] - alone["B=64, 2k"]
        decodes.append(decode_point(SHARED_STEP, alone[SHARED_STEP.name] + around))
    chunked = {(row["case"], row["chunk"]): row["ms"] for row in rows if "chunk" in row}
    prefills = [
        prefill_point(tokens, chunk, chunked[f"prefill {tokens}", chunk])
        for tokens, chunk in PREFILLS[model]
    ]
    if CROWD in DECODES[model]:
        prefills += [mixed_point(chunk, ms[f"{CROWD.name} + {chunk}"]) for chunk in MIXED]
    return decodes, prefills


def fit(points: Sequence[Point], columns: Sequence[int], known: Sequence[float]) -> list[float]:
    """The `known` costs, plus the least-squares fit of relative errors over these columns. Fitted
    costs are never negative."""
    counts = np.array([point.counts for point in points])
    seconds = np.array([point.seconds for point in points])
    target = 1 - counts @ np.array(known) / seconds
    best = (np.inf, list(known))
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            matrix = counts[:, chosen] / seconds[:, None]
            solution = np.linalg.lstsq(matrix, target, rcond=None)[0]
            error = float(np.square(matrix @ solution - target).sum())
            if (solution >= 0).all() and error < best[0]:
                costs = list(known)
                for column, cost in zip(chosen, solution, strict=True):
                    costs[column] += float(cost)
                best = (error, costs)
    return best[1]


def fit_model(model: str, found: dict[str, Costs], rows: list[Row]) -> Costs:
    decodes, prefills = measured(model)
    # Contexts of equal length cannot separate the cost of sequences and of their tokens. So the
    # cost of a KV token is computed from its bytes.
    read_s = Shape.of(model).token_bytes / MEMORY_RATE
    costs = fit(decodes, (0, 1, 2), [0.0, 0.0, read_s, 0.0, 0.0])
    if model in PAIRS_OF:
        costs[4] = found[PAIRS_OF[model]].prefill_pair_s
        costs = fit(prefills, (3,), costs)
    else:
        costs = fit(prefills, (3, 4), costs)
    for point in (*decodes, *prefills):
        predicted = float(np.dot(point.counts, costs))
        row = {"model": model, "case": point.name, "measured_ms": point.seconds * 1e3}
        rows.append(row | {"error": predicted / point.seconds - 1})
    return Costs(*costs)


async def run_256(path: Path) -> float:
    """Output tokens a second of the load `256` on an engine with this config."""
    config = load_engine_config(str(path))
    assert isinstance(config, SimConfig)
    service = SimService(config, LoopClock(), leaps=True)
    await service.start()
    load = requests_256()
    requests = (
        GenerateRequest(
            context_id=n,
            fills=[FillPiece(context_id=n, token_ids=[i % 256 for i in prompt])],
            sampling_config=SamplingConfig(max_gen_length=output),
        )
        for n, (prompt, output) in enumerate(load)
    )
    await asyncio.gather(*(service.generate(request) for request in requests))
    return sum(output for _, output in load) / LoopClock().now()


def check_256(model: str, path: Path) -> Row | None:
    """The relative error of the simulated load `256` against its measurement over HTTP, if any."""
    rows = load(f"engine_gpu_{model}.json")["rows"]
    rates = {row["case"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    if (rate := rates.get("HTTP 256")) is None:
        return None
    simulated = run_virtual(run_256(path))
    row = {"model": model, "measured_tokens_per_s": rate, "simulated_tokens_per_s": simulated}
    return row | {"error": simulated / rate - 1}


def config_of(model: str, costs: Costs) -> Row:
    shape = Shape.of(model)
    room = CACHE_SHARE * (DEVICE_BYTES - shape.weight_bytes)
    instance = {
        "num_kv_cache_blocks": int(room / (shape.token_bytes * BLOCK_SIZE)),
        "block_size": BLOCK_SIZE,
        "max_seq_len": MAX_SEQ_LEN,
        **{key: float(f"{value:.3g}") for key, value in asdict(costs).items()},
    }
    return {
        "engine_type": "sim",
        "model": model,
        "scheduler": {"max_batch_size": 256, "max_num_batched_tokens": 8192},
        "instance": instance,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="update the sample configs")


def measure(args: argparse.Namespace, report: Report) -> None:
    found: dict[str, Costs] = {}
    report |= {"points": [], "load_256": []}
    for model in MODELS:
        found[model] = fit_model(model, found, report["points"])
        path = CONFIGS / f"sim_{model.replace('-', '_').replace('.', '_')}.json"
        if args.write:
            path.write_text(json.dumps(config_of(model, found[model]), indent=2) + "\n")
        report.uses(path.name, path)
        if (row := check_256(model, path)) is not None:
            report["load_256"].append(row)


if __name__ == "__main__":
    run(__name__)
