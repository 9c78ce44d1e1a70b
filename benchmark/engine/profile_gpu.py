"""The time of a step on a GPU: kernels by name, summed over several steps.

    python -m benchmark.engine.profile_gpu [--model llama-3.1-8b] [--output FILE.json]

`share` is the fraction of all kernels' time, `ms` the time per step. `idle_ms` is the wall time of
a step in which no kernel ran: the host plans, copies and reads, and the profiler adds some time.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmark.engine.bench_gpu import config_of, load_cuda
from benchmark.engine.gpu_cases import Decode, Sequences
from benchmark.results import Report, run
from parrot.engine.core.steps import StepPlan
from parrot.engine.runner.cuda import CudaRunner

STEPS = 10
TOP = 12


def profile_steps(runner: CudaRunner, next_plan: Callable[[], StepPlan]) -> dict[str, Any]:
    for _ in range(5):
        runner.run(next_plan())
    plans = [next_plan() for _ in range(STEPS)]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        began = time.perf_counter()
        for plan in plans:
            runner.run(plan)
        torch.cuda.synchronize()
        step_ms = (time.perf_counter() - began) * 1e3 / STEPS
    kernels = [e for e in recorded.key_averages() if e.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda e: e.self_device_time_total, reverse=True)
    total_ms = sum(e.self_device_time_total for e in kernels) / 1e3 / STEPS
    rows = [
        {
            "kernel": event.key[:90],
            "calls": event.count / STEPS,
            "ms": round(event.self_device_time_total / 1e3 / STEPS, 4),
            "share": round(event.self_device_time_total / 1e3 / STEPS / total_ms, 4),
        }
        for event in kernels[:TOP]
    ]
    return {
        "step_ms": round(step_ms, 3),
        "kernels_ms": round(total_ms, 3),
        "idle_ms": round(step_ms - total_ms, 3),
        "top": rows,
    }


def decoding(runner: CudaRunner, batch: int) -> Callable[[], StepPlan]:
    return Sequences(Decode(f"decode B={batch} ctx 2k", batch, 2048), runner.info).next_plan


def filling(runner: CudaRunner, num_tokens: int) -> Callable[[], StepPlan]:
    (step,) = Sequences(Decode("prefill", 1, 0), runner.info).fill(num_tokens, num_tokens)
    return lambda: StepPlan((step,))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3.1-8b")


def measure(args: argparse.Namespace, report: Report) -> None:
    config = config_of(args.model)
    report.uses(args.model, config.model_dump(mode="json"))
    runner, _ = load_cuda(config)
    report["model"] = args.model
    for batch in (1, 64):
        report[f"decode B={batch} ctx 2k"] = profile_steps(runner, decoding(runner, batch))
    report["prefill 8192"] = profile_steps(runner, filling(runner, 8192))


if __name__ == "__main__":
    run(__name__)
