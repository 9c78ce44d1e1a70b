"""Tables of whole applications and of ServeCore."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from benchmark.results import load, names
from benchmark.tables.markdown import Row, ratio, spread, table


def apps(name: str) -> str:
    """A run of benchmark.apps: times of the first setting, and ratios of the others to it."""
    report = load(name)
    heads = ["case", "setting", "runs", "mean JCT, s", "over the first", "p99 JCT over the first"]
    heads += ["tokens/s", "recomputed", "bystanders' TPOT p99 over the first"]
    lines = []
    for case in dict.fromkeys(run["case"] for run in report["runs"]):
        mine = [run for run in report["runs"] if run["case"] == case]
        for setting in dict.fromkeys(run["setting"] for run in mine):
            chosen = [run["figures"] for run in mine if run["setting"] == setting]
            lines += _apps_lines(case, setting, chosen, _ratios(report, case, setting))
    return table(heads, lines)


def _ratios(report: Row, case: str, setting: str) -> Row:
    found = (r for r in report["ratios"] if (r["case"], r["setting"]) == (case, setting))
    return next(found, {})


def _apps_lines(case: str, setting: str, figures: list[Row], over: Row) -> list[list[str]]:
    """One line for each kind of job. Figures of the whole run are in the first line."""
    kinds = list(dict.fromkeys(kind for f in figures for kind in f["jct_s"]))
    lines = []
    for kind in kinds:
        means = [f["jct_s"][kind]["mean"] for f in figures if kind in f["jct_s"]]
        lines.append(
            [
                case if len(kinds) == 1 else f"{case}, {kind}",
                setting,
                str(len(means)),
                f"{fmean(means):.3g}",
                ratio(over.get(f"jct_{kind}_mean")),
                ratio(over.get(f"jct_{kind}_p99")),
                *("", "", ""),
            ]
        )
    known = [f["tokens"]["recomputed"] for f in figures if f["tokens"]["recomputed"] is not None]
    lines[0][6:] = [
        f"{fmean(f['output_tokens_per_s'] for f in figures):.0f}",
        f"{fmean(max(0, count) for count in known):.0f}" if known else "",
        ratio(over.get("bystander_tpot_s")),
    ]
    return lines


def features() -> str:
    """The gain of each feature: mean JCT without the feature divided by mean JCT with it, and in
    brackets the same for the bystanders' TPOT p99. A dot if both are 1.00."""
    report = load("apps_sim_13b_features.json")
    cases = list(dict.fromkeys(row["case"] for row in report["ratios"]))
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in report["ratios"]):
        cells = []
        for case in cases:
            over = _ratios(report, case, setting)
            means = [
                f"{over[key][0]:.2f}"
                for key in over
                if key.startswith("jct_") and key.endswith("_mean")
            ]
            harm = f"{over['bystander_tpot_s'][0]:.2f}"
            is_plain = {*means, harm} == {"1.00"}
            cells.append("·" if is_plain else f"{' / '.join(means)} ({harm})")
        rows.append([f"`{setting.removeprefix('parrot:-')}`", *cells])
    return table(["without", *(f"`{case.partition(':')[0]}`" for case in cases)], rows)


POLICIES = ("critical_path", "las", "app_fifo", "fcfs")
MIXES = {
    "8": "apps_sim_13b_mix_8.json",
    "16": "apps_sim_13b_mix_16.json",
    "as many as fit in KV": "apps_sim_13b_mix_256.json",
    "8, outputs end at random": "apps_sim_13b_mix_8_learnt.json",
}
CHAINS = {
    "16": "apps_sim_13b_chains_16.json",
    "256": "apps_sim_13b_chains_256.json",
    "256, prompts unlimited": "apps_sim_13b_chains_256_unbounded.json",
}


def policies() -> str:
    """All jobs of the mix of applications, by policy."""
    return _policies(MIXES)


def policies_chains() -> str:
    """25 chains at once by policy."""
    return _policies(CHAINS)


def _policies(files: dict[str, str]) -> str:
    """Mean (p99) of job completion times, and for each seed the ratio to the first policy."""
    rows = []
    for slots, name in files.items():
        found: dict[str, list[Row]] = {}
        for run in load(name)["runs"]:
            policy = run["overrides"].get("policy", POLICIES[0])
            found.setdefault(policy, []).append(run["figures"]["jct_all_s"])
        rows.append([slots, *(_policy(found.get(p), found[POLICIES[0]]) for p in POLICIES)])
    return table(["calls at once per engine", *(f"`{policy}`" for policy in POLICIES)], rows)


def _policy(times: list[Row] | None, first: list[Row]) -> str:
    if times is None:
        return ""
    text = f"{fmean(t['mean'] for t in times):.2f} ({fmean(t['p99'] for t in times):.1f})"
    ratios = [other["mean"] / own["mean"] for other, own in zip(times, first, strict=True)]
    return text if times is first else f"{text}, {spread([round(r, 2) for r in ratios], 'x')}"


def gpts(name: str) -> str:
    """Requests per second at equal time per token, and the ratio to the prefix router."""
    rows = []
    for row in load(name)["rate_at_equal_ms_per_token"]:
        by_hand = [row[key] for key in row if key.startswith("fixed") and row[key]]
        over = row.get("over_prefix_aware")
        text = f"{over['mean']:.2f}x ({over['least']:.2f}-{over['most']:.2f})" if over else ""
        rates = [row["predicted"], row["prefix_aware"], text, max(by_hand, default=None)]
        rows.append([str(row["ms_per_token"]), *rates, row["round_robin"]])
    heads = ["ms/token", "predicted", "prefix_aware", "ratio", "by hand", "round_robin"]
    return table(heads, rows)


def fanout(name: str) -> str:
    """The time of 32 siblings, divided by the time of the best split."""
    found = load(name)
    rows = [
        [what, *(found[f"{p} read={reads}"]["over_best"] for p in PLACERS)]
        for what, reads in (("each call is read", "each"), ("one call joins them", "join"))
    ]
    return table(["", *PLACERS], rows)


PLACERS = ("predicted", "prefix_aware", "round_robin")


def mixed(name: str) -> str:
    """Chats next to repeated map-reduces: each placement, and the gain of prediction over it."""
    found, rows = load(name), []
    for key, row in found.items():
        if not isinstance(row, dict) or "chat_tpot_ms" not in row:
            continue
        tpot, ttft, jct = (row[k] for k in ("chat_tpot_ms", "chat_ttft_ms", "map_reduce_jct_ms"))
        gains = found.get(f"over_{key}", {}).values()
        rows.append(
            [
                key.replace("fixed,", "by hand, maps next to the chats:"),
                f"{fmean(tpot['p99']):.1f} ({fmean(tpot['mean']):.1f})",
                f"{fmean(ttft['p99']) / 1e3:.2f}",
                f"{fmean(jct['mean']) / 1e3:.2f}",
                *(f"{g['mean']:.2f}x ({g['least']:.2f}-{g['most']:.2f})" for g in gains),
                *([""] * (3 - len(gains))),
            ]
        )
    heads = ["placement", "chat TPOT p99 (mean), ms", "chat TTFT p99, s", "map-reduce JCT, s"]
    gained = ["gain: chat p99 TPOT", "chat mean TPOT", "map-reduce JCT"]
    return table([*heads, *gained], rows)


RULES = ("lru", "next_use")
TOOLS = {"five": "five tools", "two": "two tools", "one": "unpredictable"}


def tool_pause() -> str:
    """Chats with pauses: recomputed tokens by rule, separately for each seed."""
    heads = ["pauses", "LRU", "next use", "of LRU's", "of Belady's"]
    rows = [
        [TOOLS[tools], *cells, ", ".join(f"{run['next_use']['vs_belady']:.2f}" for run in runs)]
        for tools, cells, runs in _evictions("kv_tool_pause.json", "tools")
    ]
    return table(heads, rows)


def dag() -> str:
    """Documents that are read twice: recomputed tokens and job completion times."""
    heads = ["documents over memory", "LRU", "next use", "of LRU's", "JCT with LRU, s"]
    rows = [
        [
            f"{factor:g}x",
            *cells,
            *(", ".join(f"{run[rule]['jct_s']:.1f}" for run in runs) for rule in RULES),
        ]
        for factor, cells, runs in _evictions("kv_dag.json", "oversubscription")
    ]
    return table([*heads, "JCT with next use, s"], rows)


def _evictions(name: str, key: str) -> Iterator[tuple[Any, list[str], list[Row]]]:
    """The runs for each value of a setup's `key`, with the recomputed tokens of each rule."""
    runs = load(name)["runs"]
    for value in dict.fromkeys(run["setup"][key] for run in runs):
        mine = [run for run in runs if run["setup"][key] == value]
        cells = [_thousands([run[rule]["recomputed_tokens"] for run in mine]) for rule in RULES]
        yield value, [*cells, ", ".join(f"{run['next_use_over_lru']:.2f}" for run in mine)], mine


def _thousands(counts: list[int]) -> str:
    return ", ".join(f"{count / 1e3:,.{0 if count > 1e3 else 1}f}k" for count in counts)


def eager() -> str:
    """Questions that arrive late, by concurrent traffic: times in milliseconds."""
    rows = load("serve_eager.json")["rows"]
    cases: dict[tuple[int, float, float], list[Row]] = {}
    for row in rows:
        case = row["num_bystanders"], row["delay_s"], row["withdrawn"]
        cases.setdefault(case, []).append(row)
    lines = []
    for (streams, delay_s, withdrawn), found in cases.items():
        off = next(row for row in found if not row["eager_fill"])
        on = {row["background_share"]: row for row in found if row["eager_fill"]}
        most = on[max(on)]
        lines.append(
            [
                str(streams),
                f"{delay_s:g} s",
                f"{withdrawn:.0%}",
                *(_ms(row, "ttft_s_mean") for row in (off, on.get(0.02), most)),
                _ms(most, "later_ttft_s_mean"),
                *(_ms(row, "bystander_tpot_s_p99", 2) for row in (off, most)),
                *(_ms(row, "bystander_ttft_s_p99") for row in (off, most)),
                *(f"{most['eager_tokens'][key] / 1e3:.0f}k" for key in ("filled", "wasted")),
            ]
        )
    heads = ["streams", "question after", "withdrawn", "TTFT off", "2 %", "on", "second half"]
    heads += ["their TPOT p99 off", "on", "their TTFT p99 off", "on", "tokens filled", "wasted"]
    return table(heads, lines)


def _ms(row: Row | None, key: str, places: int = 0) -> str:
    return "" if row is None or key not in row else f"{row[key] * 1e3:.{places}f}"


def reuse() -> str:
    """Cancelled losers and reused results."""
    found = load("reuse.json")
    jobs, waste = found["best_of_n"]["job_seconds"], found["best_of_n"]["wasted_steps_per_loser"]
    rows = [
        ["a job that reads all 16 candidates", f"{jobs['all']['mean']:.2f} s"],
        ["the first 4, the others continue", f"{jobs['keep']['mean']:.2f} s"],
        ["the first 4, the others are stopped", f"{jobs['first']['mean']:.2f} s"],
    ]
    for engines, steps in waste.items():
        text = f"{steps['mean']:.2f} (at most {steps['max']:g})"
        rows.append([f"steps wasted for each loser, engines: {engines}", text])
    for what, off, on in zip(
        ("at first", "again", "repeated with one part changed"),
        found["rerun"]["off"],
        found["rerun"]["on"],
        strict=True,
    ):
        counts = f"{on['calls_run']} (without reuse {off['calls_run']})"
        rows.append([f"calls run of a map-reduce of {on['calls']} calls, {what}", counts])
    look = found["lookup"]
    over = f"{look['ratio']:.2f} times ({look['on_us']:.0f} and {look['off_us']:.0f} us)"
    return table(["what", "measured"], [*rows, ["CPU time of a call without a hit", over]])


def fit() -> str:
    """Residuals of the simulated engines' costs: the two largest of the fitted points, and the
    load `256`, which was not fitted."""
    report, rows = load("sim_fit.json"), []
    loads = {row["model"]: row["error"] for row in report["load_256"]}
    for model in dict.fromkeys(row["model"] for row in report["points"]):
        points = [row for row in report["points"] if row["model"] == model]
        worst = sorted(points, key=lambda row: -abs(row["error"]))[:2]
        texts = ", ".join(f"{row['error']:+.1%} ({row['case']})" for row in worst)
        beyond = f"{loads[model]:+.1%}" if model in loads else ""
        rows.append([model, str(len(points)), texts, beyond])
    return table(["model", "fitted points", "largest residuals", "`256`, not fitted"], rows)


def nemesis_nights() -> str:
    """Parts of the nightly run. `programs` and `kills` are counts over all rounds. `violations`
    lists the seeds of rounds with a violation."""
    heads = [
        "part",
        "first seed",
        "minutes",
        "rounds",
        "programs",
        "kills",
        "seeds with violations",
    ]
    lines = []
    for name in names():
        if not name.startswith("nemesis_night_"):
            continue
        report = load(name)
        words = report["provenance"]["command"].split()
        seed, minutes = (words[words.index(one) + 1] for one in ("--seed", "--minutes"))
        rounds, programs = (
            sum(row[key] for row in report["rows"]) for key in ("rounds", "programs")
        )
        wrong = sorted({str(one["seed"]) for one in report.get("violations", ())})
        part = name.removeprefix("nemesis_night_").removesuffix(".json")
        link = f"[{part}](../benchmark/results/{name})"
        found = ", ".join(wrong) or "none"
        lines.append(
            [link, seed, minutes, f"{rounds}", f"{programs:,}", f"{report['kills']}", found]
        )
    return table(heads, lines)
