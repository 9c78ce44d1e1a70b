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
