"""`parrot simulate`: replays a recorded trace with other settings."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from parrot.cli.console import OUT, fail
from parrot.engine.config import SimConfig, load_engine_config
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.simulation.cluster import PATIENT
from parrot.simulation.replay import Replay
from parrot.simulation.report import Change, Summary, changes, summarize
from parrot.simulation.trace import load_trace
from parrot.utils.config import ConfigError, load_config, parse_config

_NUM_CHANGES = 5  # Sessions to show with the largest gains, and with the largest losses.
_NOTABLE = 0.01
_ROWS: Sequence[tuple[str, str, str]] = (
    ("sessions answered", "num_answered", "d"),
    ("failed reads", "num_failed_reads", "d"),
    ("JCT mean, s", "jct_mean_s", ".3f"),
    ("JCT p50, s", "jct_p50_s", ".3f"),
    ("JCT p99, s", "jct_p99_s", ".3f"),
    ("makespan, s", "makespan_s", ".3f"),
    ("output tokens/s", "tokens_per_s", ".1f"),
    ("output tokens", "output_tokens", "d"),
    ("prompt tokens cached", "cached_tokens", "d"),
    ("prompt tokens computed", "computed_tokens", "d"),
    ("... of them recomputed", "recomputed_tokens", "d"),
    ("tokens evicted", "evicted_tokens", "d"),
    ("completions rerun", "num_reruns", "d"),
)


def simulate(
    path: Path,
    settings: Mapping[str, Any],
    core_config: Path | None,
    against: Sequence[str],
    output: Path | None,
) -> None:
    """Print a column for the recording, for `settings`, and for each of `against`."""
    try:
        recorded = load_trace(path)
        core = _load_core(core_config)
        given = {key: value for key, value in settings.items() if value is not None}
        base = _apply(Replay(core=core), given)
        replays = {"simulated": base}
        for text in against:
            replays[text] = _apply(base, _parse(text))
    except ConfigError as error:
        fail(str(error))
    traces = {"recorded": recorded}
    for name, replay in replays.items():
        began = time.perf_counter()
        traces[name] = replay.run(recorded)
        OUT.print(f"{name}: replayed in {time.perf_counter() - began:.1f} s", style="dim")
    summaries = {name: summarize(trace) for name, trace in traces.items()}
    OUT.print(_table(summaries))
    for name in list(replays)[1:]:
        _print_changes(name, changes(traces["simulated"], traces[name]))
    if output is not None:
        figures = {
            name: asdict(summary) | {"jct_s": [session.jct_s for session in traces[name].sessions]}
            for name, summary in summaries.items()
        }
        output.write_text(json.dumps(figures, indent=1) + "\n")


def _load_core(path: Path | None) -> CoreConfig:
    """The config of a replay: the file's scheduler, without the expiry of sessions and engines."""
    if path is None:
        return PATIENT
    scheduler = load_config(CoreConfig, path).global_scheduler
    return PATIENT.model_copy(update={"global_scheduler": scheduler})


def _parse(text: str) -> dict[str, Any]:
    """Parse settings such as `policy=fcfs,engines=8`. Values are JSON, or else text."""
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, separator, value = part.partition("=")
        if not separator:
            raise ConfigError(f"--against: `{part}` is not KEY=VALUE")
        try:
            settings[key.strip()] = json.loads(value)
        except ValueError:
            settings[key.strip()] = value.strip()
    return settings


def _apply(replay: Replay, settings: Mapping[str, Any]) -> Replay:
    """Apply `engines`, `kv_tokens` and `engine_config`. Other keys belong to the global
    scheduler."""
    rest = dict(settings)
    if (engine_config := rest.pop("engine_config", None)) is not None:
        config = load_engine_config(str(engine_config))
        if not isinstance(config, SimConfig):
            raise ConfigError(f"{engine_config}: its engine_type must be sim")
        replay = replace(replay, engine=config)
    replay = replace(
        replay,
        num_engines=_count(rest, "engines") or replay.num_engines,
        kv_tokens=_count(rest, "kv_tokens") or replay.kv_tokens,
    )
    old = replay.core.global_scheduler.model_dump(mode="json")
    scheduler = parse_config(GlobalSchedulerConfig, old | rest, "setting")
    return replace(replay, core=replay.core.model_copy(update={"global_scheduler": scheduler}))


def _count(settings: dict[str, Any], key: str) -> int | None:
    """Remove the setting and return its number. None if it is missing."""
    count = settings.pop(key, None)
    if count is None or (type(count) is int and count > 0):
        return count
    raise ConfigError(f"`{key}` must be a whole number of 1 or more, not {count!r}")


def _table(summaries: Mapping[str, Summary]) -> Table:
    columns = (Column(name, justify="right") for name in summaries)
    table = Table("", *columns, title="Simulated results", title_justify="left")
    for label, field, spec in _ROWS:
        values = (getattr(summary, field) for summary in summaries.values())
        table.add_row(label, *("?" if value is None else format(value, spec) for value in values))
    return table


def _print_changes(name: str, found: Sequence[Change]) -> None:
    gained = sum(change.ratio > 1 + _NOTABLE for change in found)
    lost = sum(change.ratio < 1 - _NOTABLE for change in found)
    OUT.print(f"{name}: {gained} sessions are faster and {lost} slower, by more than 1%")
    headers = ("session", "simulated, s", f"{name}, s", "ratio")
    table = Table(*(Column(header, justify="right") for header in headers))
    is_long = len(found) > 2 * _NUM_CHANGES
    for change in [*found[:_NUM_CHANGES], *found[-_NUM_CHANGES:]] if is_long else found:
        table.add_row(
            str(change.index),
            f"{change.before_s:.3f}",
            f"{change.after_s:.3f}",
            f"{change.ratio:.2f}x",
        )
    OUT.print(table)
