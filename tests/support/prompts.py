"""Prompts and their prefix keys, computed without caches."""

from collections.abc import Iterable

from parrot.serve.graph.nodes import Completion
from parrot.serve.prompts.segments import (
    PrefixHasher,
    Segment,
    extend_key,
    fill_segments,
    output_segment,
)


def prompt_segments(completion: Completion) -> list[Segment]:
    """The segments of the whole prompt, one for each piece."""
    before: list[Segment] = []
    if (previous := completion.previous) is not None:
        output = previous.output
        answer = output_segment(output.text, output.tokenized, output.digest)
        before = [*prompt_segments(previous), answer]
    return [*before, *fill_segments(completion)]


def prefix_keys(
    hasher: PrefixHasher, scope: str, chat: bool, segments: Iterable[Segment]
) -> tuple[bytes, ...]:
    """One key for each segment: the key of the prompt that ends with this segment."""
    key = hasher.root(scope, chat)
    return tuple([key := extend_key(key, segment) for segment in segments])
