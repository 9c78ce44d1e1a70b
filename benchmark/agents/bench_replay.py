"""Which features keep agents' KV: recorded sessions replayed through ServeCore.

    python -m benchmark.agents.bench_replay --rows lru all --agents 16 32
    python -m benchmark.agents.bench_replay --scale 1 --agents 32
    python -m benchmark.agents.bench_replay --builtin FOLDER --rows all --agents 32    on a GPU
    python -m benchmark.agents.bench_replay --url http://localhost:9000 --model llama-3.1-8b

The engine serves an 8B model on one H200. At `--scale` 0.25, lengths, KV and CPU memory are a
quarter. By default the engine is simulated on virtual time. `--builtin` starts ServeCore and the
model in FOLDER as new processes for each row, with random weights and the folder's `config.json`,
tokenizer and chat template. `--url` measures a running service as one row, with the features that
are on there.
"""

import argparse
import asyncio
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.agents.replay import Replay, Setup
from benchmark.results import Report, run
from benchmark.simulated import ENGINES, changed, core_config, sim_engine, words
from parrot.cluster import Cluster
from parrot.engine.config import SimConfig
from parrot.protocol.http import HttpClient
from parrot.server.app import create_app
from parrot.simulation import SimCluster, fixed, run_virtual
from parrot.simulation.links import DistantTransport

HOST_GIB = 100
DEVICE_TOKENS, HOST_TOKENS = 860_000, 819_200  # KV on an H200 with an 8B model, and in HOST_GIB
LOAD_TIMEOUT_S = 240.0
# Prompts with KV in FP8 take this many times as long. With it, waits match agents_h200.json.
_FP8_PROMPTS = 1.4
_BLOCK = 64  # Tokens in a block of the builtin engine.
OUT_OF = 240_000  # Tokens of the longest sessions.
ROWS: dict[str, tuple[str, ...]] = {
    "lru": (),
    "next_use": ("next_use",),
    "host": ("host",),
    "fp8": ("fp8",),
    "next_use_host": ("next_use", "host"),
    "host_fp8": ("host", "fp8"),
    "all": ("next_use", "host", "fp8"),
}
"""Which features are on in each row."""

_COMMON = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also did many
"""  # In common vocabularies, each word with the space before it is one token.


def english(draw: random.Random, num_tokens: int) -> str:
    """A text of `num_tokens` tokens in common vocabularies."""
    return " ".join(draw.choices(_COMMON.split(), k=num_tokens))


def scheduler_keys(features: tuple[str, ...]) -> dict[str, Any]:
    return {"kv_eviction": "next_use" if "next_use" in features else "lru"}


def sim_config(features: tuple[str, ...], scale: float) -> SimConfig:
    base = sim_engine(ENGINES / "sim_llama_3_1_8b.json")
    size, costs = base.instance.block_size, base.instance
    twice = 2 if "fp8" in features else 1
    slower = _FP8_PROMPTS if "fp8" in features else 1.0
    on_host = HOST_TOKENS if "host" in features else 0
    return changed(
        base,
        **{
            "instance.max_seq_len": 262_144,
            "instance.num_kv_cache_blocks": int(scale * twice * DEVICE_TOKENS) // size,
            "instance.num_host_kv_blocks": int(scale * twice * on_host) // size,
            "instance.context_token_s": costs.context_token_s / twice,
            "instance.host_token_s": costs.host_token_s / twice,
            "instance.prefill_token_s": costs.prefill_token_s * slower,
            "instance.prefill_pair_s": costs.prefill_pair_s * slower,
        },
    )


async def _simulate(setup: Setup, features: tuple[str, ...]) -> dict[str, Any]:
    core = core_config(**scheduler_keys(features))
    engine = sim_config(features, setup.scale)
    async with SimCluster(1, engine=engine, core=core) as cluster:
        transport = DistantTransport(create_app(cluster.core), fixed(0.0))
        replay = Replay(setup, transport, engine.model, words)
        await replay.run()
        await transport.close()
        cluster.core.check_integrity()
    return replay.figures()


def builtin_config(folder: Path, features: tuple[str, ...], scale: float) -> dict[str, Any]:
    fp8 = "fp8" in features
    return {
        "engine_type": "builtin",
        "model": str(folder),
        "dtype": "bfloat16",
        "device": "cuda",
        "scheduler": {"max_batch_size": 128, "max_num_batched_tokens": 8192},
        "instance": {
            "load_format": "dummy",
            "max_seq_len": int(scale * OUT_OF),
            "num_kv_cache_blocks": int(scale * (2 if fp8 else 1) * DEVICE_TOKENS) // _BLOCK,
            "host_kv_gb": scale * HOST_GIB if "host" in features else 0,
            "kv_cache_dtype": "fp8" if fp8 else "auto",
        },
    }


def _serve(setup: Setup, features: tuple[str, ...], folder: Path) -> dict[str, Any]:
    engine = builtin_config(folder, features, setup.scale)
    core = {"global_scheduler": scheduler_keys(features)}
    with Cluster(core=core, engines=[engine], ready_timeout_s=LOAD_TIMEOUT_S) as cluster:
        model = cluster.configs[cluster.engine_names[0]]["model"]
        return asyncio.run(_ask(setup, cluster.core_url, model))


async def _ask(setup: Setup, url: str, model: str) -> dict[str, Any]:
    async with HttpClient(url) as transport:
        replay = Replay(setup, transport, model, english)
        await replay.run()
    return replay.figures()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 16, 32, 48])
    parser.add_argument("--scale", type=float, default=0.25, help="scales all lengths and the KV")
    parser.add_argument("--max-len", type=int, help="tokens at which sessions end")
    parser.add_argument("--warm-up", type=float, default=210.0, help="seconds not counted")
    parser.add_argument("--duration", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--builtin", type=Path, help="a model folder, to run on a GPU")
    parser.add_argument("--url", help="use a running ServeCore instead of simulated engines")
    parser.add_argument("--model", default="llama-3.1-8b", help="the model at --url")
    parser.add_argument("--seed", type=int, default=11)


def measure(args: argparse.Namespace, report: Report) -> None:
    max_len = args.max_len or int(OUT_OF * args.scale)
    rows = args.rows if args.url is None else ["url"]
    for row in rows:
        report.uses(row, args.url or _engine_config(row, args))
    for num_agents in args.agents:
        setup = Setup(
            num_agents,
            args.scale,
            max_len,
            warm_up_s=args.warm_up,
            duration_s=args.duration,
            seed=args.seed,
        )
        for row in rows:
            figures = _replayed(row, setup, args)
            report.add("runs", {"row": row, "agents": num_agents} | figures)
    report["setup"] = asdict(setup)


def _engine_config(row: str, args: argparse.Namespace) -> dict[str, Any]:
    if args.builtin is not None:
        return builtin_config(args.builtin, ROWS[row], args.scale)
    return sim_config(ROWS[row], args.scale).model_dump(mode="json")


def _replayed(row: str, setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    if args.url is not None:
        return asyncio.run(_ask(setup, args.url, args.model))
    if args.builtin is not None:
        return _serve(setup, ROWS[row], args.builtin)
    return run_virtual(_simulate(setup, ROWS[row]))


if __name__ == "__main__":
    run(__name__)
