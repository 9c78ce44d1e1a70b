"""Starts the servers, runs the program and shows its calls."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from parrot.cli.console import OUT, fail, orderly_exit
from parrot.cli.servers import require_packages, showing_progress, started
from parrot.cluster import Cluster

if TYPE_CHECKING:
    from parrot import P
    from parrot.protocol.public import SessionInfo

_TEXT = Path(__file__).with_name("bees.txt")
_ENGINE = {"engine_type": "builtin", "model": "embedded", "device": "cpu"}
# Calls wait while the engine loads. If a server exits, the calls are cancelled.
_CORE = {"engine_heartbeat_timeout": 10.0, "no_engine_timeout": 300.0}


def run_demo(file: Path | None, max_parts: int, output_dir: Path) -> None:
    """Run the demo. Raises `SystemExit` on failure."""
    begin = time.perf_counter()
    document = file or _TEXT
    text = read_document(document)
    with _using(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    require_packages([_ENGINE])
    with orderly_exit(), started(cluster := Cluster(_CORE, [_ENGINE])):
        # Import in this process while the servers start, because all imports take seconds.
        from parrot.cli.calls import calls_table
        from parrot.cli.demo.program import split_text
        from parrot.protocol.errors import ParrotError

        parts = split_text(text)
        chosen = parts[:max_parts] if max_parts > 0 else parts
        of = "" if len(chosen) == len(parts) else f" of {len(parts)}"
        OUT.print(f"Reading [bold]{document.name}[/]: {len(chosen)}{of} parts, then a summary")
        try:
            info, seconds = _summarize(cluster, chosen, begin)
        except ParrotError as error:
            dead = cluster.dead()
            fail(str(error) if dead is None else dead.death_message())
        OUT.print(calls_table(info, seconds))
        _draw(info, f"Map-reduce summary of {document.name}, {seconds:.1f} s", output_dir)


@contextmanager
def _using(path: Path) -> Iterator[None]:
    """Ends the command if the path cannot be used."""
    try:
        yield
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def read_document(path: Path) -> str:
    """The text of a file. Ends the command if the file has no text."""
    try:
        with _using(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 text")
    if not text.strip():
        fail(f"{path} is empty")
    return text


def _summarize(cluster: Cluster, parts: list[str], begin: float) -> "tuple[SessionInfo, float]":
    """Run the program. Returns the executed graph, and the seconds from the first call to the end
    of the answer. Calls wait in ServeCore until the engine is ready."""
    from parrot import P
    from parrot.cli.demo.program import summarize

    with showing_progress(cluster):
        cluster.wait_ready(())
    vm = P.VirtualMachine(cluster.core_url, app="demo")
    with vm.running_scope():
        submitted = time.perf_counter()
        facts, final = summarize(parts)
        Thread(
            target=_cancel_when_a_server_dies, args=(cluster, [*facts, final]), daemon=True
        ).start()
        with showing_progress(cluster):
            pieces = facts[0].stream()
            first = next(pieces, "")
        OUT.print(f"[dim]first word {time.perf_counter() - begin:.1f} s after the start[/]\n")
        _write("1. ", chain([first], pieces))
        for number, fact in enumerate(facts[1:], 2):
            _write(f"{number}. ", fact.stream())
        _write("\n", final.stream())
        OUT.print()
        return vm.session_info(), time.perf_counter() - submitted


def _write(head: str, pieces: Iterable[str]) -> None:
    """Write a line in chunks. rich would write it only at its end."""
    sys.stdout.write(head)
    for number, piece in enumerate(pieces):
        sys.stdout.write(piece if number else piece.lstrip())
        sys.stdout.flush()
    sys.stdout.write("\n")


def _cancel_when_a_server_dies(cluster: Cluster, wanted: "list[P.SemanticVariable]") -> None:
    """Cancel the wanted variables when a server exits. Otherwise ServeCore would wait up to 300 s
    for another engine."""
    from parrot.protocol.errors import ParrotError

    if cluster.wait_death() is not None:
        for variable in wanted:
            with suppress(ParrotError):
                variable.cancel()


def _draw(info: "SessionInfo", title: str, output_dir: Path) -> None:
    from parrot.cli.graph_picture import draw_session

    path = output_dir / "graph.svg"
    with _using(output_dir):
        draw_session(info, title, path)
    OUT.print(f"The executed graph: {path}", soft_wrap=True)
