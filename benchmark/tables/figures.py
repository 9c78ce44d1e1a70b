"""The figures of docs/performance.md, and the three of README.md."""

import re

from benchmark.results import load
from benchmark.tables.markdown import Row, digits, spread, table

_HTTP = "wall clock of the client over HTTP"
_CPU = "CPU time"


def figures() -> str:
    """What was measured in a sentence each: how, of which commit, and the files that show it."""
    rows = [_service(), _features(), _front_door(), _placement(), _cpu(), *_side_by_side()]
    rows += [_distance(), _two_gpus(), _drafts(), _host_kv(), _agents(), _agents_side_by_side()]
    return table(["what", "measured", "clock, and how long or how often", "commit", "file"], rows)


def won() -> str:
    """What Parrot is for, in three figures, each with the hardware and what it is compared with."""
    replay = load("agents_side_by_side_h200.json")
    ours, theirs = replay["parrot"][0], replay["vllm"][0]
    side = load("baseline_side_by_side_h200.json")
    roots = [side[key]["roots4_b64_ms_per_step"] for key in ("parrot_7b", "vllm_7b_cascade")]
    times = _distances()
    chain = times["chain", "requests"] / times["chain", "parrot"]
    return (
        f"- **Agents wait less.** Of {ours['agents']} recorded coding agents on one H200, nine "
        f"turns in ten have their first token within {ours['ttft_p90_s']:.2f} s, where vLLM with "
        f"offloading takes {theirs['ttft_p90_s']:.2f}: KV stays where the next turn will look.\n"
        "- **Shared beginnings are read once.** 64 requests under four shared prompts of 5k tokens "
        f"take {roots[0]:.1f} ms a step at Llama-2-7B's shape on one H200, where vLLM's cascade "
        f"attention takes {roots[1]:.1f}.\n"
        "- **A chain does not travel.** A step of a chain of summaries, asked for from 240 ms "
        f"away, ends {chain:.1f} times sooner than the same engine on an H200 asked call by call.\n"
    )


def _row(what: str, measured: str, how: str, *names: str) -> list[str]:
    """A figure with `how` it was clocked, and the result files that show it."""
    commits = dict.fromkeys(_commit(name) for name in names)
    files = ", ".join(f"[{name}](../benchmark/results/{name}.json)" for name in names)
    return [what, measured, how, ", ".join(commits), files]


def _commit(name: str) -> str:
    origin = load(f"{name}.json")["provenance"]
    if "source" in origin:
        found = re.search(r"at commit (\w+)", origin["source"])
        assert found, name
        return found[1]
    return str(origin.get("changed_in", origin["commit"]))[:8]


def _service() -> list[str]:
    calls = load("serve_calls.json")
    at, idle = calls["latency"], calls["idle_cpu_fraction"]["core"]
    measured = (
        f"{spread([round(rate, -1) for rate in calls['calls_per_s']])} a second, "
        f"{calls['core_cpu_ms_per_call']:.2f} ms of CPU each; one call alone "
        f"{at['through_p50_ms']:.1f} ms at the median and {at['through_p99_ms']:.1f} at p99, "
        f"{at['direct_p50_ms']:.1f} straight to the engine; idle {idle:.1%} of a core"
    )
    what = "ServeCore on one core, `sim` engine of no cost: calls from submit to value"
    how = f"{_HTTP}; {len(calls['calls_per_s'])} runs, {calls['concurrency']} calls at once"
    return _row(what, measured, how, "serve_calls")


def _features() -> list[str]:
    rows = load("serve_features.json")["rows"]
    parts = []
    for engines in sorted({row["engines"] for row in rows}):
        ratios = [row["ratio"] for row in rows if row["engines"] == engines]
        parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} on {engines}")
    error = max(row["ratio_error"] for row in rows)
    what = "the same, application features on over all off: CPU per call, by number of engines"
    measured = f"{', '.join(parts)} (standard errors up to {error:.2f})"
    return _row(what, measured, f"{_CPU}; 24 runs in turns", "serve_features")


def _front_door() -> list[str]:
    """The least and the most of all endpoints."""
    rows: list[Row] = load("front_door.json")["turns"]
    lengths = sorted({row["tokens"] for row in rows})
    added = [[row["first_p50_ms"] for row in rows if row["tokens"] == length] for length in lengths]
    what = "what OpenAI's and Anthropic's endpoints add to asking the engine, until the first text"
    spans = [f"{min(times):.1f} to {max(times):.1f}" for times in added]
    of = _list([f"{length:,}" for length in lengths])
    measured = f"{_list(spans)} ms, for conversations of {of} tokens"
    how = f"{_HTTP}; median of {load('front_door.json')['turns_each']} turns each"
    return _row(what, measured, how, "front_door")


def _placement() -> list[str]:
    found = load("scheduler_10000x512.json")
    later, first = (found[phase]["us_each"] / 1e3 for phase in ("later_rounds", "first_round"))
    what = f"a placement with {found['tasks']:,} queued tasks and {found['engines']} engines"
    measured = f"{later:.2f} ms of CPU; {first:.2f} ms in the first round, on idle engines"
    return _row(what, measured, f"{_CPU}; all {found['tasks']:,} tasks", "scheduler_10000x512")


def _cpu() -> list[str]:
    found, older = load("engine_cpu_four_bit.json"), load("engine_cpu.json")
    rates = [f"{found['tokens_per_s'][f'parrot_bfloat16_b{batch}']:.0f}" for batch in (1, 8, 16)]
    over = older["ratios"]["bfloat16: parrot / transformers, batch 1"]
    measured = (
        f"{rates[0]}, {rates[1]} and {rates[2]} tokens/s; {over:.1f} times transformers' "
        "`generate` on the same weights, measured earlier"
    )
    what = "embedded model, 2 CPU cores, bfloat16: batch 1, 8, 16"
    how = "wall clock in the engine; median of 3 rounds of 24 tokens"
    return _row(what, measured, how, "engine_cpu_four_bit", "engine_cpu")


def _side_by_side() -> list[list[str]]:
    """Decode steps as they are now; what vLLM was measured beside on one card on one afternoon."""
    found = load("baseline_side_by_side_h200.json")
    large, small, agents = found["parrot_8b"], found["parrot_06b"], found["parrot_13b"]
    assert agents["temperature"] == large["temperature"] == small["temperature"] == 0.0
    rates = _list([f"{side['256_tok_s']:,.0f}" for side in (large, small)])
    vllm_rates = _list([f"{found[s]['256_tok_s']:,.0f}" for s in ("vllm_8b", "vllm_06b")])
    roots = found["parrot_7b"]["roots4_b64_ms_per_step"]
    vllm_roots = found["vllm_7b_cascade"]["roots4_b64_ms_per_step"]
    apps = ("chain_step_s", "map_reduce_s", "agents16_s")
    shown = {
        side: _list([digits(found[side][key]) for key in apps])
        for side in ("parrot_13b", "vllm_13b")
    }
    how, file = f"{_HTTP}, greedy; vLLM offline", "baseline_side_by_side_h200"
    return [
        _decode(),
        _row(
            "256 requests of U(100, 1024) tokens in and out: Llama-3.1-8B and Qwen3-0.6B",
            f"{rates} output tokens/s (vLLM: {vllm_rates})",
            how,
            file,
        ),
        _row(
            "Llama-2-7B shape, 64 requests under four shared prompts of 5k tokens: decode step",
            f"{roots:.1f} ms (vLLM with cascade attention: {vllm_roots:.1f})",
            how,
            file,
        ),
        _row(
            "Llama-2-13B shape: a step of a chain of summaries; 20 maps and a reduce; 16 agents, "
            "7 rounds",
            f"{shown['parrot_13b']} s (vLLM: {shown['vllm_13b']})",
            how,
            file,
        ),
    ]


def _decode() -> list[str]:
    ours = {row["case"]: row for row in load("engine_gpu_llama-3.1-8b_http.json")["rows"]}
    found = load("baseline_side_by_side_h200.json")
    batches = (1, 8, 64)
    steps = [f"{ours[f'HTTP decode B={batch} ctx 2k']['ms']:.2f}" for batch in batches]
    theirs = [
        f"{(found['vllm_8b'][key] + found['vllm_8b_again'][key]) / 2:.2f}"
        for key in (f"decode_b{batch}_ms" for batch in batches)
    ]
    return _row(
        "Llama-3.1-8B shape: decode step at context 2k, batch 1, 8 and 64",
        f"{_list(steps)} ms (vLLM: {_list(theirs)}, on another day)",
        "between tokens as the client gets them, median",
        "engine_gpu_llama-3.1-8b_http",
        "baseline_side_by_side_h200",
    )


def _two_gpus() -> list[str]:
    shown = {}
    for model in ("8b", "70b"):
        rows = {row["case"]: row for row in load(f"tensor_parallel_{model}.json")["rows"]}
        steps = [f"{rows[f'decode B={batch} ctx 2k']['ahead_ms']:.3g}" for batch in (1, 64)]
        shown[model] = f"{_list(steps)} ms, and {digits(rows['prefill 8192']['ms'])} ms"
    what = "on two H200s: decode step at context 2k, batch 1 and 64, and a prompt of 8,192 tokens"
    measured = f"Llama-3.1-8B shape: {shown['8b']}; Llama-3.1-70B shape, bfloat16: {shown['70b']}"
    how = "wall clock in the engine; decode steps launched ahead of each other, as it serves"
    return _row(what, measured, how, "tensor_parallel_8b", "tensor_parallel_70b")


def _distances() -> dict[tuple[str, str], float]:
    """Seconds by (workload, style). Those of a chain are a step's, of which each chunk has one."""
    runs: list[Row] = load("apps_h200_13b_wan.json")["runs"]
    times = {}
    for run in runs:
        parameters, (mean,) = run["parameters"], run["figures"]["jct_s"].values()
        is_chain = run["workload"] == "chain"
        steps = -(-parameters["document_tokens"] // parameters["chunk"]) if is_chain else 1
        times[run["workload"], run["style"]] = mean["mean"] / steps
    return times


def _distance() -> list[str]:
    times = _distances()
    shown = [
        " and ".join(f"{times[workload, style]:.2f}" for workload in ("chain", "map_reduce"))
        for style in ("parrot", "requests")
    ]
    what = "the first two through ServeCore, from a distance (round trips of 240 ms)"
    measured = f"{shown[0]} s; the same engine asked call by call: {shown[1]}"
    return _row(what, measured, f"{_HTTP}; one run each", "apps_h200_13b_wan")


def _drafts() -> list[str]:
    edits = sorted(load("drafts_h200.json")["rows"], key=lambda row: row["batch"])
    new = load("drafts_new_h200.json")["rows"]
    batches = _list([str(row["batch"]) for row in edits])
    drafted = _list([f"{row['on_ms']:.3g}" for row in edits])
    plain = _list([f"{row['off_ms']:.3g}" for row in edits])
    worst, best = (choose(row["speedup"] for row in new) for choose in (min, max))
    what = f"Llama-3.1-8B shape, writing a file again after an edit, batch {batches}: a token"
    measured = (
        f"{drafted} ms (without drafts: {plain}); new text {worst:.3f} to {best:.3f} times as fast"
    )
    how = "wall clock in the engine; outputs of 256 tokens, 2 and 3 runs in turns"
    return _row(what, measured, how, "drafts_h200", "drafts_new_h200")


def _host_kv() -> list[str]:
    longest = max(
        (row for row in load("host_kv_h200.json")["rows"] if row["case"] == "returns"),
        key=lambda row: row["tokens"],
    )
    places = (("on the host", "host"), ("on the device", "device"), ("computed", "nowhere"))
    times = [f"{name} {1e3 * longest[f'{place}_s']:.0f}" for name, place in places]
    what = f"Llama-3.1-8B shape, KV of {longest['tokens']:,} tokens: first token if it is"
    return _row(what, f"{_list(times)} ms", "wall clock in the engine", "host_kv_h200")


def _agents() -> list[str]:
    """Of each number of agents, the newest row."""
    found, newest = load("agents_h200.json"), load("agents_h200_48.json")
    rows = {row["agents"]: row for row in [*found["runs"], *newest["runs"]]}
    ours = dict(sorted(rows.items()))
    theirs = {row["agents"]: row for row in found["baseline"]["vllm_with_offload"]}
    waits = [f"{row['ttft_p90_s']:.2f}" for row in ours.values()]
    hits = [f"{row['hit_of_ideal']:.2f}" for row in ours.values()]
    what = (
        f"recorded coding agents, {_list([str(number) for number in ours])} at once, a quarter of "
        "an H200's KV and 25 GiB of host memory (from 32 on with KV in e4m3)"
    )
    other = [f"{row['ttft_p90_s']:.2f} s with {number}" for number, row in theirs.items()]
    measured = (
        f"cached {_list(hits)} of what the turn before had; first token within {_list(waits)} s in "
        f"90% of turns (vLLM with offloading: {_list(other)})"
    )
    how = f"{_HTTP}; windows of 50 to 100 s after 30 to 60 s of warm-up"
    return _row(what, measured, how, "agents_h200", "agents_h200_48")


def _agents_side_by_side() -> list[str]:
    found = load("agents_side_by_side_h200.json")
    shown = {}
    for side in ("parrot", "vllm"):
        rows = found[side]
        shown[side] = (
            _list([f"{row['ttft_p90_s']:.2f}" for row in rows]),
            _list([f"{row['turns_per_s']:.2f}" for row in rows]),
        )
    agents = _list([str(row["agents"]) for row in found["parrot"]])
    what = f"the same with {agents} agents, both sides with KV in 8 bits and offloading to the host"
    measured = (
        f"first token within {shown['parrot'][0]} s in 90% of turns, {shown['parrot'][1]} turns a "
        f"second (vLLM: {shown['vllm'][0]} s, {shown['vllm'][1]})"
    )
    how = f"{_HTTP}; {found['window_s']} s, of which the first {found['warm_up_s']} do not count"
    return _row(what, measured, how, "agents_side_by_side_h200")


def _list(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
