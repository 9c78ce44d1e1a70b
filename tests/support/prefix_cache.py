"""The prefix cache of a simulated server."""

from bisect import bisect
from itertools import pairwise

_SIMILAR = 0.1  # The part of a prompt that must be in a slot for the prompt to use that slot.


def num_common(first: str, second: str) -> int:
    """The length of the common prefix."""
    sizes = range(min(len(first), len(second)))
    return bisect(sizes, False, key=lambda size: first[: size + 1] != second[: size + 1])


class PrefixCache:
    """Prompts with their answers, in order of use. Common prefixes count once.

    `max_chars` limits the size; None means no limit. With `max_prompts`, as in a server with that
    number of slots, a prompt replaces the most similar one."""

    def __init__(self, max_chars: int | None = None, max_prompts: int | None = None) -> None:
        self.max_chars = max_chars
        self.max_prompts = max_prompts
        self.num_hit = 0
        self.num_asked = 0
        self._kept: list[str] = []

    def find(self, prompt: str) -> int:
        """The number of cached characters of the prompt."""
        found = max((num_common(prompt, text) for text in self._kept), default=0)
        self.num_hit += found
        self.num_asked += len(prompt)
        return found

    def keep(self, text: str) -> None:
        """Add a prompt with its answer."""
        self._kept = [kept for kept in self._kept if not text.startswith(kept)]
        if self.max_prompts is not None and self._kept:
            nearest = max(self._kept, key=lambda kept: num_common(kept, text))
            if num_common(nearest, text) > _SIMILAR * len(text):
                self._kept.remove(nearest)
        self._kept.append(text)
        while self._is_full():
            del self._kept[0]

    def _is_full(self) -> bool:
        if self.max_prompts is not None and len(self._kept) > self.max_prompts:
            return True
        return self.max_chars is not None and self._num_chars() > self.max_chars

    def _num_chars(self) -> int:
        texts = sorted(self._kept)
        return sum(map(len, texts)) - sum(num_common(*pair) for pair in pairwise(texts))
