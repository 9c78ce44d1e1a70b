"""The demo's program: a call finds the main fact in each part of a text. Further calls summarize
groups of facts until one text is left."""

from collections.abc import Sequence
from itertools import pairwise

from parrot import P
from parrot.frontend.pfunc.function import SemanticFunction

WORDS_PER_PART = 120
_PARTS_AT_ONCE = 8
_PART_TOKENS, _FINAL_TOKENS = 48, 128


def split_text(text: str, words_per_part: int = WORDS_PER_PART) -> list[str]:
    """The paragraphs of a text if none exceeds the limit in words. Otherwise parts of nearly equal
    length within the limit. White space becomes single spaces."""
    paragraphs = [words for part in text.split("\n\n") if (words := part.split())]
    if all(len(words) <= words_per_part for words in paragraphs):
        return [" ".join(words) for words in paragraphs]
    words = text.split()
    num_parts = -(-len(words) // words_per_part)
    bounds = [len(words) * i // num_parts for i in range(num_parts + 1)]
    return [" ".join(words[a:b]) for a, b in pairwise(bounds)]


def summarize(
    parts: Sequence[str | P.SemanticVariable],
) -> tuple[list[P.SemanticVariable], P.SemanticVariable]:
    """The variables of the facts and of their summary. Submits all calls at once. They run when a
    variable is read."""
    assert parts
    facts = [main_fact(part) for part in parts]
    summaries = facts
    while len(summaries) > _PARTS_AT_ONCE:
        starts = range(0, len(summaries), _PARTS_AT_ONCE)
        summaries = [_combine(summaries[start : start + _PARTS_AT_ONCE]) for start in starts]
    return facts, _combine_all(summaries)


def _prompt(name: str, body: str, max_tokens: int) -> SemanticFunction:
    """A chat prompt whose answer is the output. Sampling is greedy, so each run gives the same
    text. Without the penalty, a model of this size repeats itself."""
    sampling = P.SamplingConfig(temperature=0, max_gen_length=max_tokens, repetition_penalty=1.05)
    text = P.Parameter("text", P.ParamType.INPUT_LOC)
    summary = P.Parameter("summary", P.ParamType.OUTPUT_LOC, sampling)
    body += "{{text}}{{summary}}"
    return P.chat_template.transform(SemanticFunction(name, [text, summary], body, sep="\n- "))


_ASK = "What is the main fact in this text? Answer in one short sentence.\n\n"
_ASK_FOR_ALL = "Here are notes on a text. Write a summary of the text in three sentences.\n\n- "

main_fact = _prompt("main_fact", _ASK, _PART_TOKENS)
_combine = _prompt("combine", _ASK_FOR_ALL, _PART_TOKENS)
_combine_all = _prompt("combine", _ASK_FOR_ALL, _FINAL_TOKENS)
