"""`parrot run`: a program against a ServeCore, if need be one started for it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import typer

from parrot.cli.console import fail, orderly_exit
from parrot.cli.launch import start_visibly
from parrot.cluster import Cluster, ClusterError
from parrot.cluster.ports import ask


def run_program(program: Path, args: list[str], core: str, embedded: bool) -> None:
    """Ends by `SystemExit` with the program's exit code."""
    if not program.is_file():
        fail(f"no such file: {program}")
    with ExitStack() as stack:
        stack.enter_context(orderly_exit())
        if not _answers(core):
            _agree_to_start(core, embedded)
            stack.enter_context(_temporary_cluster(*host_and_port(core)))
        child = subprocess.Popen([sys.executable, str(program), *args])
        stack.callback(child.wait)
        stack.callback(child.terminate)  # does nothing after the normal end
        code = child.wait()
    sys.exit(code if code >= 0 else 128 - code)


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or host is None:
        fail(f"not an http address: {url}")
    return host, 80 if port is None else port


def _answers(core: str) -> bool:
    return ask(*host_and_port(core), "/health") is not None


def _agree_to_start(core: str, embedded: bool) -> None:
    """Ends the command unless the user wants a cluster, by the flag or by answering."""
    if embedded:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        fail(f"no ServeCore answers at {core}; --embedded starts one for this program")
    question = f"No ServeCore answers at {core}. Start one with the embedded model?"
    typer.confirm(question, default=True, err=True, abort=True)


@contextmanager
def _temporary_cluster(host: str, port: int) -> Iterator[None]:
    """Listens where the program expects it."""
    cluster = Cluster({"host": host, "port": port}, [{"engine_type": "builtin"}])
    try:
        start_visibly(cluster)
        yield
    except ClusterError as error:
        fail(str(error))
    finally:
        cluster.stop()
