"""Write the reference tables of the docs from the pydantic models, so that they cannot be wrong.

    python docs/generate_config_reference.py

makes docs/configuration.md, and in docs/rest.md, engine_api.md and deployment.md fills what stands
between `<!-- fields: MODEL -->` and `<!-- end -->`, and in docs/metrics.md what stands between
`<!-- metrics: PROCESS -->` and `<!-- end -->`. In docs/clients.md it fills `<!-- clients -->`, what
clients have done, and `<!-- wire -->`, what becomes of the fields that they send, and in
docs/engines.md `<!-- servers -->`, what other makers' servers can do. In docs/security.md
`<!-- rules: SERVER -->` is who may use which route, as the apps have it."""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from pydantic import BaseModel
from starlette.routing import BaseRoute

from parrot.engine import config as engine_config
from parrot.engine import cores
from parrot.engine.app import create_app as engine_app
from parrot.engine.core.plan import SUPPORTED_SAMPLING
from parrot.engine.metrics import EngineMetrics
from parrot.engine.openai.dialects import DIALECTS
from parrot.engine.reorder import ReorderBuffer
from parrot.engine.sim.engine import SimService
from parrot.launch import scaling
from parrot.launch.by_ssh import inventory
from parrot.launch.on_ray import pools as on_ray
from parrot.protocol import engine_api, graph_api, public, sampling
from parrot.protocol.gate.access import Access, rules
from parrot.protocol.gate.config import ConnectionLimits
from parrot.protocol.registration import payloads as registration_api
from parrot.protocol.sampling import CONSTRAINTS
from parrot.protocol.streams import outputs
from parrot.protocol.streams import payloads as streams_api
from parrot.serve.api.app import create_app as core_app
from parrot.serve.api.vendors.anthropic_fields import MessagesRequest
from parrot.serve.api.vendors.completions import CompletionRequest
from parrot.serve.api.vendors.openai_chat import ChatRequest
from parrot.serve.api.vendors.responses.fields import ResponseRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig, SessionQuota, TenantQuota
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.telemetry.metrics import CoreMetrics
from parrot.serve.tenants.keys_file import KeyEntry
from parrot.serve.tenants.tenant import TenantLimits
from parrot.utils.clock import MonotonicClock

DOCS = Path(__file__).parent
FILLED_PAGES = ("rest.md", "engine_api.md", "deployment.md")
TABLE_PAGES = ("clients.md", "engines.md")
MODELS: dict[str, type[BaseModel]] = {
    name: value
    for module in (
        *(sampling, engine_api, registration_api, streams_api, outputs, public, graph_api),
        *(on_ray, scaling, inventory),
    )
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, BaseModel)
}
TRANSCRIPTS = DOCS.parent / "tests" / "serve" / "vendors" / "transcripts"
APIS: dict[str, type[BaseModel]] = {
    "chat completions": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "messages": MessagesRequest,
}
# Known fields that a request may not have, or only with a value that changes nothing.
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
_TABLE = re.compile(r"(<!-- (clients|wire|servers) -->\n).*?(<!-- end -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_METRICS = re.compile(r"(<!-- metrics: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_RULES = re.compile(r"(<!-- rules: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_ENDLESS = 1e9  # bounds beyond are only there to keep numbers in a machine word

# Keys by the sections of the page; those that are named nowhere come under "the rest".
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
CORE_LIMITS = ("max_queue_size", "reuse_cache_size", "reuse_timeout")  # of `global_scheduler`
ENGINE_SWITCHES = ("policy", "prefix_caching", "background_share", "background_chunk_size")
INSTANCE_SWITCHES = ("attn_func", "load_format", "shared_prefix", "kv_cache_dtype")

CONFIGURATION = """\
# Configuration

<!-- Generated by docs/generate_config_reference.py: change the models, not this page. -->

Each server takes a key from the first of these places that sets it:

1. an option of the command line, such as `--port 9100`;
2. a variable of its environment: `PARROT_CORE__PORT=9100`, and for engines
   `PARROT_ENGINE__SCHEDULER__MAX_BATCH_SIZE=64`: the names of sections and keys in capitals, with
   two underscores between. Text stands as it is, all else as JSON, as in
   `PARROT_CORE__API_KEYS='["a", "b"]'`;
3. its file, `--config_path FILE`: one object, as JSON or, if its name ends with `.yaml` or `.yml`,
   as YAML, where plain words are text (`prefix_repair: off`) but for `true`, `false` and `null`;
4. its default.

A key that does not exist or a value of the wrong type stops the server at its start, with the
place, the key and what is allowed. `parrot config show [FILE]` prints what would hold, and where it
comes from. `parrot up` and `parrot launch` read the environment for all servers that they start,
which do not read it again. `sample_configs/` has files to begin with.

## What an operator sets

All other keys have defaults that are meant to stay. Durations are in seconds.

ServeCore:

{operator_core}

An engine:

{operator_engine}

## ServeCore: limits and times

{core}

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

`engine_type` says which kind of engine it is, and so what `instance` may hold. {engine}

### `connections`

As ServeCore's.

### `serve_core`

{serve_core}

### Each of `shard_cores`

{shard_core}

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

Each turns off, or replaces by something simpler, a part that pays for itself: to measure what it
brings, and to look for a defect. They change when and where calls run, not what they answer.

ServeCore's `global_scheduler`:

{core_switches}

An engine's `scheduler`:

{engine_switches}

The `instance` of `builtin`:

{instance_switches}
"""


def configuration_page() -> str:
    types = {
        "engine_type": {"enum": list(engine_config.CONFIG_TYPES), "default": "builtin"},
    }
    engine = engine_config.BuiltinConfig
    scheduler, instance = engine_config.SchedulerConfig, engine_config.BuiltinInstance
    return CONFIGURATION.format(
        operator_core=table(CoreConfig, OPERATOR_CORE),
        operator_engine=table(engine, OPERATOR_ENGINE, **types),
        core=section(CoreConfig, without=OPERATOR_CORE),
        core_limits=table(GlobalSchedulerConfig, CORE_LIMITS),
        core_switches=section(GlobalSchedulerConfig, without=CORE_LIMITS),
        connections=section(ConnectionLimits),
        session_quota=section(SessionQuota),
        tenant_quota=section(TenantQuota),
        key=section(KeyEntry),
        limits=section(TenantLimits),
        engine=section(engine, doc=engine_config.EngineConfig, without=OPERATOR_ENGINE),
        serve_core=section(cores.ServeCoreAddress),
        shard_core=section(cores.ShardCore),
        scheduler=section(scheduler, without=ENGINE_SWITCHES),
        engine_switches=table(scheduler, ENGINE_SWITCHES),
        builtin=section(instance, without=INSTANCE_SWITCHES),
        instance_switches=table(instance, INSTANCE_SWITCHES),
        openai=section(engine_config.OpenAIInstance),
        huggingface=section(engine_config.HuggingFaceInstance),
        sim=section(engine_config.SimInstance),
    )


def filled(page: str) -> str:
    """The page with its `fields` blocks brought up to date."""
    return _BLOCK.sub(lambda match: match[1] + section(MODELS[match[2]]) + "\n" + match[3], page)


def section(
    model: type[BaseModel], doc: type[BaseModel] | None = None, without: Sequence[str] = ()
) -> str:
    """What the class (or `doc`) says of itself, and a table of its other fields."""
    text = _own_doc(doc or model)
    unknown = set(without) - set(model.model_fields)
    if unknown:
        raise KeyError(f"{model.__name__} has no {unknown}")
    keys = [name for name in model.model_fields if name not in without]
    return "\n".join([*([text, ""] if text else []), table(model, keys)])


def table(model: type[BaseModel], keys: Sequence[str], **changes: Any) -> str:
    """A table of some fields; `changes` replace the JSON schemas of single ones."""
    schema = model.model_json_schema()
    fields = schema.get("properties", {}) | changes
    if not keys:
        return "No fields."
    rows = [_row(key, fields[key], schema) for key in keys]
    return "\n".join(["| key | type | default | |", "| --- | --- | --- | --- |", *rows])


def _own_doc(model: type[BaseModel]) -> str:
    """The docstring, unless it is inherited; bare names in it are keys already in backticks."""
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


def servers_table() -> str:
    """A row for what not all can do. It begins with what all can."""
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


def _metrics_page(page: str) -> str:
    config = CoreConfig()
    core = CoreMetrics(config).families([], Dispatcher(config, MonotonicClock()))
    host = engine_api.HostTierInfo(num_max_blocks=0, num_free_blocks=0)
    info = engine_api.RuntimeInfo(host_tier=host, server_load=engine_api.ServerLoad())
    engine = EngineMetrics("", "").families(info)
    made = {"core": metrics_table(core), "engine": metrics_table(engine)}
    return _METRICS.sub(lambda match: match[1] + made[match[2]] + match[3], page)


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


def _security_page(page: str) -> str:
    made = {"core": rules_table(core_app(ServeCore(CoreConfig())).routes)}
    config, clock = engine_config.SimConfig(), MonotonicClock()
    engine = engine_app(SimService(config, clock), ReorderBuffer(clock), config)
    made["engine"] = rules_table(engine.routes)
    return _RULES.sub(lambda match: match[1] + made[match[2]] + match[3], page)


def rules_table(routes: Iterable[BaseRoute]) -> str:
    paths: dict[Access, list[str]] = {access: [] for access in Access}
    for rule in rules(routes):
        path = rule.path.replace(":path}", "}")
        paths[rule.access].append(f"`{rule.method} {path}`".replace("* ", ""))
    rows = [[str(access), ", ".join(found)] for access, found in paths.items() if found]
    return _plain_table(["needs", "routes"], rows)


def pages() -> dict[Path, str]:
    """Every generated page and what it should hold."""
    made = {DOCS / "configuration.md": configuration_page()}
    return made | {
        **{DOCS / name: _with_tables((DOCS / name).read_text()) for name in TABLE_PAGES},
        DOCS / "security.md": _security_page((DOCS / "security.md").read_text()),
        DOCS / "metrics.md": _metrics_page((DOCS / "metrics.md").read_text()),
        **{DOCS / name: filled((DOCS / name).read_text()) for name in FILLED_PAGES},
    }


def _with_tables(page: str) -> str:
    made = {"clients": clients_table(), "wire": fields_table(), "servers": servers_table()}
    return _TABLE.sub(lambda match: match[1] + made[match[2]] + match[3], page)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
