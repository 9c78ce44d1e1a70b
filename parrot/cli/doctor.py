"""`parrot doctor`: finds problems of this machine and of configs, with a fix for each."""

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.markup import escape

from parrot.cli.console import OUT
from parrot.cli.servers import lack_of_packages
from parrot.cluster.ports import ask, is_free
from parrot.launch.configs import (
    Config,
    check_file,
    core_config,
    is_engine_config,
    read_configs,
)
from parrot.protocol.server_config import kept_token, settled_token
from parrot.serve.config import CoreConfig
from parrot.serve.prompts.encode import read_texts
from parrot.serve.tenants.table import read_keys
from parrot.utils.config import ConfigError, read_config_object
from parrot.utils.gpus import visible_gpus
from parrot.utils.installation import (
    DISTRIBUTION,
    NAMESAKE,
    REINSTALL_TORCH_LINE,
    conflict,
    has_embedded_model,
    how_to_install,
    install_line,
    is_former_install,
    lines_for_models,
    missing_model_packages,
    namesake,
    own_version,
    repair_lines,
    sample_configs,
)

Level = Literal["ok", "note", "wrong"]
_MARKS: dict[Level, str] = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "wrong": "[red]✗[/]"}
_LOW_MEMORY = 2 * 2**30
_LOW_DISK = 2**30
_ALL_KEYS = "correct it; `parrot config show` lists all keys"
_TORCH_TIMEOUT_S = 120.0
_TORCH_AGAIN = "run pip uninstall -y torch, then `parrot doctor` for the install command"
_NEED = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?:[^;]*>=(?P<least>[\d.]+))?")
_TORCH = (
    "import torch; "
    "print(torch.__version__, torch.version.cuda, torch.cuda.device_count(), "
    "*('; '+torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `advice` is the fix. Empty: no action is needed."""

    level: Level
    what: str
    advice: str = ""


def doctor(paths: list[Path]) -> None:
    """Print a line for each finding. The exit code is 1 if there is a problem."""
    findings = []
    for check in _checks(paths):
        for finding in check():
            findings.append(finding)
            advice = f"\n    {escape(finding.advice)}" if finding.advice else ""
            OUT.print(f"{_MARKS[finding.level]} {escape(finding.what)}{advice}", soft_wrap=True)
    num_wrong = sum(finding.level == "wrong" for finding in findings)
    OUT.print()
    if num_wrong:
        OUT.print(f"[bold red]{num_wrong} problem{'s' * (num_wrong > 1)} to fix[/]")
    if paths and not num_wrong:
        OUT.print("[bold green]These configs can be started here[/]")
    elif not paths:
        OUT.print(_summary(is_fine=not num_wrong), soft_wrap=True)
    sys.exit(1 if num_wrong else 0)


def _summary(*, is_fine: bool) -> str:
    """The last lines: the models that can run here, and commands to install missing packages."""
    lines = lines_for_models(visible_gpus(os.environ) > 0, embedded=True)
    if not lines:
        return "[bold green]Nothing is wrong[/]" if is_fine else ""
    steps = escape(how_to_install(lines))
    if missing_model_packages():
        return (
            "[bold yellow]No model can run here.[/] Programs, ServeCore and engines in front of "
            f"other servers need nothing more. To run models, {steps}"
        )
    return (
        "[bold yellow]The embedded model cannot run here.[/] Other models need nothing more. "
        f"To run the embedded model, {steps}"
    )


def _checks(paths: list[Path]) -> list[Callable[[], Iterator[Finding]]]:
    machine = [
        *(check_python, check_packages, check_namesake),
        *(check_torch, check_model, check_room, check_token),
    ]
    if not paths:
        return [*machine, check_usual_port]
    return [*machine, lambda: check_configs(paths, os.environ)]


def check_python() -> Iterator[Finding]:
    yield Finding("ok", f"Python {sys.version.split()[0]} at {sys.executable}")
    if sys.prefix == sys.base_prefix:
        advice = "create one: python3 -m venv .venv && source .venv/bin/activate"
        yield Finding("note", "no virtual environment is active", advice)


def check_packages() -> Iterator[Finding]:
    """Check the packages that Parrot's metadata names, without extras."""
    try:
        wanted = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        if (former := namesake()) is None or not is_former_install(former):
            yield Finding("wrong", f"{DISTRIBUTION} is not installed here", install_line())
        return
    needs = [need for line in wanted if "extra ==" not in line and (need := _NEED.match(line))]
    missing = [text for need in needs if (text := _lack(need["name"], need["least"] or "0"))]
    if missing:
        yield Finding(
            "wrong", f"packages are missing or too old: {', '.join(missing)}", install_line()
        )
    else:
        yield Finding("ok", f"Parrot {own_version()}, and the packages that it needs")
    yield Finding("ok", f"sample configs are in {sample_configs()}")


def check_namesake() -> Iterator[Finding]:
    """Check that no other installed package has the import name `parrot`."""
    advice = "\n    ".join(["run these commands in this order:", *repair_lines()])
    if (message := conflict()) is not None:
        yield Finding("wrong", message, advice)
    elif namesake() is not None:
        yield Finding("note", f"Parrot is installed under its former name, {NAMESAKE}", advice)


def _lack(name: str, least: str) -> str | None:
    try:
        found = version(name)
    except PackageNotFoundError:
        return name
    return None if _numbers(found) >= _numbers(least) else f"{name} {found}, not {least} or newer"


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def check_torch() -> Iterator[Finding]:
    """Check torch in a child process, because its import takes seconds and can crash."""
    if missing := missing_model_packages():
        yield Finding("note", f"not installed, and needed to run models: {', '.join(missing)}")
    if "torch" in missing:
        return
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        yield Finding("wrong", "importing torch does not finish", _TORCH_AGAIN)
        return
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("wrong", f"torch cannot be used: {last}", _TORCH_AGAIN)
        return
    name, cuda, num_devices, *_ = asked.stdout.split()
    devices = asked.stdout.strip().partition("; ")[2]
    yield Finding("ok", f"torch {name}, CUDA {cuda}, {num_devices} devices {devices}".rstrip())
    if visible_gpus(os.environ) and num_devices == "0":
        build = "is for CPUs only" if cuda == "None" else "does not see it: run nvidia-smi"
        yield Finding(
            "wrong",
            f"there is a GPU, but this torch {build}",
            f"{REINSTALL_TORCH_LINE}; or run engines with --device cpu",
        )


def check_model() -> Iterator[Finding]:
    if not has_embedded_model():
        yield Finding("note", "the embedded model is not installed")
    else:
        yield Finding("ok", "the embedded model is installed")


def check_room() -> Iterator[Finding]:
    """Check the free memory, and the disk of the working folder, which holds the logs."""
    if (free := _free_memory()) is not None:
        text = f"{free / 2**30:.1f} GiB of memory are free, for {os.cpu_count()} cores"
        if free < _LOW_MEMORY:
            yield Finding("note", text, "end other programs, or choose a small model")
        else:
            yield Finding("ok", text)
    disk = shutil.disk_usage(Path.cwd()).free
    if disk < _LOW_DISK:
        yield Finding("note", f"{disk / 2**20:.0f} MiB of disk are free", "make room for logs")
    if not os.access(Path.cwd(), os.W_OK):
        yield Finding("note", f"{Path.cwd()} is not writable", "set --log-dir to another folder")


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(li.split()[1]) * 1024 for li in lines if li.startswith("MemAvailable")), None)


def check_token(state_dir: str | None = None) -> Iterator[Finding]:
    """Check this user's cluster token file, and create it if it is missing."""
    try:
        kept_token(state_dir)
    except ConfigError as error:
        yield Finding("wrong", str(error), "chmod 700 the folder and 600 the file, or remove both")
    else:
        yield Finding("ok", "the cluster token is readable, only by you")


def check_usual_port() -> Iterator[Finding]:
    yield from _check_port("ServeCore", "localhost", 9000)


def _check_port(name: str, host: str, port: int) -> Iterator[Finding]:
    try:
        if is_free(host, port):
            yield Finding("ok", f"port {port} of {host} is free, for {name}")
        elif ask(host, port, "/health") is not None:
            yield Finding("note", f"port {port} is used by a server", "`parrot ping` checks it")
        else:
            yield Finding("wrong", f"port {port} of {host} is taken", "choose another with `port`")
    except OSError as error:
        yield Finding(
            "wrong", f"{host} cannot be bound: {error}", "set `host` to a name of this machine"
        )


def check_configs(paths: list[Path], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check config files, as for `parrot launch` or of ServeCore alone, with models and ports."""
    num_wrong = 0
    for path in paths:
        try:
            check_file(path, environ)
        except ConfigError as error:
            num_wrong += 1
            yield Finding("wrong", str(error), _ALL_KEYS)
    if num_wrong:
        return
    try:
        core, engines = _read(paths, environ)
    except ConfigError as error:
        yield Finding("wrong", str(error), _ALL_KEYS)
        return
    named = ", ".join(map(str, paths))
    yield Finding("ok", f"{named}: every key is known; engines: {len(engines)}")
    for path in paths:
        yield from _check_secrets(path)
    try:
        settled_token(
            core.get("host", "localhost"),
            core.get("cluster_token"),
            insecure=core.get("insecure", False),
            has_api_keys=bool(core.get("api_keys") or core.get("keys_file")),
            state_dir=core.get("state_dir"),
        )
        if (keys_file := core.get("keys_file")) is not None:
            read_keys(keys_file)
        read_texts(core.get("public_prefixes", ()))
    except ConfigError as error:
        yield Finding("wrong", f"ServeCore would not start: {error}", "set it in its config")
    for config in (core, *engines):
        name = config.get("model", "ServeCore")
        yield from _check_port(name, config.get("host", "localhost"), config["port"])
    for engine in engines:
        yield from _check_engine(engine)


def _read(paths: list[Path], environ: Mapping[str, str]) -> tuple[Config, list[Config]]:
    """The configs of ServeCore and of the engines. Raises `ConfigError`."""
    contents = [read_config_object(path) for path in paths]
    if len(paths) > 1 or "engines" in contents[0] or is_engine_config(contents[0]):
        return read_configs(paths, environ)
    core = core_config(contents[0], str(paths[0]), environ)
    return {"port": CoreConfig.model_fields["port"].default, **core}, []


def _check_secrets(path: Path) -> Iterator[Finding]:
    """Report secrets in a file that other users can read."""
    content = read_config_object(path)
    secrets = [key for key in ("cluster_token", "api_keys") if content.get(key)]
    if secrets and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        named = " and ".join(f"`{key}`" for key in secrets)
        yield Finding("note", f"{path} holds {named}, and others can read it", f"chmod 600 {path}")


def _check_engine(engine: Config) -> Iterator[Finding]:
    model, kind = engine.get("model", "embedded"), engine.get("engine_type", "builtin")
    if kind not in ("builtin", "huggingface"):
        return
    if (lack := lack_of_packages(engine)) is not None:
        yield Finding("wrong", *lack)
    if str(engine.get("device", "auto")).startswith("cuda") and not visible_gpus(os.environ):
        yield Finding(
            "wrong",
            f"{model} is configured for {engine['device']}, but there is no GPU",
            "set `device` to cpu, or use a machine with a GPU",
        )
    ranks, gpus = engine.get("instance", {}).get("tensor_parallel", 1), visible_gpus(os.environ)
    if 0 < gpus < ranks and engine.get("device", "auto") != "cpu":
        yield Finding(
            "wrong",
            f"{model} is configured for {ranks} GPUs, but there are {gpus}",
            "set `instance.tensor_parallel` to fewer, or use a machine with more GPUs",
        )
    if engine.get("instance", {}).get("load_format") == "dummy" or model == "embedded":
        return
    path = Path(model).expanduser()
    if not path.exists():
        yield from _check_hub(model)
        return
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    unreadable = [each for each in files if not os.access(each, os.R_OK)]
    if not files or unreadable:
        what = f"{unreadable[0]} cannot be read" if unreadable else f"{path} has no *.safetensors"
        yield Finding("wrong", what, "give it the right owner, or fetch the model again")
        return
    size = sum(each.stat().st_size for each in files)
    free = _free_memory()
    text = f"the weights of {model} can be read: {size / 2**30:.1f} GiB"
    if free is not None and size > free and not visible_gpus(os.environ):
        yield Finding("wrong", f"{text}, but less memory is free", "choose a smaller model")
    else:
        yield Finding("ok", text)


def _check_hub(model: str) -> Iterator[Finding]:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        yield Finding(
            "wrong", f"{model}: no such folder or file", "set `model` to a model that exists"
        )
    elif find_spec("huggingface_hub") is None:
        yield Finding(
            "wrong", f"{model} cannot be fetched from the model hub", install_line("engine")
        )
    else:
        advice = "the first start takes longer; set HF_TOKEN for models that require a licence"
        yield Finding("note", f"{model} is fetched from the model hub at the first start", advice)
