"""Prompts and decoding of the builtin engine on a CPU, compared with llama.cpp on the same GGUF.

    LLAMA_CPP_PYTHON=VENV/bin/python python -m benchmark.cpu.bench_llama_cpp

VENV has llama-cpp-python, built for this machine. The two take turns: each computes prompts of
random tokens in chunks of 512 and then decodes greedily, while the other waits for input. Figures
are medians, of wall time and of CPU time summed over all threads. CPU time depends far less on
other processes of the machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time

from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.load import load_runner
from tests.support.runner_driver import Driver

CHUNK = 512

LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, threads, context, chunk = sys.argv[1], *map(int, sys.argv[2:])
llama = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=chunk,
              n_ubatch=chunk, verbose=False)
def now():
    return [time.perf_counter(), time.process_time()]
for line in sys.stdin:
    prompt, decode = json.loads(line)
    llama.reset()
    times = [now()]
    llama.eval(prompt)
    token = llama.sample(temp=0)
    times.append(now())
    for _ in range(decode):
        llama.eval([token])
        token = llama.sample(temp=0)
    times.append(now())
    print(json.dumps(times), flush=True)
"""

Times = list[list[float]]
"""Wall time and CPU time: before the prompt, after its first token, and after the last token."""


class LlamaCpp:
    """A process with another Python interpreter. `close` ends it."""

    def __init__(self, python: str, model: str, threads: int, context: int) -> None:
        command = [python, "-c", LLAMA, model, str(threads), str(context), str(CHUNK)]
        self._process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def times(self, prompt: list[int], decode: int) -> Times:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([prompt, decode]), file=self._process.stdin, flush=True)
        times: Times = json.loads(self._process.stdout.readline())
        return times

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def parrot_times(runner: ModelRunner, prompt: list[int], decode: int) -> Times:
    driver = Driver(runner)
    context = driver.context(prompt)
    times = [[time.perf_counter(), time.process_time()]]
    for count in (1, decode):
        driver.generate([context], count, CHUNK)
        times.append([time.perf_counter(), time.process_time()])
    return times


def rates_of(times: Times, prompt: int, decode: int) -> dict[str, float]:
    """Tokens per second."""
    began, first, last = times
    return {
        "prompt_per_s": prompt / (first[0] - began[0]),
        "prompt_per_cpu_s": prompt / (first[1] - began[1]),
        "decode_per_s": decode / (last[0] - first[0]),
        "decode_per_cpu_s": decode / (last[1] - first[1]),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded", help="a GGUF file")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048, 4096])
    parser.add_argument("--decode", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("model", args.model)
    instance = {"num_kv_cache_blocks": 1024, "num_threads": args.threads}
    config = BuiltinConfig.model_validate({"model": args.model, "instance": instance})
    runner = load_runner(config).runner
    assert isinstance(runner, ModelRunner), "this benchmark is for CPUs"
    arms = {"parrot": lambda prompt: parrot_times(runner, prompt, args.decode)}
    llama = None
    if python := os.environ.get(
        "LLAMA_CPP_PYTHON"
    ):  # Without it, only the builtin engine is measured.
        path = open_checkpoint(args.model).source
        llama = LlamaCpp(python, path, args.threads, max(args.prompts) + args.decode + 8)
        arms["llama.cpp"] = lambda prompt: llama.times(prompt, args.decode)
    numbers = random.Random(0)
    try:
        for length in args.prompts:
            rates: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
            for round_number in range(args.rounds + 1):  # The first round warms up.
                prompt = [numbers.randrange(100, 20_000) for _ in range(length)]
                for name, arm in arms.items():
                    found = rates_of(arm(prompt), length, args.decode)
                    if round_number:
                        rates[name].append(found)
            for name, rows in rates.items():
                medians = {
                    key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]
                }
                report.add("rows", {"prompt": length, "engine": name} | medians)
    finally:
        if llama is not None:
            llama.close()


if __name__ == "__main__":
    run(__name__)
