"""Write the reference tables of the docs from the code, so that the tables cannot be wrong.

    python docs/generate_config_reference.py

The script writes docs/configuration.md. On every other page of docs/ it fills these blocks, each of
which ends with `<!-- end -->`:

    <!-- fields: MODEL -->      the fields of a pydantic model
    <!-- metrics: PROCESS -->   the metrics of `core` or `engine`
    <!-- rules: PROCESS -->     the access rule of each route of `core` or `engine`
    <!-- clients -->            what each tested client has done
    <!-- wire -->               the request fields of each API, and how Parrot treats them
    <!-- servers -->            what each tested inference server supports
    <!-- architectures -->      the architectures of the builtin engine
    <!-- shapes -->             the memory that well-known models need
    <!-- commands -->           the arguments and options of each command of `parrot`
"""

import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer.main
from prometheus_client.core import Metric
from pydantic import BaseModel
from starlette.routing import BaseRoute

from parrot.cli.app import app
from parrot.engine import config as cores
from parrot.engine import config as engine_config
from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as engine_app
from parrot.engine.core.steps import SUPPORTED_SAMPLING
from parrot.engine.http_server import engine_options
from parrot.engine.metrics import EngineMetrics
from parrot.engine.models.families import ARCHITECTURES, spec_from_config
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.tensors import num_weights
from parrot.engine.openai.dialects import DIALECTS
from parrot.engine.runner.kv_cache import device_pool_bytes
from parrot.engine.runner.sizes import KvMemory
from parrot.engine.runner.step_memory import step_bytes
from parrot.engine.sim import SimService
from parrot.gateway.vendors.chat_completions import ChatRequest
from parrot.gateway.vendors.completions import CompletionRequest
from parrot.gateway.vendors.messages import MessagesRequest
from parrot.gateway.vendors.responses.fields import ResponseRequest
from parrot.launch.on_ray import pools as on_ray
from parrot.protocol import engine_api, public, sampling
from parrot.protocol.app_server import server_options
from parrot.protocol.endpoint import Access, rules
from parrot.protocol.sampling import CONSTRAINTS, DefaultSampling
from parrot.protocol.server_config import ConnectionLimits
from parrot.serve.config import (
    CoreConfig,
    GlobalSchedulerConfig,
    HistoryConfig,
    SessionQuota,
    TenantQuota,
)
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.metrics import CoreMetrics
from parrot.serve.tenants.table import KeyEntry, TenantLimits, TenantTable
from parrot.server.app import create_app as core_app
from parrot.utils.clock import MonotonicClock

DOCS = Path(__file__).parent
MODELS: dict[str, type[BaseModel]] = {
    name: value
    for module in (
        *(sampling, engine_api, public),
        on_ray,
    )
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseModel)
}
TRANSCRIPTS = DOCS.parent / "tests" / "gateway" / "vendors" / "transcripts"
APIS: dict[str, type[BaseModel]] = {
    "chat completions": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "messages": MessagesRequest,
}
# Known fields that requests are refused for, unless their value has no effect.
REFUSED = {
    "chat completions": {
        "audio",
        "function_call",
        "functions",
        "moderation",
        "web_search_options",
    },
    "completions": {"suffix"},
    "responses": {
        "context_management",
        "conversation",
        "max_tool_calls",
        "moderation",
        "prompt",
    },
    "messages": {"container", "inference_geo", "mcp_servers", "speed"},
}
_BLOCK = re.compile(
    r"(<!-- (fields|metrics|rules|clients|wire|servers|architectures|shapes|commands)"
    r"(?:: (\w+))? -->\n)"
    r".*?(<!-- end -->)",
    re.DOTALL,
)
GIB = 1 << 30
FREE_GIB = (23, 45, 79, 140)  # Free memory of GPUs with 24, 48, 80 and 141 GB.
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_ENDLESS = 1e9  # Larger bounds are not shown: they only keep numbers within a machine word.

# Keys by the sections of the page. Keys that are in no list are shown under "the rest".
OPERATOR_CORE = (
    "host",
    "port",
    "api_keys",
    "keys_file",
    "cluster_token",
    "session_life_span",
    "engine_heartbeat_timeout",
)
OPERATOR_ENGINE = (
    "engine_type",
    "model",
    "host",
    "port",
    "device",
    "cluster_token",
    "serve_core",
)
CORE_LIMITS = ("max_queue_size", "reuse_cache_size", "reuse_timeout")  # In `global_scheduler`.
ENGINE_SWITCHES = ("policy", "prefix_caching", "background_share", "background_chunk_size")
INSTANCE_SWITCHES = ("attn_func", "load_format", "shared_prefix", "kv_cache_dtype")

CONFIGURATION = """\
# Configuration

<!-- Generated by docs/generate_config_reference.py: change the models, not this page. -->

This page lists every configuration key of ServeCore and of the engines. A server takes each key
from the first of these sources that sets it:

| source | example |
| --- | --- |
| command line | `--port 9100` |
| environment | `PARROT_CORE__PORT=9100`, `PARROT_ENGINE__SCHEDULER__MAX_BATCH_SIZE=64` |
| file | `--config-path core.json`, one JSON or YAML object |
| default | see below |

Names of environment variables have capital letters, and two underscores between section and key.
Strings stand as they are; other values are JSON, as in `PARROT_CORE__API_KEYS='["a", "b"]'`. In a
YAML file, plain words are strings (`prefix_repair: off`), except `true`, `false` and `null`.

An unknown key or a value of the wrong type stops the server at its start. The message names the
place and the key. `parrot config show [FILE]` prints all values with their sources. `parrot up`
and `parrot launch` read the environment for the servers that they start. `sample_configs/` has
example files.

## What an operator sets

All other keys rarely need a change. Durations are in seconds.

ServeCore:

{operator_core}

An engine:

{operator_engine}

## ServeCore: limits and times

{core}

### `history`

{history}

### `global_scheduler`

{core_limits}

### `connections`

{connections}

### `session_quota`

{session_quota}

### `tenant_quota`

{tenant_quota}

### An entry of `keys_file`

{key}

### `limits` of a key

{limits}

## Engines: the rest

`engine_type` selects the type of the engine and the keys of `instance`. {engine}

### `connections`

As in ServeCore.

### `serve_core`

{serve_core}

### `default_sampling`

For the engine types `builtin`, `huggingface` and `sim`.

{default_sampling}

### `scheduler`

{scheduler}

### `instance` of `builtin`, the default

{builtin}

### `instance` of `openai`

{openai}

### `instance` of `huggingface`

{huggingface}

### `instance` of `sim`

{sim}

## Switches for measurement

These keys switch parts off, to measure their effect or to look for a defect. They change when and
where calls run. Only `kv_cache_dtype` changes what calls answer, a little.

ServeCore's `global_scheduler`:

{core_switches}

An engine's `scheduler`:

{engine_switches}

The `instance` of `builtin`:

{instance_switches}
"""


def configuration_page() -> str:
    types = {
        "engine_type": {
            "enum": list(engine_config.CONFIG_TYPES),
            "default": "builtin",
            "description": "Where the model runs (docs/engines.md).",
        },
    }
    engine = engine_config.BuiltinConfig
    scheduler, instance = engine_config.SchedulerConfig, engine_config.BuiltinInstance
    return CONFIGURATION.format(
        operator_core=table(CoreConfig, OPERATOR_CORE),
        operator_engine=table(engine, OPERATOR_ENGINE, **types),
        core=section(CoreConfig, without=OPERATOR_CORE),
        history=section(HistoryConfig),
        core_limits=table(GlobalSchedulerConfig, CORE_LIMITS),
        core_switches=section(GlobalSchedulerConfig, without=CORE_LIMITS),
        connections=section(ConnectionLimits),
        session_quota=section(SessionQuota),
        tenant_quota=section(TenantQuota),
        key=section(KeyEntry),
        limits=section(TenantLimits),
        engine=section(engine, doc=engine_config.EngineConfig, without=OPERATOR_ENGINE),
        serve_core=section(cores.ServeCoreAddress),
        scheduler=section(scheduler, without=ENGINE_SWITCHES),
        default_sampling=section(DefaultSampling),
        engine_switches=table(scheduler, ENGINE_SWITCHES),
        builtin=section(instance, without=INSTANCE_SWITCHES),
        instance_switches=table(instance, INSTANCE_SWITCHES),
        openai=section(engine_config.OpenAIInstance),
        huggingface=section(engine_config.HuggingFaceInstance),
        sim=section(engine_config.SimInstance),
    )


def filled(page: str) -> str:
    """The page with its generated blocks brought up to date."""
    return _BLOCK.sub(lambda match: match[1] + _block(match[2], match[3]) + match[4], page)


def _block(kind: str, of: str) -> str:
    match kind:
        case "fields":
            return section(MODELS[of]) + "\n"
        case "metrics":
            return metrics_tables()[of]
        case "rules":
            return rules_tables()[of]
        case "clients":
            return clients_table()
        case "wire":
            return fields_table()
        case "architectures":
            return architectures_table()
        case "shapes":
            return shapes_table()
        case "commands":
            return commands_sections()
        case _:
            return servers_table()


def section(
    model: type[BaseModel], doc: type[BaseModel] | None = None, without: Sequence[str] = ()
) -> str:
    """The docstring of the class (or of `doc`), and a table of the remaining fields."""
    text = _own_doc(doc or model)
    unknown = set(without) - set(model.model_fields)
    if unknown:
        raise KeyError(f"{model.__name__} has no {unknown}")
    keys = [name for name in model.model_fields if name not in without]
    return "\n".join([*([text, ""] if text else []), table(model, keys)])


def table(model: type[BaseModel], keys: Sequence[str], **changes: Any) -> str:
    """A table of the fields `keys`. `changes` replace the JSON schemas of single fields."""
    schema = model.model_json_schema()
    fields = schema.get("properties", {}) | changes
    if not keys:
        return "No fields."
    rows = [_row(key, fields[key], schema) for key in keys]
    return "\n".join(["| key | type | default | |", "| --- | --- | --- | --- |", *rows])


def _own_doc(model: type[BaseModel]) -> str:
    """The docstring, unless it is inherited."""
    doc = model.__dict__.get("__doc__")
    return " ".join(inspect.cleandoc(doc).split()) if doc else ""


def _row(name: str, prop: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    cells = (
        f"`{name}`",
        _type(prop, schema),
        _default(name, prop, schema),
        prop.get("description", ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(name: str, prop: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if name in schema.get("required", ()):
        return "required"
    default = prop.get("default")
    if isinstance(default, Mapping):
        return "see below" if default else "`{}`"
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _type(prop: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in prop:
        name = prop["$ref"].rpartition("/")[2]
        target = schema["$defs"][name]
        return _type(target, schema) if "enum" in target else f"`{name}`"
    if "anyOf" in prop:
        return " or ".join(_type(option, schema) for option in prop["anyOf"])
    if "enum" in prop:
        return ", ".join(f"`{value}`" for value in prop["enum"])
    if "const" in prop:
        return f"`{prop['const']}`"
    kind = str(prop.get("type", "any"))
    if kind == "array" and "items" in prop:
        return f"list of {_type(prop['items'], schema)}"
    bounds = [
        f"{sign} {prop[key]:g}"
        for key, sign in _BOUNDS.items()
        if key in prop and abs(prop[key]) < _ENDLESS
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def clients_table() -> str:
    told = {path.stem: json.loads(path.read_text()) for path in sorted(TRANSCRIPTS.glob("*.json"))}
    features = list(dict.fromkeys(name for one in told.values() for name in one["features"]))
    head = ["client", *features]
    rows = [[_versions(one["versions"]), *_passes(one, features)] for one in told.values()]
    return _plain_table(head, rows)


def architectures_table() -> str:
    rows = [[f"`{name}`", found.models] for name, found in sorted(ARCHITECTURES.items())]
    return _plain_table(["architecture", "models"], rows)


def shapes_table() -> str:
    """The memory of models in bfloat16, with the heads that the kernels store."""
    rows, size = [], 64  # Tokens per block.
    for name, shape in KNOWN_SHAPES.items():
        spec = spec_from_config(shape, name)
        if spec.attention.head_dim.bit_count() > 1:
            spec = spec.padded() or spec
        weights = 2 * num_weights(spec)
        config = engine_config.BuiltinConfig()
        memory = KvMemory(spec, config, size, torch.bfloat16)
        of_steps = step_bytes(spec, config.scheduler, torch.bfloat16, unpacks=False)
        pools = [device_pool_bytes(free * GIB - weights, of_steps) for free in FREE_GIB]
        blocks = [pool // memory.layout.block_bytes for pool in pools]
        all_sizes = [memory.in_memory_of(max(0, count)) for count in blocks]
        layout = all_sizes[-1].layout
        parts = [layout.block_bytes / size / 1024, layout.slot_bytes / size / 1024]
        kib = [f"{part:.0f} KiB" if part else "-" for part in parts]
        tokens = [sizes.num_blocks * size // 1000 for sizes in all_sizes]
        cells = [f"{count:,}k" if count else "-" for count in tokens]
        rows.append([name, f"{weights / GIB:.1f} GiB", *kib, *cells])
    free = [f"tokens in {free} GiB" for free in FREE_GIB]
    return _plain_table(["model", "weights", "KV per token", "KV in windows", *free], rows)


def servers_table() -> str:
    """The features that all servers have, and a table row for each other feature."""
    own = SUPPORTED_SAMPLING.union(CONSTRAINTS, engine_api.FEATURES - engine_api.SERVER_FEATURES)
    by_server = {name: dialect.features(is_chat=False) for name, dialect in DIALECTS.items()}
    known = {"builtin": own, **by_server}
    common = own.intersection(*by_server.values())
    rest = sorted(own.union(*by_server.values()) - common)
    rows = [[", ".join(f"`{name}`" for name in sorted(common)), *["yes"] * len(known)]]
    for feature in rest:
        cells = ["yes" if feature in features else "no" for features in known.values()]
        if feature == "json_schema":
            cells = ["in chats" if cell == "no" else cell for cell in cells]
        rows.append([f"`{feature}`", *cells])
    told = ["no" if dialect.load is None else "yes" for dialect in DIALECTS.values()]
    rows.append(["its load", "yes", *told])
    return _plain_table(["feature", *known], rows)


def fields_table() -> str:
    names = sorted({name for api in APIS for name in {*APIS[api].model_fields, *REFUSED[api]}})
    return _plain_table(
        ["field", *APIS], [[f"`{name}`", *(_fate(api, name) for api in APIS)] for name in names]
    )


def _fate(api: str, name: str) -> str:
    if name in REFUSED[api]:
        return "refused"
    field = APIS[api].model_fields.get(name)
    if field is None:
        return ""
    return "ignored" if field.annotation is Any else "used"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _passes(told: dict[str, Any], features: list[str]) -> list[str]:
    had = told["features"]
    return ["" if name not in had else "no" if had[name] else "yes" for name in features]


def _plain_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


@functools.cache
def metrics_tables() -> dict[str, str]:
    config = CoreConfig()
    metrics = CoreMetrics(config, TenantTable(config), lambda session_id: None)
    core = metrics.families([], Dispatcher(config, MonotonicClock()))
    host = engine_api.HostTierInfo(num_max_blocks=0, num_free_blocks=0)
    slots, load = engine_api.WindowSlots(num_slots=0), engine_api.ServerLoad()
    info = engine_api.RuntimeInfo(host_tier=host, window_slots=slots, server_load=load)
    engine = EngineMetrics("", "").families(info)
    return {"core": metrics_table(core), "engine": metrics_table(engine)}


def metrics_table(families: Iterable[Metric]) -> str:
    rows = [
        [f"`{_series(family)}`", family.type, _labels(family), family.documentation]
        for family in families
    ]
    return _plain_table(["metric", "type", "labels", ""], rows)


def _series(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def _labels(family: Metric) -> str:
    return ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))


@functools.cache
def rules_tables() -> dict[str, str]:
    config, clock = engine_config.SimConfig(), MonotonicClock()
    engine = engine_app(SimService(config, clock), ReorderBuffer(clock), config)
    core = core_app(ServeCore(CoreConfig()))
    return {"core": rules_table(core.routes), "engine": rules_table(engine.routes)}


def rules_table(routes: Iterable[BaseRoute]) -> str:
    paths: dict[Access, list[str]] = {access: [] for access in Access}
    for rule in rules(routes):
        path = rule.path.replace(":path}", "}")
        paths[rule.access].append(f"`{rule.method} {path}`".replace("* ", ""))
    rows = [[str(access), ", ".join(found)] for access, found in paths.items() if found]
    return _plain_table(["needs", "routes"], rows)


def commands_sections() -> str:
    root: Any = typer.main.get_command(app)
    found = []
    for name, command in root.commands.items():
        parts = getattr(command, "commands", {"": command})
        found += [_command_section(f"{name} {part}".strip(), parts[part]) for part in parts]
    return "\n".join(found)


_SERVERS = {"serve": server_options("", ""), "engine": engine_options()}


def _command_section(name: str, command: Any) -> str:
    if name in _SERVERS:
        actions = [one for one in _SERVERS[name]._actions if one.dest != "help"]
        options = [[f"`{one.option_strings[0]}`", _one_line(one.help or "")] for one in actions]
        table = _plain_table(["option", ""], options)
        return f"## parrot {name}\n\n{_one_line(command.help)}\n\n{table}"
    shown = [one for one in command.params if one.name != "help" and not one.hidden]
    rows = [[_option(one), _one_line(one.help or "")] for one in shown]
    head = f"## parrot {name}\n\n{_one_line(command.help)}\n"
    return f"{head}\n{_plain_table(['option', ''], rows)}" if rows else head


def _option(parameter: Any) -> str:
    """The name of the option, with its default value if there is one to show."""
    if parameter.param_type_name == "argument":
        return f"`{(parameter.name or '').upper()}`"
    given = parameter.default
    has_default = not callable(given) and given not in (None, False, True, ())
    return f"`{parameter.opts[0]}`" + (f" (default: {given})" if has_default else "")


def _one_line(text: str) -> str:
    """The text as one line of a table. Rich markup escapes `[` with a backslash."""
    return " ".join(text.split()).replace("\\[", "[").replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Every page of docs/ with its current content."""
    made = {path: filled(path.read_text()) for path in sorted(DOCS.rglob("*.md"))}
    return made | {DOCS / "configuration.md": configuration_page()}


if __name__ == "__main__":
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
