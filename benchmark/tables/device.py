"""Tables of engines and kernels."""

from statistics import median

from benchmark.engine.vllm import vllm_ms, vllm_tokens_per_s
from benchmark.results import load
from benchmark.tables.markdown import Row, table

HTTP_FILES = {
    "llama-3.1-8b": "engine_gpu_llama-3.1-8b_http.json",
    "qwen3-0.6b": "engine_gpu_qwen3-0.6b_http.json",
    "llama-2-7b": "engine_gpu_llama-2-7b_decode.json",
    "llama-2-13b": "engine_gpu_llama-2-13b.json",
}


def gpu() -> str:
    """The builtin engine over HTTP, against the floor and vLLM."""
    rows = []
    for model, name in HTTP_FILES.items():
        floors = {
            row["case"]: row["floor_ms"]
            for row in load(f"engine_gpu_{model}.json")["rows"]
            if "floor_ms" in row
        }
        for row in load(name)["rows"]:
            case = row["case"].removeprefix("HTTP ")
            if not row["case"].startswith("HTTP ") or case == "ready":
                continue
            if "tokens_per_s" in row:
                rate, theirs = f"{row['tokens_per_s']:,.0f}/s", vllm_tokens_per_s(model)
                rows.append([model, f"`{case}`", "", rate, "", f"{theirs:,.0f}/s"])
                continue
            floor = floors.get(case)
            over = f"{row['ms'] / floor:.2f}" if floor else ""
            rows.append([model, case, floor, row["ms"], over, vllm_ms(model, case)])
    return table(["model", "case", "floor, ms", "measured, ms", "/ floor", "vLLM, ms"], rows)


SIDES = {
    "Llama-3.1-8B": (("vllm_8b", "vllm_8b_again"), "parrot_8b"),
    "Qwen3-0.6B": (("vllm_06b",), "parrot_06b"),
    "Llama-2-7B": (("vllm_7b_cascade",), "parrot_7b"),
    "Llama-2-13B": (("vllm_13b",), "parrot_13b"),
}


def side_by_side() -> str:
    """vLLM and our engine on one card on the same day. Above 1, our engine is faster."""
    found, rows = load("baseline_side_by_side_h200.json"), []
    for model, (theirs, ours) in SIDES.items():
        for key, value in found[ours].items():
            other = [found[side][key] for side in theirs if key in found[side]]
            if not other or not isinstance(value, float) or key == "start_s":
                continue
            mean = sum(other) / len(other)
            over = value / mean if key.endswith("tok_s") else mean / value
            rows.append([model, _name(key), mean, value, f"{over:.2f}"])
    return table(["model", "case", "vLLM 0.25.1", "Parrot", "ratio"], rows)


def drafts() -> str:
    """Milliseconds per token of one sequence, with and without drafts. The text is forced."""
    found = [*load("drafts_h200.json")["rows"], *load("drafts_new_h200.json")["rows"]]
    rows = [
        [
            {"edit": "edited file", "new": "new text"}[row["case"]],
            str(row["batch"]),
            row["off_ms"],
            row["on_ms"],
            f"{row['speedup']:.2f}",
            row["tokens_per_step"],
            row["drafted"],
            row["acceptance"],
        ]
        for row in sorted(found, key=lambda row: (row["case"], row["batch"]))
    ]
    head = ["text", "batch", "without", "with", "ratio", "tokens a step", "drafted", "accepted"]
    return table(head, rows)


def drafted_applications() -> str:
    """Seconds of whole applications, with and without drafts. The texts are forced."""
    rows: list[Row] = [
        [
            f"`{row['case']}`{calls}",
            row[f"{part}off_s"],
            row[f"{part}on_s"],
            f"{row[f'{part}speedup']:.2f}",
        ]
        for row in load("drafts_h200.json")["applications"]
        for part, calls in (("", f", {row['calls']} calls"), ("revise_", ", revising calls"))
        if not part or row["revise_off_s"] != row["off_s"]
    ]
    return table(["application", "without, s", "with, s", "ratio"], rows)


def _name(key: str) -> str:
    units = {"_tok_s": "output tokens/s", "_ms_per_step": "ms a step", "_ms": "ms", "_s": "s"}
    ending = next(ending for ending in units if key.endswith(ending))
    what = key.removesuffix(ending).replace("_b", " B=").replace("_", " ")
    return f"{what}, {units[ending]}"


def quantised_steps() -> str:
    """Decode steps with KV in bfloat16 and in e4m3, on one card."""
    plain = {row["case"]: row for row in load("engine_gpu_llama-3.1-8b_long.json")["rows"]}
    rows: list[Row] = []
    for row in load("engine_gpu_llama-3.1-8b_fp8.json")["rows"]:
        if row["case"].startswith("decode"):
            before = plain[row["case"]]["ms"]
            floor, ms = row["floor_ms"], row["ms"]
            rows.append([row["case"], before, ms, f"{before / ms:.2f}", floor, f"{ms / floor:.2f}"])
    heads = ("case", "bfloat16, ms", "e4m3, ms", "ratio", "floor of e4m3, ms", "/ floor")
    return table(list(heads), rows)


def tensor_parallel() -> str:
    """Steps on two GPUs, launched ahead, with sums by NCCL or through shared memory."""
    with_nccl = {row["case"]: row for row in load("tensor_parallel_8b_nccl.json")["rows"]}
    rows: list[Row] = []
    for name in ("8b", "70b"):
        for row in load(f"tensor_parallel_{name}.json")["rows"]:
            if row["case"] == "load":
                continue
            ms, nccl = _ahead_ms(row), _ahead_ms(with_nccl[row["case"]]) if name == "8b" else ""
            floor, over = row["floor_ms"], f"{ms / row['floor_ms']:.2f}"
            rows.append([row["model"], row["case"], floor, row["link_ms"], nccl, ms, over])
    heads = ("model", "case", "floor, ms", "NVLink part", "NCCL, ms", "measured, ms", "/ floor")
    return table(list(heads), rows)


def _ahead_ms(row: Row) -> float:
    """The step's time. Prompts are not launched ahead, so they have only `ms`."""
    found: float = row.get("ahead_ms", row["ms"])
    return found


def sampling() -> str:
    """Milliseconds per step by sampling method, for decodes at 1k tokens, launched ahead."""
    found, rows = load("engine_gpu_steps.json"), []
    names = ("greedy", "temperature", "min_p", "top_p", "top_k, top_p")
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        for case, row in found[model].items():
            if case.startswith("sampled"):
                cells = [row[name]["ms"] for name in names]
                rows.append(
                    [model, case.removeprefix("sampled "), *cells, row["greedy"]["host_ms"]]
                )
    return table(["model", "batch", *names, "host time, greedy"], rows)


def prompts_among_decodes() -> str:
    """32 decodes and a prompt in one step, as a graph and kernel by kernel."""
    found, rows = load("engine_gpu_steps.json"), []
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        for case, row in found[model].items():
            if case.startswith("mixed"):
                rows.append([model, case.removeprefix("mixed "), row["graph"], row["eager"]])
    return table(["model", "prompt tokens", "as a graph, ms", "eagerly, ms"], rows)


def mixed_steps() -> str:
    """25 decodes at 2200 tokens and a prompt chunk in one step."""
    rows = [
        [row["case"].rpartition(" ")[2], row["ms"]]
        for row in load("engine_gpu_llama-2-13b.json")["rows"]
        if row["case"].startswith("25 at 2200 +")
    ]
    return table(["prompt tokens next to 25 decodes, Llama-2-13B", "ms"], rows)


def cpu() -> str:
    """Decoding on two CPU cores: tokens per second, median of the rounds and their spread."""
    found = load("engine_cpu.json")
    rows = [
        [name.replace("_", " "), rate, f"{low:g} to {high:g}"]
        for (name, rate), (low, high) in zip(
            found["tokens_per_s"].items(), found["spread"].values(), strict=True
        )
    ]
    return table(["arm, batch", "tokens/s", "spread"], rows)


def gate() -> str:
    """Time without sharing divided by time with sharing, by length of the shared prompt."""
    found = load("kernels_h200.json")["gate"]
    prefixes = sorted({row["prefix"] for row in found})
    rows = []
    for heads, batch in dict.fromkeys((row["kv_heads"], row["batch"]) for row in found):
        mine = {r["prefix"]: r for r in found if (r["kv_heads"], r["batch"]) == (heads, batch)}
        cells = [
            f"{mine[p]['alone_us'] / mine[p]['shared_us']:.2f}"
            + ("" if mine[p]["gate_shares"] else " off")
            for p in prefixes
        ]
        rows.append([str(heads), str(batch), *cells])
    return table(["kv heads", "batch", *map(str, prefixes)], rows)


def kernel_table() -> str:
    """The whole grid, with one line for each batch that summarises all prompts and suffixes."""
    found = load("kernels_table_h200.json")["grid"]
    rows = []
    for heads, batch in dict.fromkeys((row["kv_heads"], row["batch"]) for row in found):
        mine = [row for row in found if (row["kv_heads"], row["batch"]) == (heads, batch)]
        speed = [row["speedup"] for row in mine]
        over = [row["over_floor"] for row in mine]
        cells = [f"{median(over):.2f}x", f"{min(speed):.2f}x", f"{max(speed):.1f}x"]
        rows.append([str(heads), str(batch), str(len(mine)), *cells])
    heads = ["kv heads", "batch", "cases", "median / floor", "minimum gain by sharing", "maximum"]
    return table(heads, rows)
