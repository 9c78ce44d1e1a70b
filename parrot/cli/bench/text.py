"""Synthetic text of given token lengths, and real documents cut to token lengths."""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a prompt and its length in tokens. `is_data`: the caller passes it in at run time;
    otherwise it belongs to the function, like an instruction."""

    content: str
    tokens: int
    is_data: bool = False


class TextSource:
    """Words that are `tokens_per_word` each: one wherever they stand, or so many at the mean. The
    same key gives the same text; `salt` (of a repetition) gives other texts of the same lengths."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        salt: object = 0,
        documents: Sequence[str] | None = None,
        tokens_per_word: float = 1.0,
    ) -> None:
        self._words = words
        self._salt = salt
        self._documents = documents
        self._tokens_per_word = tokens_per_word

    def salted(self, salt: object) -> "TextSource":
        return TextSource(
            self._words,
            salt=salt,
            documents=self._documents,
            tokens_per_word=self._tokens_per_word,
        )

    def constant(self, tokens: int, *key: object) -> Text:
        rng = random.Random(hashlib.sha256(repr((self._salt, key)).encode()).digest())
        num_words = max(1, round(tokens / self._tokens_per_word))
        return Text("".join(rng.choices(self._words, k=num_words)), tokens)

    def data(self, tokens: int, *key: object) -> Text:
        return replace(self.constant(tokens, *key), is_data=True)

    def document(self, number: int, tokens: int, chunk: int) -> list[Text]:
        """A document of `tokens` in chunks, the last of which may be shorter."""
        sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
        if self._documents is None:
            return [self.data(n, "document", number, i, chunk) for i, n in enumerate(sizes)]
        pieces = _cut(self._documents[number % len(self._documents)], sizes)
        return [Text(piece, n, is_data=True) for piece, n in zip(pieces, sizes, strict=False)]


def _cut(document: str, sizes: Sequence[int]) -> Iterator[str]:
    """Parts with as many words each: a real text's tokens are counted by the server."""
    words = re.findall(r"\s*\S+", document)
    start = 0
    for size in sizes:
        if part := "".join(words[start : start + size]):
            yield part
        start += size
