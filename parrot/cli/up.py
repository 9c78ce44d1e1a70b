"""`parrot up MODEL` serves a model on this machine. `parrot up URL` puts Parrot in front of servers
that already run."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from parrot.cli.coding_agents import SMALL_MODEL, agent_lines, why_not_all
from parrot.cli.console import ERR, OUT, fail, orderly_exit, warn
from parrot.cli.servers import hurry, require_packages, running
from parrot.cluster import Cluster, ClusterError
from parrot.cluster.cluster import binding
from parrot.cluster.ports import ask, is_free
from parrot.engine.config import engine_settings, parse_engine_config
from parrot.gateway.page.visitors import page_url
from parrot.launch.configs import Config
from parrot.protocol.public import ModelsResponse, ReadyResponse
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.addresses import is_url
from parrot.utils.config import ConfigError, parse_config, read_config_object
from parrot.utils.gpus import visible_gpus
from parrot.utils.installation import sample_configs
from parrot.utils.server_socket import in_use
from parrot.utils.settings import layer

_HOST, _PORT = "127.0.0.1", 9000
_OF_ONE_ENGINE = ("port", "engine_name")
_CONFIG_SUFFIXES = {".json", ".yaml", ".yml"}
_WEIGHTS = (
    "a folder with config.json, a .gguf file, the id of a hub model (org/name), or `embedded`"
)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of the command line. None: the value comes from configs, the environment or the
    machine."""

    engines: int | None
    host: str | None
    port: int | None
    device: str | None
    dtype: str | None
    core_config: Path | None
    insecure: bool
    log_dir: Path | None
    ready_timeout_s: float
    tensor_parallel: int | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    forward_client_key: bool = False


def up(models: Sequence[str], options: UpOptions) -> None:
    """Run until a signal or until ServeCore exits, then raise `SystemExit`. Engines that exit are
    restarted. `models`: one model, or URLs of servers."""
    try:
        core = _core(options)
        if is_url(models[0]):
            from parrot.cli.front import planned_servers  # Imports the openai engine.

            servers = planned_servers(models, options.api_key_file, options.ca_file)
            if options.forward_client_key:
                servers = [server | {"forward_client_key": True} for server in servers]
            core["servers"] = [*core.get("servers", ()), *servers]
            engines = []
            what = f"Parrot in front of {', '.join(server['url'] for server in servers)}"
        else:
            model = _only_model(models)
            engines = plan_engines(model, options, os.environ, visible_gpus(os.environ))
            require_packages(engines)
            what = f"{_counted(len(engines))} of {model}"
        # Each server has a folder, so that the logs of two servers in one folder stay apart.
        log_dir = options.log_dir or Path("logs") / str(core.get("port", os.getpid()))
        cluster = Cluster(core, engines, log_dir=log_dir, ready_timeout_s=options.ready_timeout_s)
    except (ConfigError, ClusterError) as error:
        fail(str(error))
    with orderly_exit(partial(hurry, cluster)):
        ERR.print(f"Starting {escape(what)} …", soft_wrap=True)
        with running(cluster):
            if not engines:
                from parrot.cli.front import wait_for_servers

                wait_for_servers(cluster, options.ready_timeout_s)
            _say_how_to_use(cluster)
            fail(cluster.supervise(warn).death_message())


def _only_model(models: Sequence[str]) -> str:
    if len(models) > 1:
        raise ConfigError(
            f"{len(models)} models: `parrot up` takes one model, or URLs of servers. "
            "`parrot launch` serves several models"
        )
    return models[0]


def _core(options: UpOptions) -> Config:
    """ServeCore's config with a free port. Raises `ConfigError`, and `ClusterError` for a host that
    is not an address of this machine."""
    given = _given(host=options.host, port=options.port, insecure=options.insecure or None)
    settings = core_settings(options.core_config, given, os.environ)
    parse_config(CoreConfig, settings.payload, settings.blamed)
    core = {"host": _HOST, "port": _PORT, **settings.payload}
    if core["port"] == 0:
        del core["port"]  # The cluster finds a free port.
    elif _is_taken(core["host"], core["port"]):
        raise ConfigError(in_use(core["host"], core["port"]))
    return core


def _is_taken(host: str, port: int) -> bool:
    with binding("ServeCore", host):
        return not is_free(host, port)


def plan_engines(
    model: str, options: UpOptions, environ: Mapping[str, str], gpus: int
) -> list[Config]:
    """A config for each engine. With GPUs, each engine uses one GPU, or `tensor_parallel` GPUs.
    Without GPUs, one engine uses all cores. Raises `ConfigError` with advice."""
    given = _given(device=options.device, dtype=options.dtype)
    if options.tensor_parallel is not None:
        given["instance"] = {"tensor_parallel": options.tensor_parallel}
    settings = engine_settings(layer(_engine_for(model), model), given, environ)
    parse_engine_config(settings.payload, settings.blamed)
    config = settings.payload
    device = config.get("device", "auto")
    runs_model = config.get("engine_type", "builtin") in ("builtin", "huggingface")
    on_gpus = runs_model and gpus > 0 and device in ("auto", "cuda")
    ranks = config.get("instance", {}).get("tensor_parallel", 1)
    num_engines = options.engines or (max(1, gpus // ranks) if on_gpus else 1)
    if num_engines > 1:
        config = {key: value for key, value in config.items() if key not in _OF_ONE_ENGINE}
    if on_gpus and num_engines * ranks > gpus:
        each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
        raise ConfigError(
            f"{num_engines} engines need {each} each, but there are only {gpus}: use fewer "
            "--engines, a smaller --tensor-parallel, or --device cpu"
        )
    if on_gpus and num_engines > 1:
        return [{**config, "device": f"cuda:{number * ranks}"} for number in range(num_engines)]
    if runs_model and num_engines > 1 and device in ("auto", "cpu"):
        return [_with_share_of_cores(config, num_engines * ranks)] * num_engines
    return [config] * num_engines


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _with_share_of_cores(config: Config, num_processes: int) -> Config:
    if config.get("engine_type", "builtin") != "builtin":
        return config
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {**config, "instance": {"num_threads": threads, **config.get("instance", {})}}


def _engine_for(model: str) -> dict[str, Any]:
    """The engine config for `model`. Raises `ConfigError` if it is not a model."""
    path = Path(model).expanduser()
    if path.suffix.lower() in _CONFIG_SUFFIXES:
        return _engine_file(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{model}: it has no config.json; a model is {_WEIGHTS}")
        return _local(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"{model}: neither a .gguf nor a config; a model is {_WEIGHTS}")
        return _local(path, path.stem)
    samples = {
        sample.stem: sample for sample in sorted((sample_configs() / "engine").glob("*.json"))
    }
    if (sample := samples.get(_plain(model))) is not None:
        return _engine_file(sample)
    if model == "embedded":
        return {"model": model}
    if model.count("/") == 1 and not model.startswith((".", "/", "~")) and path.suffix != ".gguf":
        return {"model": model}
    near = get_close_matches(_plain(model), samples, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    known = f"a sample config ({', '.join(samples)}), " if samples else ""
    raise ConfigError(
        f"{model}: no such model. {hint}It may be {known}an engine's config, {_WEIGHTS}"
    )


def _local(path: Path, name: str) -> dict[str, Any]:
    """The config of a local model. Its served name does not contain the folder."""
    return {"model": str(path), "served_model_name": name}


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _engine_file(path: Path) -> dict[str, Any]:
    config = read_config_object(path)
    if "engine_type" not in config:
        raise ConfigError(
            f"{path}: not the config of an engine, because it has no `engine_type`. Start a launch "
            "file with `parrot launch`; give the config of ServeCore with --core-config"
        )
    return config


def _say_how_to_use(cluster: Cluster) -> None:
    """Print the page's address and a shell line for each common client."""
    core = cluster.configs["core"]
    url = cluster.core_url
    models = _models(cluster)
    model = models[0]
    servers = core.get("servers", ()) if not cluster.engine_names else ()
    if servers:
        from parrot.cli.front import reported_context

        context = reported_context(servers, model)
    else:
        context = _context(cluster, model)
    where = f" on {_counted(names)}" if (names := len(cluster.engine_names)) else ""
    OUT.print(f"Ready: {escape(', '.join(models))}{where} at [bold]{url}[/]\n")
    if core.get("page", True):
        OUT.print(f"Web page: {page_url(url, cluster.cluster_token)}\n", soft_wrap=True)
    key = "KEY" if core.get("api_keys") or core.get("keys_file") else "any"
    openai = f"OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={shlex.quote(model)}"
    lines = {"OpenAI code": f"export {openai}", **agent_lines(url, model, key, context)}
    for client, line in lines.items():
        OUT.print(f"[bold]{client}[/]")
        sys.stdout.write(f"  {line}\n")  # rich would wrap the line.
    sys.stdout.flush()
    if (reason := why_not_all(model, context)) is not None:
        advice = "" if servers else f" A model that works: parrot up {SMALL_MODEL}"
        OUT.print(f"[bold]Coding agents[/]\n  {escape(reason + advice)}", soft_wrap=True)
    if servers:
        length = "not reported by its server" if context is None else f"{context:,} tokens"
        OUT.print(f"Context of {escape(model)}: {length}. Prompt lengths are estimates.")
    if key == "KEY":
        OUT.print("KEY is one of `api_keys`, or of `keys_file`.")
    log_dir = escape(str(cluster.log_dir))
    OUT.print(f"\nTry it: parrot chat --core {url}", soft_wrap=True)
    OUT.print(f"Logs are in {log_dir}. Ctrl-C stops the server.", soft_wrap=True)


def _models(cluster: Cluster) -> list[str]:
    """The models under their served names."""
    core = cluster.configs["core"]
    token = cluster.cluster_token
    status, answer = ask(core["host"], core["port"], "/ready", 5.0, token) or (None, None)
    if status != 200:
        return ["MODEL"]
    engines = ReadyResponse.model_validate(answer).engines or []
    return list(dict.fromkeys(engine.model for engine in engines)) or ["MODEL"]


def _context(cluster: Cluster, model: str) -> int | None:
    """The model's maximum tokens of prompt and output. None: ServeCore does not answer."""
    core = cluster.configs["core"]
    key = next(iter(core.get("api_keys", ())), None)
    status, answer = ask(core["host"], core["port"], "/v1/models", 5.0, key) or (None, None)
    if status != 200:
        return None
    cards = ModelsResponse.model_validate(answer).data
    return next((card.max_model_len for card in cards if card.id == model), None)


def _counted(engines: int) -> str:
    return "one engine" if engines == 1 else f"{engines} engines"
