"""Frozen data for the page: the feeds of a service with several runs, at one moment."""

import math
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
Rows = dict[str, Row]

BEGAN = 1_795_888_931.0  # Unix time at which the run `newsletter` began: 2026-11-28 18:02:11 UTC.
NOW = BEGAN + 20.2
RUN = 1_795_454_688_228

STORY = (
    "The parrot of the harbour has learned to whistle the ferry's horn. Sailors wait for it, "
    "passengers run for it, and the ferry company has asked its owner to keep the cage indoors "
    "until eight."
)
SYSTEM = "You are the editor of a small newsletter. Answer in plain English."
NOTES = "Keep it light; mention the ferry company by name, and no jokes about the crew."
WHY = (
    "The story is short, has one clear surprise, and readers can picture it at once. Northline "
    "Ferries takes it with humour, which keeps the tone light as the notes ask"
)
FACTS = [
    "Harbour parrot whistles like the ferry and confuses passengers.",
    "The owner says that it took a week to learn.",
    "Northline Ferries asks for quiet mornings.",
    "An interview with the lighthouse keeper, who saw it first.",
    "Readers' letters: three are about parrots.",
    "Weather for the weekend: light winds from the west.",
    "Corrections to the issue of 16 November.",
]
VALUE_ERROR = "ValueError: invalid literal for int() with base 10: 'The parrot of the harbour…'"


SERVICE: Row = {
    "queued": 0,
    "models": [],
    "closing": False,
    "max_runs": 50,
    "max_age_s": 86_400.0,
}


def run_row(run_id: int, app: str, **fields: Any) -> Row:
    """A row of the list of runs."""
    return {
        "id": run_id,
        "tenant": "public",
        "apps": [app],
        "app": app,
        "kind": "program",
        "created_at": BEGAN,
        "state": "active",
        "turns": 1,
        "calls": 1,
        "done": 1,
        "failed": 0,
        "cancelled": 0,
        "running": 0,
        "models": ["qwen3-8b"],
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "output_tokens": 0,
        "prefix_breaks": 0,
        "functions": [],
        "cost": None,
        "shape": [],
    } | fields


def engine_row(name: str, model: str, running: int, slots: int, **fields: Any) -> Row:
    return {
        "engine_id": int(name[-1]),
        "engine_name": name,
        "engine_type": "builtin",
        "model": model,
        "host": "127.0.0.1",
        "port": 9001,
        "num_running": running,
        "tasks_capacity": slots,
        "hit_tokens": 714_200,
        "recomputed_tokens": 0,
        "default_sampling": None,
        "is_draining": False,
    } | fields


_ENDED = {"state": "finished"}
_RUNS = [
    run_row(
        RUN,
        "newsletter",
        calls=14,
        done=11,
        failed=2,
        running=1,
        prompt_tokens=4812,
        cached_tokens=2214,
        output_tokens=1204,
        cost=0.0041,
        words="Why? Answer in two sentences.",
        functions=["summarize", "combine", "review"],
        shape=[
            [0, 1, 26, "done"],
            [1, 1, 20, "done"],
            [2, 1, 16, "done"],
            [0, 27, 50, "done"],
            [0, 50, 63, "done"],
            [1, 50, 59, "done"],
            [2, 50, 51, "failed"],
            [0, 86, 100, "running"],
        ],
    ),
    run_row(
        2,
        "support-agent",
        kind="agent",
        tenant="shop",
        created_at=BEGAN - 21,
        calls=8,
        done=7,
        prompt_tokens=9120,
        cached_tokens=8026,
        output_tokens=402,
        cost=0.0052,
        words='lookup_order(order_id="A-1093")',
        shape=[[0, 0, 22, "done"], [0, 36, 60, "done"], [0, 72, 86, "done"]],
    ),
    run_row(
        3,
        "nightly-eval",
        tenant="evals",
        created_at=BEGAN - 164,
        calls=400,
        done=212,
        running=4,
        prompt_tokens=318_400,
        cached_tokens=289_744,
        output_tokens=8410,
        cost=0.118,
        words="From 1 to 5, how well does the answer follow from the text?",
        shape=[[lane, lane, 100, "running"] for lane in range(4)],
    ),
    *(
        run_row(
            100 + number,
            "claude-code",
            kind="API",
            tenant="ci-bot",
            created_at=BEGAN - 20 * number,
            done=int(number > 0),
            running=int(number == 0),
            prompt_tokens=25_500,
            cached_tokens=23_970,
            output_tokens=782,
            cost=0.0094,
            functions=["messages"],
            busy_s=4.2 * (number > 0),
            words=(
                "Refactor the retry loop in fleet.py so that a lost engine does not hold its calls",
                "Read parrot/serve/execution/fleet.py and say where a lost engine is handled",
                "Run the tests of the fleet",
            )[number % 3],
            shape=[[0, 0, 100, "done" if number else "running"]],
        )
        for number in range(28)
    ),
    run_row(
        4,
        "map-reduce-reports",
        **_ENDED,
        created_at=BEGAN - 1088,
        ended_at=BEGAN - 1067.9,
        calls=21,
        done=21,
        prompt_tokens=6610,
        cached_tokens=4164,
        output_tokens=2315,
        cost=0.0077,
        words="Merge the 20 facts into one table, newest first.",
        shape=[
            [0, 0, 52, "done"],
            [1, 0, 61, "done"],
            [2, 0, 47, "done"],
            [3, 0, 56, "done"],
            [0, 62, 100, "done"],
        ],
    ),
    run_row(
        5,
        "contract-review",
        state="failed",
        tenant="legal",
        created_at=BEGAN - 1831,
        ended_at=BEGAN - 1822.1,
        calls=6,
        done=3,
        failed=1,
        prompt_tokens=12_800,
        cached_tokens=2816,
        output_tokens=310,
        cost=0.0049,
        words="Extract the dates of this contract.",
        error="the prompt has 9,003 tokens; the model's maximum is 8,192",
        shape=[[0, 0, 40, "done"], [1, 0, 28, "done"], [0, 42, 92, "done"], [0, 94, 100, "failed"]],
    ),
    run_row(
        6,
        "parrot chat",
        kind="API",
        state="cancelled",
        created_at=BEGAN - 2531,
        ended_at=BEGAN - 2524.8,
        done=0,
        cancelled=1,
        prompt_tokens=31,
        cached_tokens=24,
        output_tokens=212,
        functions=["chat"],
        busy_s=7.2,
        words="Name three birds.",
        shape=[[0, 0, 100, "cancelled"]],
    ),
    run_row(
        7,
        "best-of-n",
        **_ENDED,
        created_at=BEGAN - 2966,
        ended_at=BEGAN - 2958.6,
        calls=9,
        done=9,
        prompt_tokens=1904,
        cached_tokens=1352,
        output_tokens=766,
        cost=0.0022,
        words="Which of the four poems is the best? Answer with its number.",
        shape=[[lane, 0, 50 + 7 * lane, "done"] for lane in range(3)] + [[0, 65, 100, "done"]],
    ),
    run_row(
        8,
        "nightly-eval",
        **_ENDED,
        tenant="evals",
        created_at=BEGAN - 86_531,
        ended_at=BEGAN - 86_179,
        calls=400,
        done=400,
        prompt_tokens=601_200,
        cached_tokens=553_104,
        output_tokens=15_880,
        cost=0.221,
        words="From 1 to 5, how well does the answer follow from the text?",
        shape=[[lane, lane, 100 - lane, "done"] for lane in range(4)],
    ),
]


def overview() -> Rows:
    kv = {"blocks": 18_400}
    engines = [
        engine_row("engine-0", "qwen3-8b", 7, 16, **kv, free_blocks=7176, step_ms=24.0),
        engine_row("engine-1", "qwen3-8b", 4, 16, **kv, free_blocks=11_408, step_ms=22.0),
        engine_row(
            "engine-2",
            "embedded",
            1,
            8,
            blocks=2000,
            free_blocks=1820,
            step_ms=81.0,
            is_draining=True,
            warning="steps run without compiled kernels, more slowly: no C++ compiler",
            warned_at=BEGAN - 2700,
        ),
    ]
    engines[0] |= {"host_blocks": 40_000, "host_free_blocks": 26_400}
    return (
        {"service": SERVICE | {"queued": 2, "models": ["qwen3-8b", "embedded"]}}
        | {f"engine:{row['engine_id']}": row for row in engines}
        | {f"session:{row['id']}": row for row in _RUNS}
    )


def call_row(output: str, func: str, inputs: list[str], **fields: Any) -> Row:
    return {
        "kind": "semantic",
        "request_id": 13,
        "func_name": func,
        "remark": None,
        "output": output,
        "output_var_id": output,
        "outputs": [output],
        "state": "done",
        "criteria": "latency",
        "depth": 0,
        "task_group": None,
        "engine": "engine-0",
        "model": "qwen3-8b",
        "attempts": 1,
        "cached_tokens": 0,
        "computed_tokens": 0,
        "recomputed_tokens": 0,
        "output_tokens": 0,
        "decode_s": None,
        "finish_reason": "stop",
        "reused": False,
        "submitted_s": 0.1,
        "activated_s": 0.2,
        "ready_s": 0.2,
        "started_s": 0.2,
        "finished_s": None,
        "inputs": inputs,
    } | fields


def reused_run(run_id: int, origin: int) -> Rows:
    """A run whose calls reused the results of identical calls of the run `origin`."""
    calls = {
        f"s{number}": call_row(
            f"s{number}",
            "ask",
            [],
            reused=True,
            reused_from=origin,
            engine=None,
            cached_tokens=729,
            ready_s=0.02,
            started_s=0.02,
            finished_s=0.06,
        )
        for number in range(2)
    }
    tokens = {"prompt_tokens": 1458, "cached_tokens": 1458, "reused": 2}
    head = run_row(run_id, "again", state="finished", ended_at=BEGAN + 0.07, calls=2, done=2)
    variables = {f"var:{name}": _variable(name, name, "an answer") for name in calls}
    return {
        "session": head | tokens,
        **{f"call:{name}": row for name, row in calls.items()},
        **variables,
    }


def _times(ready: float, started: float, finished: float, decode: float) -> Row:
    return {"ready_s": ready, "started_s": started, "finished_s": finished, "decode_s": decode}


def _calls() -> list[Row]:
    ends = [4.6, 3.8, 2.9, 5.4, 4.1, 3.6, 3.1]
    summaries = [f"summary_{number}" for number in range(7)]
    reads = [
        call_row(
            summaries[number],
            "summarize",
            [f"page_{number}"],
            request_id=number + 1,
            engine=f"engine-{int(number > 3)}",
            cached_tokens=30,
            computed_tokens=40,
            output_tokens=22,
            **_times(0.2, 0.2, end, end - 0.7),
        )
        for number, end in enumerate(ends)
    ]
    none = dict.fromkeys(("ready_s", "started_s", "finished_s", "engine", "model"))
    return [
        *reads,
        call_row(
            "text",
            "combine",
            summaries,
            request_id=8,
            computed_tokens=170,
            output_tokens=308,
            **_times(5.4, 5.5, 10.1, 3.9),
        ),
        call_row(
            "headline",
            "headline",
            ["text"],
            request_id=9,
            engine="engine-1",
            cached_tokens=172,
            computed_tokens=24,
            output_tokens=12,
            **_times(10.1, 10.2, 11.9, 1.4),
        ),
        call_row(
            "verdict",
            "review",
            ["text"],
            request_id=10,
            cached_tokens=82,
            computed_tokens=136,
            output_tokens=3,
            **_times(10.1, 10.2, 12.8, 0.4),
        ),
        call_row(
            "seeds",
            "parse_seeds",
            ["text"],
            request_id=11,
            kind="native",
            state="failed",
            engine=None,
            model=None,
            **_times(10.1, 10.15, 10.24, 0.0),
        ),
        call_row(
            "why",
            "why",
            ["text", "verdict", "notes"],
            state="running",
            cached_tokens=218,
            computed_tokens=33,
            output_tokens=80,
            ready_s=17.4,
            started_s=17.4,
            first_token_s=17.8,
            finish_reason=None,
            attempts=2,
        ),
        call_row(
            "total",
            "total",
            ["seeds"],
            request_id=14,
            state="failed",
            **none | {"finished_s": 10.24},
        ),
        call_row("issue", "publish", ["headline", "why"], request_id=15, state="waiting", **none),
    ]


def _variable(name: str, producer: str | None, text: str, state: str = "ready", **more: Any) -> Row:
    row = {"name": name, "state": state, "chars": len(text), "producer": producer}
    return row | ({"head": text[:60]} if text else {}) | more


def values() -> dict[str, str]:
    """The text of each variable of the run."""
    return {
        **{f"page_{number}": fact for number, fact in enumerate(FACTS)},
        **{f"summary_{number}": fact for number, fact in enumerate(FACTS)},
        "text": STORY,
        "headline": "Harbour parrot calls ferries home early",
        "verdict": "Yes.",
        "notes": NOTES,
        "why": WHY,
    }


def run() -> Rows:
    """The rows of the run `newsletter`."""
    texts = values()
    failed = {"errors": [{"type": "NativeError", "message": VALUE_ERROR}]}
    rows: Rows = {"session": _RUNS[0]}
    for call in _calls():
        rows[f"call:{call['output_var_id']}"] = call
    for number in range(7):
        rows[f"var:page_{number}"] = _variable("page", None, texts[f"page_{number}"], set_s=0.1)
        name = f"summary_{number}"
        rows[f"var:{name}"] = _variable("summary", name, texts[name])
    rows["var:notes"] = _variable("notes", None, NOTES, set_s=17.4)
    for name in ("text", "headline", "verdict"):
        rows[f"var:{name}"] = _variable(name, name, texts[name])
    rows["var:why"] = _variable("why", "why", WHY, "empty")
    rows["var:issue"] = _variable("issue", "issue", "", "empty")
    rows["var:seeds"] = _variable("seeds", "seeds", "", "failed", **failed)
    upstream = {
        "errors": [{"type": "InputFailed", "message": "an input failed"}, *failed["errors"]]
    }
    rows["var:total"] = _variable("total", "total", "", "failed", **upstream)
    return rows


_PROMPTS: Mapping[str, list[Row]] = {
    "why": [
        {"text": SYSTEM},
        {"text": "Here is the issue:\n\n"},
        {"var": "text", "name": "text"},
        {"text": "\n\nVerdict: "},
        {"var": "verdict", "name": "verdict"},
        {"text": "\nNotes of the editor: "},
        {"var": "notes", "name": "notes"},
        {"text": "\n\nWhy? Answer in two sentences."},
    ],
    "verdict": [
        {"text": "Here is the issue:\n\n"},
        {"var": "text", "name": "text"},
        {"text": "\n\nIs this fit to print? Yes or no."},
    ],
}


def variable(name: str) -> Rows:
    """The rows of a variable of the run."""
    rows = run()
    row = rows[f"var:{name}"]
    found: Rows = {"var": row}
    if (call := rows.get(f"call:{row['producer']}")) is not None:
        found["call"] = {"func": call["func_name"], "request_id": call["request_id"]}
        if call["kind"] == "native":
            found["call"]["source"] = "def parse_seeds(text, seeds):\n    seeds.set(int(text))\n"
        else:
            pieces = [{"var": one, "name": rows[f"var:{one}"]["name"]} for one in call["inputs"]]
            default = [{"text": "Summarize this in one sentence: "}, *pieces]
            found["call"]["prompt"] = _PROMPTS.get(name, default)
            found["call"]["sampling"] = {"temperature": 0.0, "seed": 7, "max_gen_length": 120}
        if name == "why":
            moved = {"engine": "engine-2", "queued_s": 0.0, "started_s": 17.4, "ran_s": 0.06}
            now = {"engine": "engine-0", "queued_s": 0.0, "started_s": 17.46, "ran_s": None}
            found["call"]["attempts"] = [
                moved | {"why_left": "the engine drains"},
                now | {"why_left": None},
            ]
    if text := values().get(name):
        found["text:0"] = {"text": text}
    return found


def prompt() -> Row:
    """The prompt of the call `why`, as its model received it."""
    pieces = [
        (
            "system",
            None,
            "You are the editor of a small newsletter. Answer in plain English.",
            True,
        ),
        ("user", None, "Here is the issue:\n\n", True),
        ("user", "text", STORY, True),
        ("user", None, "\n\nVerdict: ", True),
        ("user", "verdict", "Yes.", True),
        ("user", None, "\nNotes of the editor: ", False),
        ("user", "notes", NOTES, False),
        ("user", None, "\n\nWhy? Answer in two sentences.", False),
    ]
    rows = [
        {"role": role, "text": text, "cached": cached} | ({"name": name} if name else {})
        for role, name, text, cached in pieces
    ]
    tokens = {"prompt_tokens": 251, "cached_tokens": 218, "is_exact": True}
    return {"prompt": rows, "left_by": None, **tokens}


def series() -> Rows:
    """The last ten minutes of the service, as waves."""

    def wave(number: int, middle: float, height: float, period: float) -> float:
        return round(middle + height * math.sin(number / period) * math.cos(number / 2.3), 3)

    return {
        f"step:{number}": {
            "at": NOW - 10 * (60 - number),
            "tokens_s": wave(number, 410, 120, 5),
            "running": round(wave(number, 11, 4, 4)),
            "queued": max(0, round(wave(number, 2, 3, 3))),
            "cached": wave(number, 0.83, 0.08, 6),
            "kv": wave(number, 0.36, 0.05, 7),
            "first_token_s": wave(number, 0.31, 0.12, 3.5),
            "engines": {
                f"engine-{engine}": {
                    "tokens_s": wave(number, rate, rate / 3, 4 + engine),
                    "step_ms": wave(number, step, step / 5, 5 - engine),
                }
                for engine, rate, step in ((0, 248, 24), (1, 164, 22), (2, 12, 81))
            },
        }
        for number in range(60)
    }


def placement() -> Rows:
    words = [
        (1, None, "You are the editor of a small newsletter. Answer in plain English.", 32, 14),
        (2, 1, "Here is the issue: The parrot of the harbour has learned to", 186, 4),
        (3, 2, "Verdict: Yes. Notes of the editor: Keep it light;", 33, 0),
        (4, 2, "A headline of six words:", 24, 0),
        (5, 1, "Summarize this in one sentence: An interview with the", 71, 0),
        (6, None, "You are Claude Code, Anthropic's official CLI for", 25_480, 28),
        (7, 6, "Refactor the retry loop in fleet.py so that", 4120, 6),
        (8, None, "Grade the answer from 1 to 5. Text:", 612, 400),
    ]
    rows: Rows = {
        f"context:{number}": {
            "engine": "engine-0",
            "parent": parent,
            "own_tokens": tokens,
            "tokens": tokens,
            "forks": forks,
            "in_use": number in (1, 2, 3, 6, 7, 8),
            "owner": "public",
            "is_shared": number in (1, 6, 8),
            "head": text,
        }
        for number, parent, text, tokens, forks in words
    }
    placed = [
        ("why", "engine-0", 251, 33, 2.8, [2.9, 4.1]),
        ("review", "engine-0", 218, 136, 10.0, [2.5, 3.0]),
        ("headline", "engine-1", 196, 24, 10.0, [2.8, 1.6]),
        ("combine", "engine-0", 170, 170, 14.7, [4.5, 4.6]),
        *(("summarize", "engine-0", 70, 40, 20.0, None) for _ in range(4)),
        *(("summarize", "engine-1", 70, 40, 20.0, None) for _ in range(3)),
    ]
    for number, (func, engine, prompt, computed, age, costs) in enumerate(placed):
        request_id = 13 - number  # The last decision is that of the call `why`.
        rows[f"decision:{RUN}:{request_id}:0"] = {
            "at": NOW - age,
            "session": RUN,
            "func": func,
            "engine": engine,
            "prompt_tokens": prompt,
            "to_compute": computed,
            "waited_s": 0.01 * number,
            "compared": [
                {"engine": f"engine-{index}", "seconds": seconds}
                for index, seconds in enumerate(costs or [])
            ],
        }
    return rows


def usage() -> Rows:
    used = [
        ("ci-bot", "chat", 28, 714_200, 671_348, 21_900, 112.0, 0.262),
        ("evals", "grade", 612, 919_600, 846_032, 24_290, 84.0, 0.339),
        ("public", "summarize", 7, 490, 210, 154, 9.1, 0.0009),
        ("public", "combine", 1, 170, 0, 308, 4.6, 0.0008),
        ("public", "chat", 4, 136, 99, 8507, 25.4, 0.0821),
        ("legal", "extract", 6, 12_800, 2816, 310, 18.6, 0.0049),
        ("shop", "support", 8, 9120, 8026, 402, 13.2, 0.0052),
    ]
    names = ("calls", "prompt", "cached", "generation", "service_s", "cost")
    return {
        f"usage:{tenant}:{function}": {"tenant": tenant, "function": function}
        | dict(zip(names, numbers, strict=True))
        for tenant, function, *numbers in used
    }


def events() -> Rows:
    happened = [
        (3635, "engine joined", "qwen3-8b", "engine-0", None),
        (3631, "engine joined", "qwen3-8b", "engine-1", None),
        (1300, "session expired", "no request for 15 min", "", 41),
        (1290, "session expired", "no request for 15 min", "", 42),
        (1280, "session expired", "no request for 15 min", "", 43),
        (70, "engine lost", "no heartbeat for 10 s", "engine-3", None),
        (26, "engine drains", "1 call there", "engine-2", None),
        (3, "call retried", "why: the engine drains", "engine-2", RUN),
    ]
    return {
        f"event:{number}": {
            "at": NOW - age,
            "kind": kind,
            "text": text,
            "engine": engine,
            "session": session,
            "var": "why" if kind == "call retried" else "",
            "has_view": session == RUN,
        }
        for number, (age, kind, text, engine, session) in enumerate(happened, start=1)
    }


def large_run(number: int = 1000) -> Rows:
    """A run of `number` calls with two inputs each: no two are equal, so none are folded."""
    rows: Rows = {"session": run_row(9, "large", calls=number, done=number, state="finished")}
    rows["session"]["ended_at"] = BEGAN + 60
    width = 40
    for index in range(number):
        layer, place = divmod(index, width)
        above = [(layer - 1) * width + place, (layer - 1) * width + (place * 7 + 3) % width]
        start = 2.0 * layer
        rows[f"call:v{index}"] = call_row(
            f"v{index}",
            f"step_{index}",
            [f"v{one}" for one in above] if layer else [],
            request_id=index,
            computed_tokens=100,
            output_tokens=20,
            **_times(start, start + 0.1, start + 1.0 + place / width, 0.8),
        )
        rows[f"var:v{index}"] = _variable(f"v{index}", f"v{index}", "text")
    return rows
