"""The demo's program: summarize the parts of a text, then the summaries, until one is left."""

from collections.abc import Sequence
from itertools import pairwise

from parrot import P
from parrot.frontend.pfunc.function import SemanticFunction

WORDS_PER_PART = 180
_PARTS_AT_ONCE = 8
_PART_TOKENS, _FINAL_TOKENS = 48, 128


def split_text(text: str, words_per_part: int = WORDS_PER_PART) -> list[str]:
    """Parts of at most so many words, of nearly equal length; whitespace becomes single blanks."""
    words = text.split()
    num_parts = -(-len(words) // words_per_part)
    bounds = [len(words) * i // num_parts for i in range(num_parts + 1)] if words else []
    return [" ".join(words[a:b]) for a, b in pairwise(bounds)]


def summarize(parts: Sequence[str | P.SemanticVariable]) -> P.SemanticVariable:
    """Submit all calls at once; nothing runs before someone reads the variable returned."""
    assert parts
    summaries: list[P.SemanticVariable] = [summarize_part(part) for part in parts]
    while len(summaries) > _PARTS_AT_ONCE:
        groups = [
            summaries[i : i + _PARTS_AT_ONCE] for i in range(0, len(summaries), _PARTS_AT_ONCE)
        ]
        summaries = [_combine(group, _PART_TOKENS) for group in groups]
    return _combine(summaries, _FINAL_TOKENS)


def _combine(summaries: Sequence[P.SemanticVariable], max_tokens: int) -> P.SemanticVariable:
    combined: P.SemanticVariable = _combiner(len(summaries), max_tokens)(*summaries)
    return combined


def _prompt(name: str, body: str, num_inputs: int, max_tokens: int) -> SemanticFunction:
    """A chat whose answer is the output. Greedy, so that each run gives the same text; without the
    penalty a model of this size repeats itself."""
    sampling = P.SamplingConfig(temperature=0, max_gen_length=max_tokens, repetition_penalty=1.1)
    inputs = [P.Parameter(f"text_{i}", P.ParamType.INPUT_LOC) for i in range(num_inputs)]
    output = P.Parameter("summary", P.ParamType.OUTPUT_LOC, sampling)
    return P.chat_template.transform(SemanticFunction(name, [*inputs, output], body))


summarize_part = _prompt(
    "summarize_part",
    "Summarize this part of a document in one short sentence.\n\n{{text_0}}{{summary}}",
    1,
    _PART_TOKENS,
)


def _combiner(num_inputs: int, max_tokens: int) -> SemanticFunction:
    points = "\n".join(f"- {{{{text_{i}}}}}" for i in range(num_inputs))
    body = "Write a summary of the document from these notes."
    return _prompt("combine", f"{body}\n\n{points}{{{{summary}}}}", num_inputs, max_tokens)
