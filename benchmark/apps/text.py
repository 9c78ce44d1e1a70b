"""Synthetic text of exact token lengths, and real documents cut to token lengths."""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

_WORD = re.compile(r"[a-z]{3,8}")
_MAX_WORDS = 4096
_TRIAL = 64  # words checked at once


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a prompt and its length in tokens. `is_data`: the caller passes it in at run time;
    otherwise it belongs to the function, like an instruction."""

    content: str
    tokens: int
    is_data: bool = False


class TextSource:
    """Words that are one token each wherever they stand. The same key gives the same text; `salt`
    (of a repetition) gives other texts of the same lengths."""

    def __init__(
        self, words: Sequence[str], *, salt: object = 0, documents: Sequence[str] | None = None
    ) -> None:
        self._words = words
        self._salt = salt
        self._documents = documents

    def salted(self, salt: object) -> "TextSource":
        return TextSource(self._words, salt=salt, documents=self._documents)

    def constant(self, tokens: int, *key: object) -> Text:
        rng = random.Random(hashlib.sha256(repr((self._salt, key)).encode()).digest())
        return Text("".join(rng.choices(self._words, k=tokens)), tokens)

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


def one_token_words(tokenizer_json: str, seed: int = 0) -> list[str]:
    """Texts " word" (or single letters, if the vocabulary has no words) whose sequences have one
    token each. Raises `ValueError` if the tokenizer has too few."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    candidates = _word_candidates(tokenizer) or [chr(i) for i in range(ord("a"), ord("z") + 1)]
    random.Random(seed).shuffle(candidates)
    words: list[str] = []
    for start in range(0, len(candidates), _TRIAL):
        if len(words) >= _MAX_WORDS:
            break
        trial = candidates[start : start + _TRIAL]
        words += trial if _is_exact(tokenizer, trial) else _exact_ones(tokenizer, trial)
    if len(words) < 8 or not _is_exact(tokenizer, words):
        raise ValueError("the tokenizer has too few words of one token")
    return words


def load_documents(folder: Path) -> list[str]:
    """All text files of a folder, in order of name."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".md", ".rst"))
    if not paths:
        raise ValueError(f"no .txt, .md or .rst files in {folder}")
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _word_candidates(tokenizer: Tokenizer) -> list[str]:
    """Words of letters that the vocabulary has with a space before them, as any family marks it."""
    tokens = sorted(tokenizer.get_vocab())
    return [
        " " + token[1:]
        for token in tokens
        if token[:1] in (" ", "\u0120", "\u2581") and _WORD.fullmatch(token[1:])
    ]


def _exact_ones(tokenizer: Tokenizer, trial: Sequence[str]) -> list[str]:
    return [word for word in trial if _is_exact(tokenizer, [word, word])]


def _is_exact(tokenizer: Tokenizer, words: Sequence[str]) -> bool:
    """Compared with the same text twice, because some tokenizers add a token at the beginning."""
    text = "".join(words)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    twice = tokenizer.encode(text + text, add_special_tokens=False).ids
    is_counted = len(twice) - len(ids) == len(words) and 0 <= len(ids) - len(words) <= 1
    return is_counted and tokenizer.decode(ids).strip() == text.strip()
