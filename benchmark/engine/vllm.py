"""The times of vLLM 0.25.1 for the loads of `bench_gpu`, from the raw files of its runs.

These runs sampled at temperature 1; `baseline_side_by_side_h200.json` has greedy ones."""

from collections.abc import Sequence

from benchmark.results import load

FILES = {
    "qwen3-0.6b": ("Qwen3-0.6B",),
    "llama-3.1-8b": ("Llama-3.1-8B",),
    "llama-2-7b": ("Llama-2-7b", "cascade-Llama-2-7b", "cascade-roots4-Llama-2-7b"),
    "llama-2-13b": ("Llama-2-13b",),
}


def vllm_ms(model: str, case: str) -> float | None:
    """Milliseconds of a step or a prompt, with cascade attention if that is faster. None if it was
    not measured."""
    return min(_found(model, _key(case)), default=None)


def vllm_tokens_per_s(model: str) -> float | None:
    """Output tokens a second of the load `256`."""
    return min(_found(model, "256_tok_s"), default=None)


def _found(model: str, key: str) -> Sequence[float]:
    reports = [load(f"baseline_vllm-0.25.1-{name}.json") for name in FILES.get(model, ())]
    return [report[key] for report in reports if key in report]


def _key(case: str) -> str:
    """The name in vLLM's files: `decode B=8 ctx 2k` is decode_b8_ms, `prefill 2048` is
    prefill_2048_ms. Other contexts were not measured."""
    kind, _, size = case.partition(" ")
    if kind == "prefill":
        return f"prefill_{size}_ms"
    batch, _, context = size.removeprefix("B=").partition(" ")
    if kind == "decode" and context != "ctx 2k":
        return ""
    return f"{kind}_b{batch}_ms" if kind == "decode" else f"{kind}_b{batch}_ms_per_step"
