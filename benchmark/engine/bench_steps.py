"""The cost of a step beyond greedy decoding: sampling, prompts next to decodes, host time.

    python -m benchmark.engine.bench_steps [--models qwen3-0.6b ...] [--output FILE.json]

`sampled`: milliseconds of decode steps that are launched ahead, by sampling method. `host_ms` is
the host time of `launch`. `mixed`: 32 decodes at 1k and a prompt in one step, as a graph and
kernel by kernel. `capture_ms`: the capture of a decode graph while serving.
"""

import argparse
import random
import statistics
import time
from array import array
from typing import Any

import torch

from benchmark.engine.bench_gpu import config_of, load_cuda, run_ms
from benchmark.engine.gpu_cases import Decode, Sequences
from benchmark.results import Report, run
from parrot.engine.core.steps import PENDING, LaunchedStep, SampleSpec, SequenceStep, StepPlan
from parrot.engine.runner.cuda import CudaRunner
from parrot.protocol.sampling import ResolvedSampling

CHOICES = {
    "greedy": ResolvedSampling(temperature=0),
    "temperature": ResolvedSampling(temperature=0.8),
    "min_p": ResolvedSampling(temperature=0.8, min_p=0.05),
    "top_p": ResolvedSampling(temperature=0.8, top_p=0.95),
    "top_k, top_p": ResolvedSampling(temperature=0.8, top_k=20, top_p=0.95),
    "penalties": ResolvedSampling(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5),
    "all penalties": ResolvedSampling(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
    ),
}
STEPS = 40
CONTEXT = 1024
TEXT = memoryview(array("i", random.Random(0).choices(range(20000), k=CONTEXT + 2 * STEPS)))
"""Tokens of the contexts, for penalties. The second half of the first CONTEXT tokens is output."""


def drawn(step: SequenceStep, sampling: ResolvedSampling, *, is_first: bool) -> SequenceStep:
    """A step with penalties. The last token is known at the launch of the first step only."""
    known = TEXT[: step.end if is_first else step.end - 1]
    spec = SampleSpec(
        step.context_id, sampling, step.context_id, step.end, known[CONTEXT // 2 :], known
    )
    return step._replace(sample=spec, token_ids=step.token_ids if is_first else [PENDING])


def bench_sampled(runner: CudaRunner, batch: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sampling in CHOICES.items():
        sequences = Sequences(Decode(f"B={batch}", batch, CONTEXT), runner.info)
        runner.run(sequences.next_plan())  # Assigns rows to the contexts.
        plans = [
            StepPlan(tuple(drawn(s, sampling, is_first=not n) for s in sequences.next_step()))
            for n in range(STEPS + 5)
        ]
        previous: LaunchedStep | None = None
        host, began = [], 0.0
        for number, plan in enumerate(plans):
            if number == 5:
                torch.cuda.synchronize()
                began = time.perf_counter()
            start = time.perf_counter()
            launched = runner.launch(plan, previous)
            host.append((time.perf_counter() - start) * 1e3)
            assert launched is not None
            if previous is not None:
                previous.wait()
            previous = launched
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - began) * 1e3 / STEPS
        found[name] = {"ms": round(step_ms, 3), "host_ms": round(statistics.median(host[5:]), 3)}
    return found


def bench_mixed(runner: CudaRunner, prompt: int) -> dict[str, float]:
    sequences = Sequences(Decode("mixed", 32, 1024), runner.info)
    (fill,) = sequences.fill(prompt, prompt)
    found = {}
    graphs = runner.computer.graphs
    for name in ("graph", "eager"):
        runner.computer.graphs = graphs if name == "graph" else None
        times = run_ms(runner, (sequences.next_plan(fill) for _ in range(15)))
        found[name] = round(statistics.median(times[3:]), 3)
    runner.computer.graphs = graphs
    return found


def bench_capture(runner: CudaRunner) -> float:
    graphs = runner.computer.graphs
    assert graphs is not None
    size = graphs.sizes[3]
    work = runner.computer._synthetic.for_graphs(size)[0]
    graphs._graphs[size].clear()
    runner.computer._stage_padding(size.rows, 0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        graphs.prepare(size, work)
    torch.cuda.synchronize()
    runner.computer._stage.sent()
    return round((time.perf_counter() - start) * 1e3, 1)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in args.models:
        began = time.perf_counter()
        config = config_of(model)
        report.uses(model, config.model_dump(mode="json"))
        runner, _ = load_cuda(config)
        row: dict[str, Any] = {"load_s": round(time.perf_counter() - began, 1)}
        report[model] = row
        for batch in (1, 64, 256):
            row[f"sampled B={batch}"] = bench_sampled(runner, batch)
        for prompt in (50, 200, 700, 1400):
            row[f"mixed {prompt}"] = bench_mixed(runner, prompt)
        row["capture_ms"] = bench_capture(runner)
        print(model, row, flush=True)
        del runner
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__name__)
