"""The tables of docs/performance.md and README.md."""

import re
import statistics

from benchmark.results import load
from benchmark.tables.markdown import Cell, Row, digits, spread, table

_SIDE_BY_SIDE = "baseline_side_by_side_h200"


def won() -> str:
    """The three main figures with their conditions."""
    replay = load("agents_side_by_side_h200.json")
    ours, theirs = replay["parrot"][0], replay["vllm"][0]
    side = load(f"{_SIDE_BY_SIDE}.json")
    roots = [side[key]["roots4_b64_ms_per_step"] for key in ("parrot_7b", "vllm_7b_cascade")]
    times = _distances()
    rows: list[list[Cell]] = [
        [
            f"p90 time to first token of {ours['agents']} replayed coding agents "
            "(Llama-3.1-8B, FP8 KV cache; prompts and KV cache scaled to a quarter)",
            f"**{ours['ttft_p90_s']:.2f} s**",
            f"{theirs['ttft_p90_s']:.2f} s, vLLM with KV offloading",
        ],
        [
            "one decode step of 64 requests that share four prompts of 5k tokens (Llama-2-7B)",
            f"**{roots[0]:.1f} ms**",
            f"{roots[1]:.1f} ms, vLLM with cascade attention",
        ],
        [
            "one step of a chain of summaries, client 240 ms away (Llama-2-13B)",
            f"**{times['chain', 'parrot']:.2f} s**",
            f"{times['chain', 'requests']:.2f} s, the same engine called step by step",
        ],
    ]
    return table(["workload on one H200, random weights", "Parrot", "compared with"], rows)


def agents() -> str:
    found = load("agents_side_by_side_h200.json")
    heads = ["agents"]
    for what in ("p90 TTFT", "turns/s", "cached share"):
        heads += [what, f"{what}, vLLM"]
    rows = []
    for ours, theirs in zip(found["parrot"], found["vllm"], strict=True):
        cells: list[Cell] = [ours["agents"]]
        for key, unit in (("ttft_p90_s", " s"), ("turns_per_s", ""), ("hit_of_ideal", "")):
            cells += [f"{side[key]:.2f}{unit}" for side in (ours, theirs)]
        rows.append(cells)
    return _with_source(heads, rows, "agents_side_by_side_h200")


def in_front() -> str:
    """Each case through Parrot and directly."""
    name = "in_front_of_vllm_h200"
    heads = ["case", "TTFT p50, ms", "E2E p50, ms", "E2E p90, ms", "calls/s"]
    keys = {"p50_ttft_ms": 1, "p50_e2el_ms": 0, "p90_e2el_ms": 0, "call_throughput": 1}
    rows: list[list[Cell]] = []
    for row in load(f"{name}.json")["cases"]:
        pairs = [[f"{value:,.{places}f}" for value in row[key]] for key, places in keys.items()]
        rows.append([row["case"], *(" / ".join(pair) for pair in pairs)])
    return _with_source(heads, rows, name)


def in_front_programs() -> str:
    """Completion times of applications with common clients and with minimal ones."""
    name = "in_front_programs_h200"
    clients = {
        "pfunc": "Python front end, through Parrot",
        "openai": "package `openai`, directly",
        "graph": "`parrot bench`, through Parrot",
        "plain": "`parrot bench`, directly",
    }
    cases: dict[str, dict[str, float]] = {}
    for row in load(f"{name}.json")["cases"]:
        cases.setdefault(row["case"], {})[row["client"]] = row["p50_e2el_ms"]
    rows: list[list[Cell]] = [
        [case, *(f"{times[client]:,.0f}" for client in clients)] for case, times in cases.items()
    ]
    return _with_source(["E2E p50, ms", *clients.values()], rows, name)


def shared_prompts() -> str:
    found = load(f"{_SIDE_BY_SIDE}.json")
    sides = (("Parrot", "parrot_7b"), ("vLLM with cascade attention", "vllm_7b_cascade"))
    rows: list[list[Cell]] = [
        [name, f"{found[key]['roots4_b64_ms_per_step']:.1f} ms"] for name, key in sides
    ]
    return _with_source(["engine", "one decode step"], rows, _SIDE_BY_SIDE)


def decode_steps() -> str:
    ours = {row["case"]: row for row in load("engine_gpu_llama-3.1-8b_http.json")["rows"]}
    found = load(f"{_SIDE_BY_SIDE}.json")
    rows: list[list[Cell]] = []
    for batch in (1, 8, 64):
        key = f"decode_b{batch}_ms"
        theirs = (found["vllm_8b"][key] + found["vllm_8b_again"][key]) / 2
        step = ours[f"HTTP decode B={batch} ctx 2k"]["ms"]
        rows.append([batch, f"{step:.2f} ms", f"{theirs:.2f} ms"])
    files = ("engine_gpu_llama-3.1-8b_http", _SIDE_BY_SIDE)
    return _with_source(["batch size", "Parrot", "vLLM"], rows, *files)


def throughput() -> str:
    found = load(f"{_SIDE_BY_SIDE}.json")
    models = (("Llama-3.1-8B", "8b"), ("Qwen3-0.6B", "06b"))
    rows: list[list[Cell]] = [
        [name, *(f"{found[f'{side}_{key}']['256_tok_s']:,.0f}" for side in ("parrot", "vllm"))]
        for name, key in models
    ]
    heads = ["model", "Parrot, output tokens/s", "vLLM"]
    return _with_source(heads, rows, _SIDE_BY_SIDE)


def quantised_weights() -> str:
    """Steps and prompts with weights in FP8, and those of vLLM."""
    columns = {"parrot_8b_fp8": "Parrot, FP8", "vllm_8b_fp8": "vLLM 0.25.1, FP8"}
    return _over_http("e4m3_weights_side_by_side_h200", columns, ["prompts_512", "prompts_1024"])


def head_dtypes() -> str:
    """Steps and prompts with heads in bfloat16 and in eight bits."""
    columns = {
        "parrot_8b_fp8": "FP8",
        "parrot_8b_fp8_head_int8": "FP8, head int8",
        "parrot_8b_int4": "four bits",
        "parrot_8b_int4_head_int8": "four bits, head int8",
    }
    return _over_http("heads_over_http_h200", columns, [])


def _over_http(name: str, columns: dict[str, str], prompts: list[str]) -> str:
    """`prompts`: cases besides those that all files have."""
    found = load(f"{name}.json")
    sides = [found[side] for side in columns]

    def row(case: str, key: str) -> list[Cell]:
        values = (side.get(key) for side in sides)
        # Prompts that are asked one after the other have a list of times.
        times = (statistics.median(v) if isinstance(v, list) else v for v in values)
        return [case, *("-" if ms is None else f"{digits(ms)} ms" for ms in times)]

    rows = [row(f"decode, batch size {b}", f"decode_b{b}_ms") for b in (1, 8, 64)]
    for key in (*prompts, "prefill_2048", "prefill_8192"):
        rows.append(row(f"prompt of {int(key.split('_')[1]):,} tokens", f"{key}_ms"))
    rates = (f"{side['256_tok_s']:,.0f} tokens/s" for side in sides)
    rows.append(["256 requests at once", *rates])
    return _with_source(["Llama-3.1-8B", *columns.values()], rows, name)


def formats() -> str:
    """Times of a layer's products by format, and how many times the floor they are."""
    return _by_rows("rows", "format")


def heads() -> str:
    """Times of heads by model and format, and how many times the floor they are."""
    return _by_rows("heads", "model", "format")


def _by_rows(section: str, *keys: str) -> str:
    name = "kernels_formats_h200"
    cells: dict[tuple[str, ...], list[Cell]] = {}
    found = load(f"{name}.json")[section]
    counts = list(dict.fromkeys(row["rows"] for row in found))
    for row in found:
        cell = f"{digits(row['us'])} ({row['us'] / row['floor_us']:.1f})"
        values = cells.setdefault(tuple(row[key] for key in keys), [f"{row['bits']:.3g}"])
        values.append(cell)
        assert row["rows"] == counts[len(values) - 2], row
    titles = [*keys, "bits", *(f"{n:,} {'row' if n == 1 else 'rows'}" for n in counts)]
    return _with_source(titles, [[*key, *values] for key, values in cells.items()], name)


def families() -> str:
    """Steps and prompts of three models of other families, and forks within windows."""
    theirs = load("baseline_vllm-0.25.1-gemma-3-12b.json")
    files = ("engine_gpu_families", "engine_gpu_gemma-3-27b")
    rows: list[list[Cell]] = []
    for row in (row for file in files for row in load(f"{file}.json")["rows"]):
        if "floor_ms" not in row:
            continue
        key = f"{row['case'].split(' ctx')[0].replace(' B=', '_b').replace(' ', '_')}_ms"
        other = f"{digits(theirs[key])} ms" if row["model"] == theirs["model"] else "-"
        rows.append(
            [
                row["model"],
                row["case"],
                f"{digits(row['ms'])} ms",
                f"{row['floor_ms']:.1f} ms",
                other,
            ]
        )
    heads = ["model", "case", "Parrot", "floor", "vLLM 0.25.1"]
    return _with_source(heads, rows, *files, "baseline_vllm-0.25.1-gemma-3-12b")


def applications() -> str:
    found = load(f"{_SIDE_BY_SIDE}.json")
    apps = {
        "one step of a chain of summaries": "chain_step_s",
        "map-reduce: 20 maps and a reduce": "map_reduce_s",
        "16 agents, 7 rounds": "agents16_s",
    }
    rows: list[list[Cell]] = [
        [name, *(f"{digits(found[side][key])} s" for side in ("parrot_13b", "vllm_13b"))]
        for name, key in apps.items()
    ]
    return _with_source(["application (Llama-2-13B)", "Parrot", "vLLM"], rows, _SIDE_BY_SIDE)


def distance() -> str:
    times = _distances()
    names = {"chain": "one step of a chain of summaries", "map_reduce": "20 maps and a reduce"}
    rows: list[list[Cell]] = [
        [name, *(f"{times[workload, style]:.2f} s" for style in ("parrot", "requests"))]
        for workload, name in names.items()
    ]
    heads = ["application (Llama-2-13B)", "call graph", "call by call, same engine"]
    return _with_source(heads, rows, "apps_h200_13b_wan")


def two_gpus() -> str:
    rows: list[list[Cell]] = []
    for name, key in (("Llama-3.1-8B", "8b"), ("Llama-3.1-70B", "70b")):
        cases = {row["case"]: row for row in load(f"tensor_parallel_{key}.json")["rows"]}
        steps = [f"{cases[f'decode B={batch} ctx 2k']['ahead_ms']:.3g} ms" for batch in (1, 64)]
        rows.append([name, *steps, f"{digits(cases['prefill 8192']['ms'])} ms"])
    heads = ["model", "decode step, batch 1", "batch 64", "prompt of 8,192 tokens"]
    return _with_source(heads, rows, "tensor_parallel_8b", "tensor_parallel_70b")


def edited_text() -> str:
    edits = sorted(load("drafts_h200.json")["rows"], key=lambda row: row["batch"])
    rows: list[list[Cell]] = [
        [row["batch"], f"{row['on_ms']:.3g} ms", f"{row['off_ms']:.3g} ms"] for row in edits
    ]
    heads = ["batch size", "with drafts", "without"]
    return _with_source(heads, rows, "drafts_h200", "drafts_new_h200")


def host_kv() -> str:
    longest = max(
        (row for row in load("host_kv_h200.json")["rows"] if row["case"] == "returns"),
        key=lambda row: row["tokens"],
    )
    places = {"GPU memory": "device", "CPU memory": "host", "no memory (recomputed)": "nowhere"}
    rows: list[list[Cell]] = [
        [name, f"{1e3 * longest[f'{place}_s']:.0f} ms"] for name, place in places.items()
    ]
    heads = [f"KV cache of {longest['tokens']:,} tokens is in", "time to first token"]
    return _with_source(heads, rows, "host_kv_h200")


def cpu_rates() -> str:
    rates = load("engine_cpu_four_bit.json")["tokens_per_s"]
    rows: list[list[Cell]] = [
        [batch, f"{rates[f'parrot_bfloat16_b{batch}']:.0f}"] for batch in (1, 8, 16)
    ]
    return _with_source(["batch size", "tokens/s"], rows, "engine_cpu_four_bit")


def overhead() -> str:
    calls = load("serve_calls.json")
    at, idle = calls["latency"], calls["idle_cpu_fraction"]["core"]
    door: list[Row] = load("front_door.json")["turns"]
    placement = load("scheduler_10000x512.json")
    rates = spread([round(rate, -1) for rate in calls["calls_per_s"]])
    alone = f"{at['through_p50_ms']:.1f} and {at['through_p99_ms']:.1f} ms"
    of = f"{placement['tasks']:,} queued calls and {placement['engines']} engines"
    rows: list[list[Cell]] = [
        ["calls/s on one core, 32 at once", rates],
        ["CPU time of one call", f"{calls['core_cpu_ms_per_call']:.2f} ms"],
        ["one call alone, p50 and p99", alone],
        ["the same call sent to the engine directly, p50", f"{at['direct_p50_ms']:.1f} ms"],
        ["CPU use while idle", f"{idle:.1%}"],
        [f"placement with {of}", f"{placement['later_rounds']['us_each'] / 1e3:.2f} ms"],
    ]
    for length in sorted({row["tokens"] for row in door}):
        added = [row["first_p50_ms"] for row in door if row["tokens"] == length]
        what = f"added to the first token by a chat API, {length:,} tokens of conversation"
        rows.append([what, f"{min(added):.1f} to {max(added):.1f} ms"])
    files = ("serve_calls", "front_door", "scheduler_10000x512")
    return _with_source(["ServeCore, engine without cost", "measured"], rows, *files)


def feature_cost() -> str:
    """CPU time of a call with all application features, divided by the time with none."""
    found = load("serve_features.json")["rows"]
    rows: list[list[Cell]] = []
    for engines in sorted({row["engines"] for row in found}):
        ratios = [row["ratio"] for row in found if row["engines"] == engines]
        rows.append([engines, f"{min(ratios):.2f} to {max(ratios):.2f}"])
    heads = ["engines", "CPU time of a call, all features on over all off"]
    return _with_source(heads, rows, "serve_features")


def _with_source(heads: list[str], rows: list[list[Cell]], *names: str) -> str:
    """The table, followed by the result files with the commits that they measured."""
    links = [f"[{name}](../benchmark/results/{name}.json) ({_commit(name)})" for name in names]
    return f"{table(heads, rows)}\nSource: {', '.join(links)}.\n"


def _commit(name: str) -> str:
    """The commit that the file measured."""
    found = load(f"{name}.json")
    if "git" in found:
        return str(found["git"])
    if "provenance" not in found:
        (commit,) = re.findall(r"project at (\w+)", found["about"])
        return str(commit)
    origin = found["provenance"]
    if "source" in origin:
        (commit,) = re.findall(r"at commit (\w+)", origin["source"])
        return str(commit)
    return str(origin.get("changed_in", origin["commit"]))[:8]


def _distances() -> dict[tuple[str, str], float]:
    """Seconds by (workload, style). For a chain they are the seconds of a step, one per chunk."""
    runs: list[Row] = load("apps_h200_13b_wan.json")["runs"]
    times = {}
    for run in runs:
        parameters, (mean,) = run["parameters"], run["figures"]["jct_s"].values()
        is_chain = run["workload"] == "chain"
        steps = -(-parameters["document_tokens"] // parameters["chunk"]) if is_chain else 1
        times[run["workload"], run["style"]] = mean["mean"] / steps
    return times
