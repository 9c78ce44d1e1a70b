"""`parrot demo`: a real application on a real model, from start to finish, on this machine."""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from pathlib import Path

from parrot import P
from parrot.cli.calls import calls_table, watching
from parrot.cli.console import OUT, fail, orderly_exit
from parrot.cli.graph_picture import can_draw, draw_session
from parrot.cli.launch import running
from parrot.cluster import Cluster
from parrot.frontend.pfunc.function import SemanticFunction
from parrot.protocol.errors import ParrotError
from parrot.protocol.public import SessionInfo

_DEFAULT_DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
_ENGINE = {"engine_type": "builtin", "model": "embedded", "device": "cpu"}
_CORE = {"engine_heartbeat_timeout": 10.0}
WORDS_PER_PART = 180
_PARTS_AT_ONCE = 8
_PART_TOKENS, _FINAL_TOKENS = 48, 128


def run_demo(file: Path | None, max_parts: int, output_dir: Path) -> None:
    """Ends by `SystemExit` unless all went well."""
    begin = time.perf_counter()
    document = file or _DEFAULT_DOCUMENT
    parts = split_text(read_document(document))
    chosen = parts[:max_parts] if max_parts > 0 else parts
    with _using(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    with orderly_exit():
        # Its first import on a machine takes seconds; the engine is loading anyway.
        if can_draw():
            _in_background(importlib.import_module, "matplotlib.figure")
        cluster = Cluster(_CORE, [_ENGINE])
        with running(cluster):
            of = "" if len(chosen) == len(parts) else f" of {len(parts)}"
            OUT.print(
                f"Summarizing [bold]{document.name}[/]: {len(chosen)}{of} parts, then all together"
            )
            try:
                info, seconds = _summarize(cluster, chosen, begin)
            except ParrotError as error:
                dead = cluster.dead()
                fail(str(error) if dead is None else dead.death_message())
        OUT.print(calls_table(info, seconds))
        _draw(info, f"Map-reduce summary of {document.name}, {seconds:.1f} s", output_dir)


@contextmanager
def _using(path: Path) -> Iterator[None]:
    """Ends the command when the path cannot be used."""
    try:
        yield
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def read_document(path: Path) -> str:
    """Ends the command when there is no text in it."""
    try:
        with _using(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        fail(f"{path} is not UTF-8 text")
    if not text.strip():
        fail(f"{path} is empty")
    return text


def _in_background(function: Callable[..., object], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _cancel_when_a_server_dies(cluster: Cluster, final: P.SemanticVariable) -> None:
    """Without its only engine ServeCore would wait a while for another."""
    if cluster.wait_death() is not None:
        with suppress(ParrotError):
            final.cancel()


def _summarize(cluster: Cluster, parts: list[str], begin: float) -> tuple[SessionInfo, float]:
    """The executed graph, and the seconds from the first call to the last word."""
    vm = P.VirtualMachine(cluster.core_url)
    with vm.running_scope():
        submitted = time.perf_counter()
        final = summarize(parts)
        _in_background(_cancel_when_a_server_dies, cluster, final)
        pieces = final.stream(criteria=P.PerformanceCriteria.LATENCY)
        with watching(vm.session_info, OUT):
            first = next(pieces, "")
        OUT.print(f"\n[dim]first word {time.perf_counter() - begin:.1f} s after the start[/]")
        for piece in chain([first.lstrip()], pieces, ["\n\n"]):
            sys.stdout.write(piece)  # rich would hold it back to the end of its line
            sys.stdout.flush()
        return vm.session_info(), time.perf_counter() - submitted


def _draw(info: SessionInfo, title: str, output_dir: Path) -> None:
    if not can_draw():
        OUT.print("No picture of the graph: matplotlib is not installed, see INSTALL.md")
        return
    paths = [output_dir / "graph.svg", output_dir / "graph.png"]
    with _using(output_dir):
        draw_session(info, title, paths)
    OUT.print("The executed graph: " + " and ".join(map(str, paths)))


# The program: summarize the parts of a text, then the summaries, until one is left.


def split_text(text: str, words_per_part: int = WORDS_PER_PART) -> list[str]:
    """Parts of at most so many words, of nearly equal length; whitespace becomes single blanks."""
    words = text.split()
    num_parts = -(-len(words) // words_per_part)
    bounds = [len(words) * i // num_parts for i in range(num_parts + 1)] if words else []
    return [" ".join(words[a:b]) for a, b in pairwise(bounds)]


def summarize(parts: Sequence[str | P.SemanticVariable]) -> P.SemanticVariable:
    """Submit all calls at once; nothing runs before someone reads the variable returned."""
    assert parts
    summaries = [summarize_part(part) for part in parts]
    while len(summaries) > _PARTS_AT_ONCE:
        starts = range(0, len(summaries), _PARTS_AT_ONCE)
        summaries = [_combine(summaries[start : start + _PARTS_AT_ONCE]) for start in starts]
    final: P.SemanticVariable = _combine_all(summaries)
    return final


def _prompt(name: str, body: str, max_tokens: int) -> SemanticFunction:
    """A chat whose answer is the output. Greedy, so that each run gives the same text; without the
    penalty a model of this size repeats itself."""
    sampling = P.SamplingConfig(temperature=0, max_gen_length=max_tokens, repetition_penalty=1.1)
    text = P.Parameter("text", P.ParamType.INPUT_LOC)
    summary = P.Parameter("summary", P.ParamType.OUTPUT_LOC, sampling)
    body += "{{text}}{{summary}}"
    return P.chat_template.transform(SemanticFunction(name, [text, summary], body, sep="\n- "))


_ASK = "Summarize this part of a document in one short sentence.\n\n"
_ASK_FOR_ALL = "Write a summary of the document from these notes.\n\n- "

summarize_part = _prompt("summarize_part", _ASK, _PART_TOKENS)
_combine = _prompt("combine", _ASK_FOR_ALL, _PART_TOKENS)
_combine_all = _prompt("combine", _ASK_FOR_ALL, _FINAL_TOKENS)
