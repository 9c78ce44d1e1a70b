"""`parrot run`, `parrot ping` and `parrot page`: commands for a running ServeCore."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import typer
from pydantic import ValidationError
from rich.table import Column, Table

from parrot.cli.console import OUT, fail, orderly_exit
from parrot.cli.servers import require_packages, running
from parrot.cluster import Cluster
from parrot.cluster.ports import ask
from parrot.gateway.page.visitors import page_url
from parrot.protocol.public import EngineStatus, ModelCard, ModelsResponse, ReadyResponse
from parrot.protocol.sampling import DefaultSampling
from parrot.protocol.server_config import kept_token
from parrot.serve.config import CoreConfig, core_settings
from parrot.utils.config import ConfigError, parse_config
from parrot.utils.source_place import SHORT_ERRORS


def run_program(program: Path, args: list[str], core: str, embedded: bool) -> None:
    """Run a program and raise `SystemExit` with its exit code."""
    if not program.is_file():
        fail(f"no such file: {program}")
    host, port = host_and_port(core)
    with ExitStack() as stack:
        stack.enter_context(orderly_exit())
        if ask(host, port, "/health") is None:
            _agree_to_start(core, embedded)
            require_packages(engines := [{"engine_type": "builtin"}])
            cluster = Cluster({"host": host, "port": port}, engines)
            stack.enter_context(running(cluster))
        url = core if "//" in core else f"http://{core}"
        environ = {**os.environ, "PARROT_URL": url, SHORT_ERRORS: "1"}
        child = subprocess.Popen([sys.executable, str(program), *args], env=environ)
        stack.callback(child.wait)
        stack.callback(child.terminate)  # No effect after the program has exited.
        code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


def show_health(core: str, config_path: Path | None) -> None:
    """Print the health of a server. Exit code 0: ready. 1: no answer, or no engine is available.
    Engines are shown only with the token of `config_path`. Without it no secret is sent, because
    another program may listen at the address."""
    address = host_and_port(core)
    try:
        token = None if config_path is None else operator_token(config_path)
    except ConfigError as error:
        fail(str(error))
    begin = time.perf_counter()
    if ask(*address, "/health", timeout_s=5.0) is None:
        _fail_without_core(core)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    status, answer = ask(*address, "/ready", timeout_s=5.0, token=token) or (None, None)
    try:
        ready = None if status == 503 else ReadyResponse.model_validate(answer)
    except ValidationError:
        fail(f"{core} answers, but it is not a ServeCore")
    OUT.print(f"ServeCore at {core} answers in {milliseconds:.1f} ms")
    if ready is None:
        OUT.print("no engine is registered")
        sys.exit(1)
    if ready.engines is not None:
        OUT.print(f"{ready.num_queued} queued", engine_table(ready.engines), sep="\n")
        _show_sampling((e.model, e.default_sampling) for e in ready.engines)
        return
    models = _models(*address)
    names = ", ".join(card.id for card in models)
    OUT.print(f"it serves {names}" if models else "engines are registered", soft_wrap=True)
    _show_sampling((card.id, card.default_sampling) for card in models)
    OUT.print("`parrot top` shows the engines")


def _show_sampling(defaults: Iterable[tuple[str, DefaultSampling | None]]) -> None:
    """Print a line for each model, and for each difference between its engines."""
    for model, sampling in dict.fromkeys(defaults):
        if sampling is not None:
            OUT.print(
                f"Default sampling of {model}: {sampling.shown()}", soft_wrap=True, markup=False
            )


def _models(host: str, port: int) -> list[ModelCard]:
    """The served models. Empty if the server requires an API key, which is not sent."""
    status, answer = ask(host, port, "/v1/models", timeout_s=5.0) or (None, None)
    with suppress(ValidationError):
        return [] if status != 200 else ModelsResponse.model_validate(answer).data
    return []


def _fail_without_core(core: str) -> NoReturn:
    fail(
        f"no ServeCore answers at {core}: start one with `parrot up MODEL`, or give its address "
        "with --core"
    )


def show_page_address(core: str, config_path: Path | None) -> None:
    """Print the page's address. Raises `SystemExit` without a token, or without an answer."""
    try:
        token = operator_token(config_path)
    except ConfigError as error:
        fail(str(error))
    if ask(*host_and_port(core), "/health", timeout_s=5.0) is None:
        _fail_without_core(core)
    OUT.print(page_url(core if "//" in core else f"http://{core}", token), soft_wrap=True)


def operator_token(config_path: Path | None) -> str:
    """The cluster token from ServeCore's config or this user's token file. The page's key is
    derived from it. Raises `ConfigError`."""
    settings = core_settings(config_path, {}, os.environ)
    config = parse_config(CoreConfig, settings.payload, settings.blamed)
    return config.cluster_token or kept_token(config.state_dir)


def engine_table(engines: list[EngineStatus]) -> Table:
    right = (Column(name, justify="right") for name in ("running", "KV tokens used"))
    table = Table("engine", "type", "model", "address", *right)
    for engine in engines:
        table.add_row(
            engine.engine_name,
            engine.engine_type,
            engine.model,
            f"{engine.host}:{engine.port}",
            str(engine.num_running),
            f"{engine.used_tokens} / {engine.tokens_capacity}",
        )
    return table


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or host is None:
        fail(f"not an http address: {url}")
    return host, 80 if port is None else port


def _agree_to_start(core: str, embedded: bool) -> None:
    """Ends the command unless the user agrees to start a cluster, with the flag or an answer."""
    if embedded:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        fail(f"no ServeCore answers at {core}; --embedded starts one for this program")
    question = f"No ServeCore answers at {core}. Start one with the embedded model?"
    typer.confirm(question, default=True, err=True, abort=True)
