"""Write the Grafana board to the folder of this file.

python sample_configs/monitoring/make_board.py
"""

import json
from pathlib import Path
from typing import Any

BOARD = Path(__file__).with_name("grafana_board.json")
COLUMNS, HEIGHT = 3, 8
WIDTH = 24 // COLUMNS


def quantile(share: float, name: str, label: str) -> str:
    return (
        f"histogram_quantile({share}, sum by (le, {label}) (rate({name}_bucket[$__rate_interval])))"
    )


def rate(name: str, *labels: str) -> str:
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({name}[$__rate_interval]))"


ENGINE = '{model_name=~"$model"}'
HIT_RATE = (
    f"{rate('parrot_prefix_cache_hits_total', 'model_name')}"
    f" / {rate('parrot_prefix_cache_queries_total', 'model_name')}"
)
ROWS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Service": [
        ("Live sessions", "short", {"sessions": "parrot_sessions"}),
        (
            "Calls that end",
            "ops",
            {"{{kind}} {{state}}": rate("parrot_calls_total", "kind", "state")},
        ),
        (
            "Completions queued and running",
            "short",
            {
                "queued": "parrot_num_requests_waiting",
                "{{engine}}": f"parrot_num_requests_running{ENGINE}",
            },
        ),
        (
            "First token, p95",
            "s",
            {"{{model_name}}": quantile(0.95, "parrot_time_to_first_token_seconds", "model_name")},
        ),
        (
            "Time per output token, p95",
            "s",
            {
                "{{model_name}}": quantile(
                    0.95, "parrot_request_time_per_output_token_seconds", "model_name"
                )
            },
        ),
        (
            "Tokens",
            "short",
            {
                "prompt": rate("parrot_prompt_tokens_total"),
                "generated": rate("parrot_generation_tokens_total"),
            },
        ),
    ],
    "Applications and functions": [
        (
            "Life of sessions, p50",
            "s",
            {"{{app}}": quantile(0.5, "parrot_session_e2e_seconds", "app")},
        ),
        (
            "Completion, p95 from wanted",
            "s",
            {"{{function}}": quantile(0.95, "parrot_call_e2e_seconds", "function")},
        ),
        (
            "Wait for inputs, p95",
            "s",
            {"{{function}}": quantile(0.95, "parrot_call_dependency_wait_seconds", "function")},
        ),
        (
            "Queue, p95",
            "s",
            {"{{function}}": quantile(0.95, "parrot_call_queue_seconds", "function")},
        ),
        ("Retries", "ops", {"{{function}}": rate("parrot_call_retries_total", "function")}),
        (
            "Evicted tokens by function",
            "ops",
            {"{{function}}": rate("parrot_call_evicted_tokens_total", "function")},
        ),
        (
            "Native functions, p95",
            "s",
            {"{{function}}": quantile(0.95, "parrot_function_seconds", "function")},
        ),
    ],
    "KV": [
        ("Use of KV", "percentunit", {"{{engine}}": f"parrot_kv_cache_usage_perc{ENGINE}"}),
        ("Prompt tokens found in KV", "percentunit", {"{{model_name}}": HIT_RATE}),
        (
            "Tokens freed and computed again",
            "short",
            {
                "freed: {{reason}}": rate("parrot_kv_freed_tokens_total", "reason"),
                "again: {{reason}}": rate("parrot_kv_recomputed_tokens_total", "reason"),
            },
        ),
    ],
    "Costs": [
        (
            "Cost an hour, by function",
            "short",
            {"{{function}}": "3600 * " + rate("parrot_call_cost_total", "function")},
        ),
        (
            "Cost an hour, by tenant",
            "short",
            {"{{tenant}}": "3600 * " + rate("parrot_tenant_cost_total", "tenant")},
        ),
        (
            "Tokens by tenant",
            "short",
            {"{{tenant}} {{direction}}": rate("parrot_tenant_tokens_total", "tenant", "direction")},
        ),
    ],
    "Engines, as they see it": [
        (
            "Step",
            "s",
            {"{{engine}}": f"parrot_engine_step_seconds{ENGINE}"},
        ),
        (
            "Wait for room, p95",
            "s",
            {"{{engine}}": quantile(0.95, "parrot_engine_request_queue_time_seconds", "engine")},
        ),
        ("Last heartbeat", "s", {"{{engine}}": f"parrot_engine_heartbeat_age_seconds{ENGINE}"}),
    ],
}


def board() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, charts in ROWS.items():
        at = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": at, "panels": []})
        top += 1
        for number, (name, unit, queries) in enumerate(charts):
            row, column = divmod(number, COLUMNS)
            at = {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_chart(name, unit, queries) | {"gridPos": at})
        top += HEIGHT * -(-len(charts) // COLUMNS)
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    return {
        "title": "Parrot",
        "uid": "parrot",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATA_SOURCE, _MODEL]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}
_DATA_SOURCE = {"name": "source", "type": "datasource", "query": "prometheus"}
_MODEL = {
    "name": "model",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(parrot_engine_up, model_name)",
    "includeAll": True,
    "multi": True,
    "refresh": 2,
}


def _chart(title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expr, "legendFormat": legend}
            for n, (legend, expr) in enumerate(queries.items())
        ],
    }


if __name__ == "__main__":
    BOARD.write_text(json.dumps(board(), indent=1) + "\n")
