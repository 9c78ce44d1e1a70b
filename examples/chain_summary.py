"""Summarise a text chunk by chunk. Each call refines the summary of the previous call.

The loop submits all calls without waiting for a value, so the service sees the whole chain."""

from pathlib import Path

from common import make_parser, run, show
from map_reduce_summary import DEFAULT_FILE, split_text

from parrot import P

BRIEF = P.SamplingConfig(temperature=0, repetition_penalty=1.1, max_gen_length=64)


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def begin(text: P.Input, summary: P.Output(BRIEF)):
    """Summarise this text in two sentences.

    {{text}} {{summary}}"""


@P.semantic_function(formatter=P.allowing_newline, conversation_template=P.chat_template)
def refine(before: P.Input, text: P.Input, summary: P.Output(BRIEF)):
    """This is the summary of a text so far: {{before}}

    The text goes on:
    {{text}}

    Summarise all of it in two sentences. {{summary}}"""


def chain(chunks: list[str]) -> list[P.SemanticVariable]:
    """The summaries after each chunk; the last is the summary of the whole."""
    summaries = [begin(chunks[0])]
    for chunk in chunks[1:]:
        summaries.append(refine(summaries[-1], chunk))
    return summaries


def main(text: str, max_chunks: int) -> None:
    chunks = split_text(text)[:max_chunks]
    summaries = chain(chunks)
    for number, summary in enumerate(summaries, 1):
        show(f"Summary after chunk {number} of {len(chunks)}", summary)


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--max-chunks", type=int, default=4, metavar="N")
    options = parser.parse_args()
    text = options.file.read_text("utf-8")
    run(P.VirtualMachine(options.core), main, text, options.max_chunks)
