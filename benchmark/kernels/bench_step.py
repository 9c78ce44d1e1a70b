"""Time a whole decode step of these kernels and cuBLAS in one CUDA graph, with random weights.

    python -m benchmark.kernels.bench_step [--output FILE.json]

The step runs from the embedding to the greedy token, without engine, HTTP or scheduling. The floor
is the time to read the weights and the unique KV once at the copy rate."""

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import PAGE, Workload, normal, prepared, step_rows
from benchmark.kernels.layers import MODELS, Layer, Model
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.work_list import SplitConfig, plan_work
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store, silu_mul
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.products import (
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_linear,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS

CASES = {
    "Llama-3.1-8B": {
        "B=1, 2k": Workload(1, (), 2048),
        "B=8, 2k": Workload(8, (), 2048),
        "B=64, 2k": Workload(64, (), 2048),
        "B=64, 6144 shared + 500": Workload(64, ((64, 6144),), 500),
    },
    "Llama-2-7B": {
        "B=64, 2k": Workload(64, (), 2048),
        "copilot, B=64, 5120 shared + 1180": Workload(64, ((64, 5120),), 1180),
        "roots4, B=64, 4 x 5120 shared + 1180": Workload(64, ((16, 5120),), 1180),
    },
    "Qwen3-0.6B": {
        "B=1, 2k": Workload(1, (), 2048),
        "B=64, 2k": Workload(64, (), 2048),
        "B=256, 100-1900": Workload(256, (), 1000, 900),
    },
}


def linear(x: torch.Tensor | UndividedRows, weight: torch.Tensor) -> torch.Tensor:
    rows = x.rows if isinstance(x, UndividedRows) else x
    if len(rows) > FEW_ROWS:
        return F.linear(rows, weight)
    return few_rows_linear(x, weight, rows.new_empty(len(rows), len(weight)))


def add_and_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor | UndividedRows:
    if len(x) > FEW_ROWS:
        out = torch.empty_like(residual)
        return add_rms_norm(F.linear(x, weight), residual, norm, 1e-5, out)
    return few_rows_add_and_norm(x, weight, residual, norm, 1e-5)


def gated(
    x: torch.Tensor | UndividedRows, gate_up: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    if isinstance(x, UndividedRows):
        return few_rows_linear(x, gate_up, out, silu=True)
    return silu_mul(F.linear(x, gate_up), out)


class Step:
    """The weights of a model, and a decode step of a workload over its own KV pools."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers = [Layer(model) for _ in range(model.layers)]
        self.embedding = normal(model.vocab, model.hidden, std=0.02)
        self.head = normal(model.vocab, model.hidden, std=0.02)
        self.norm = normal(model.hidden, std=0.02) + 1
        self.cos_sin = torch.rand(8192, 128, device="cuda")

    def time(self, work: Workload, gate: GateConfig | None) -> dict[str, Any]:
        model, batch = self.model, work.batch
        step, pages = step_rows(work, PAGE)
        attention, plan = prepared(plan_work(step, model.shape, gate, SplitConfig()), model.shape)
        tables = torch.from_numpy(step.tables).cuda()
        positions = torch.from_numpy(step.starts).cuda()
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        size = (pages, model.kv_heads, PAGE, 128)
        kvs = [KVView(normal(*size), normal(*size), tables, positions) for _ in self.layers]
        tokens = torch.randint(0, model.vocab, (batch,), device="cuda")
        x, residual = normal(batch, model.hidden), normal(batch, model.hidden)
        out = normal(batch, model.heads, 128)
        half = normal(batch, model.inner)

        def run() -> None:
            torch.index_select(self.embedding, 0, tokens, out=residual)
            norm = self.layers[0].norms[0]
            normed = add_rms_norm(residual, residual, norm, 1e-5, x, add=False)
            norms = [*(layer.norms[0] for layer in self.layers[1:]), self.norm]
            for layer, kv, norm in zip(self.layers, kvs, norms, strict=True):
                qkv = linear(normed, layer.qkv)
                q, _ = rope_and_store(qkv, kv, rows, self.cos_sin, model.shape, layer.qk_norm)
                attention.run(q, kv, plan, out)
                normed = add_and_norm(out.view(batch, -1), layer.o, residual, layer.norms[1])
                normed = add_and_norm(
                    gated(normed, layer.gate_up, half), layer.down, residual, norm
                )
            torch.argmax(linear(normed, self.head), dim=-1, out=tokens)

        micros = time_graph(run, replays=15)
        weights = sum(layer.nbytes for layer in self.layers) + self.head.nbytes
        kv_bytes = work.unique_tokens * model.shape.kv_token_bytes * model.layers
        floor = (weights + kv_bytes) / MEMORY_RATE * 1e3
        ms = micros / 1e3
        return {"ms": ms, "floor_ms": floor, "over_floor": ms / floor}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))


def measure(args: argparse.Namespace, report: Report) -> None:
    for name in args.models:
        step = Step(MODELS[name])
        for case, work in CASES[name].items():
            row = {"model": name, "case": case, **step.time(work, GateConfig())}
            if work.levels:
                row["sharing_off_ms"] = step.time(work, None)["ms"]
            report.add("steps", row)
            torch.cuda.empty_cache()
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__name__)
