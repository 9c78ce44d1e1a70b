"""Timing on a CUDA device, and the device's peak rates."""

import itertools
import statistics
from collections.abc import Callable
from functools import partial

import torch


def time_graph(run: Callable[[], object], *, replays: int = 20, per_run: int = 1) -> float:
    """Microseconds of one call, if `run` makes `per_run` calls; the median over graph replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and warm up outside the capture
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return replay_us(graph, replays) / per_run


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """The median microseconds of one replay."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times) * 1e3


def ceilings() -> dict[str, float]:
    """The device's measured rates for a large copy, reads from L2 and a matrix product, and the
    cost of one more dependent kernel in a graph."""
    results = {}
    size = (1 << 30,)
    source, target = (torch.randn(size, device="cuda").to(torch.bfloat16) for _ in range(2))
    # The copy is a kernel, because a copy node in a graph does not reach the memory's rate.
    micros = time_graph(partial(torch.neg, source, out=target), replays=10)
    results["copy_tb_s"] = 2 * source.nbytes / micros / 1e6
    small = torch.randn(5 << 20, device="cuda")
    micros = time_graph(partial(repeat, small.sum, 10), per_run=10)
    results["l2_sum_tb_s"] = small.nbytes / micros / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    micros = time_graph(partial(repeat, partial(torch.mm, a, b), 4), per_run=4)
    results["matmul_tflop_s"] = 2 * 8192**3 / micros / 1e6
    tiny = torch.zeros(1, device="cuda")
    micros = time_graph(partial(repeat, partial(tiny.add_, 1), 200), per_run=200)
    results["graph_kernel_us"] = micros
    return results


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
