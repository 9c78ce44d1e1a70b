"""Summarise a long text: chunks in parallel (map), then their summaries in one call (reduce).

The program waits only for the reduce call. So the service runs the map calls as one group, for
throughput, and passes their outputs to the reduce call without a round trip."""

import re
from collections.abc import Sequence
from pathlib import Path

from common import make_parser, run, show

from parrot import P

DEFAULT_FILE = Path(__file__).resolve().parent.parent / "README.md"
CHUNK_CHARACTERS = 1600
FAN_IN = 16


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def summarize_chunk(
    chunk: P.Input,
    summary: P.Output(P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=40)),
):
    """Summarise the following part of a document in one sentence.

    {{chunk}} {{summary}}"""


def combine(vm: P.VirtualMachine, summaries: Sequence[P.SemanticVariable]) -> P.SemanticVariable:
    """Submit one call that summarises any number of summaries."""
    names = [f"summary_{number}" for number in range(len(summaries))]
    listed = "\n".join(f"{{{{{name}}}}}" for name in names)
    params = [P.Parameter(name, P.ParamType.INPUT_LOC) for name in names]
    config = P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=96)
    function = vm.define_function(
        "combine_summaries",
        f"Summarize this text in a short paragraph:\n\n{listed} {{{{final}}}}",
        [*params, P.Parameter("final", P.ParamType.OUTPUT_LOC, config)],
    )
    return P.chat_template.transform(function)(*summaries)


def split_text(text: str, max_characters: int = CHUNK_CHARACTERS) -> list[str]:
    """Chunks of whole paragraphs where that is possible, else of whole words."""
    chunks = [""]
    for word in re.findall(r"\S+\s*", text):
        is_new_paragraph = re.search(r"\n\s*\n\s*$", chunks[-1]) is not None
        room = max_characters - len(chunks[-1])
        if len(word) > room or (is_new_paragraph and room < max_characters // 4):
            chunks.append("")
        chunks[-1] += word
    return [chunk.strip() for chunk in chunks if chunk.strip()]


def map_reduce(
    vm: P.VirtualMachine, text: str
) -> tuple[list[P.SemanticVariable], P.SemanticVariable]:
    """Submit all calls; returns the chunks' summaries and the final one. Nothing runs until one of
    them is read. More than `FAN_IN` summaries are combined in several levels."""
    summaries = [summarize_chunk(chunk) for chunk in split_text(text)]
    if not summaries:
        raise ValueError("the text is empty")
    level = summaries
    while len(level) > FAN_IN:
        level = [combine(vm, level[i : i + FAN_IN]) for i in range(0, len(level), FAN_IN)]
    return summaries, combine(vm, level)


def main(vm: P.VirtualMachine, text: str) -> None:
    summaries, final = map_reduce(vm, text)
    print(f"{len(text)} characters in {len(summaries)} chunks")
    show("Summary", final)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    options = parser.parse_args()
    machine = P.VirtualMachine(options.core)
    run(machine, main, machine, options.file.read_text("utf-8"))
